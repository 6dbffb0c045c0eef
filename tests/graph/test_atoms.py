"""Axes as products and concatenations of atoms: checked position by position against plain index arithmetic."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from ispasp.graph.atoms import (
    Atom,
    Axis,
    Reason,
    cut,
    flatten,
    freeze,
    is_frozen,
    length,
    live_atoms,
    new_axis,
    resolve,
    split,
    unite,
)

WHY = Reason("test")


def labels(axis: Axis) -> torch.Tensor:
    """For every position the tuple of (atom, index) it is made of, as a set."""
    rows = []
    for segment in resolve(axis):
        index = torch.zeros(1, 0, dtype=torch.long)
        for atom in segment:
            own = torch.arange(atom.size).repeat(len(index))
            index = torch.cat([index.repeat_interleave(atom.size, 0), own[:, None]], 1)
        rows += [{(id(a), int(i)) for a, i in zip(segment, row, strict=True)} for row in index]
    return rows


def removed(axis: Axis, atom: Atom, index: int) -> list[bool]:
    return [(id(atom.root()), index) in row for row in labels(axis)]


def test_a_view_into_heads_refines_every_occurrence() -> None:
    weight = new_axis(12)
    out = weight
    heads, inner = split(out, [3, 4], WHY)
    assert [[a.size for a in s] for s in resolve(weight)] == [[3, 4]]
    (head,) = resolve(heads)[0]
    assert removed(weight, head, 1) == [False] * 4 + [True] * 4 + [False] * 4
    assert flatten([heads, inner]) != weight and labels(flatten([heads, inner])) == labels(weight)


def test_a_channel_shuffle_moves_positions() -> None:
    channels = new_axis(6)
    groups, inner = split(channels, [2, 3], WHY)
    shuffled = flatten([inner, groups])
    before, after = labels(channels), labels(shuffled)
    assert [before.index(row) for row in after] == torch.arange(6).view(2, 3).T.flatten().tolist()


def test_a_cat_read_by_a_weight_cuts_the_weight() -> None:
    a, b, weight = new_axis(3), new_axis(5), new_axis(8)
    unite((*a, *b), weight, WHY)
    assert labels(weight) == [*labels(a), *labels(b)]


def test_gate_and_up_lose_the_same_positions() -> None:
    fused = new_axis(8)
    gate, up = cut(fused, 0, 4, WHY), cut(fused, 4, 8, WHY)
    unite(gate, up, WHY)
    (atom,) = live_atoms(fused)
    assert removed(fused, atom, 2) == [i % 4 == 2 for i in range(8)]


def test_a_concatenation_inside_a_product_is_frozen() -> None:
    width = new_axis(8)
    heads, inner = split(width, [2, 4], WHY)
    cut(inner, 0, 2, WHY)  # rotary embeddings halve the channels of a head
    (head,) = resolve(heads)[0]
    assert live_atoms(width) == {head}
    assert "concatenation" in str(resolve(width)[0][1].frozen)


def test_different_factorisations_meet_in_common_factors() -> None:
    x, y = new_axis(24), new_axis(24)
    split(x, [4, 6], WHY)
    split(y, [2, 12], WHY)
    unite(x, y, WHY)
    assert [[a.size for a in s] for s in resolve(x)] == [[2, 2, 6]]
    assert labels(x) == labels(y)


def test_what_does_not_fit_together_is_frozen() -> None:
    x, y = new_axis(6), new_axis(6)
    split(x, [2, 3], WHY)
    split(y, [3, 2], WHY)
    unite(x, y, WHY)
    assert is_frozen(x) and is_frozen(y)


def test_freezing_spreads_to_all_that_is_united() -> None:
    x, y, z = new_axis(4), new_axis(4), new_axis(4)
    unite(x, y, WHY)
    unite(y, z, WHY)
    freeze(z, Reason("reaches the output", "out"))
    assert is_frozen(x)
    assert str(resolve(x)[0][0].frozen) == "reaches the output (out)"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_splitting_and_flattening_keep_the_order(before: list[int], after: list[int]) -> None:
    size = int(torch.tensor(before).prod())
    axis = new_axis(size)
    whole = flatten(split(axis, before, WHY)) if len(before) > 1 else axis
    assert labels(whole) == labels(axis)
    if int(torch.tensor(after).prod()) == size:
        again = flatten(split(axis, after, WHY)) if len(after) > 1 else axis
        assert is_frozen(axis) or labels(again) == labels(axis)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_cuts_are_the_positions_they_name(sizes: list[int], data: st.DataObject) -> None:
    parts = [new_axis(n) for n in sizes]
    axis = tuple(segment for part in parts for segment in part)
    total = length(axis)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    piece = cut(axis, start, stop, WHY)
    assert length(piece) == stop - start
    assert labels(piece) == labels(axis)[start:stop]
