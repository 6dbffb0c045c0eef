"""Greedy forward selection: every step against an exhaustive search, the stochastic variant, what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.gfs import GFS, Growth, MaskLoss, grow
from ispasp.types import LinearConsumer, Reading, Statistics


def problem(units: int, seed: int, batches: int = 1) -> MaskLoss:
    """The squared distance of a masked linear layer's output to the dense one, on another batch in each step."""
    generator = torch.Generator().manual_seed(seed)
    H = torch.rand(batches, 6, units, generator=generator, dtype=torch.float64)
    W = torch.randn(units, 3, generator=generator, dtype=torch.float64)

    def loss(masks: Tensor, step: int) -> Tensor:
        h = H[step % batches]
        outputs = (masks.double()[:, None, :] * h) @ W  # (m, 6, 3)
        return (outputs - h @ W).square().sum((1, 2))

    return loss


def exhaustive(units: int, s: int, loss: MaskLoss) -> tuple[list[int], list[float]]:
    """One mask at a time, in plain Python."""
    order: list[int] = []
    losses = []
    for step in range(s):
        values = {}
        for unit in range(units):
            if unit not in order:
                mask = torch.zeros(1, units)
                mask[0, [*order, unit]] = 1.0
                values[unit] = float(loss(mask, step)[0])
        order.append(min(values, key=lambda unit: values[unit]))
        losses.append(values[order[-1]])
    return order, losses


def as_addition(loss: MaskLoss) -> object:
    def added(kept: Tensor, tried: Tensor, step: int) -> Tensor:
        return torch.cat([loss((kept | (torch.arange(len(kept)) == unit))[None], step) for unit in tried])

    return added


@settings(max_examples=40, deadline=None)
@given(units=st.integers(1, 7), seed=st.integers(0, 10_000), batches=st.integers(1, 4), data=st.data())
def test_every_step_is_the_best_of_all(units: int, seed: int, batches: int, data: st.DataObject) -> None:
    s = data.draw(st.integers(1, units))
    loss = problem(units, seed, batches)
    order, losses = exhaustive(units, s, loss)
    found = grow(units, s, as_addition(loss))  # type: ignore[arg-type]
    assert list(found.order) == order
    assert list(found.losses) == pytest.approx(losses)
    by_masks = GFS().forward(units, s, loss)
    assert list(by_masks.order) == order
    assert [by_masks.kept(k + 1) for k in range(s)] == [tuple(sorted(order[: k + 1])) for k in range(s)]
    statistics = Statistics(units, (Reading(LinearConsumer(torch.eye(units))),), task=loss)
    selection = GFS().select(statistics, s)
    assert [step.kept for step in selection.steps] == [by_masks.kept(k + 1) for k in range(s)]
    assert selection.kept == selection.steps[-1].kept


def test_greedy_is_not_always_the_best_set() -> None:
    target, outputs = torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 0.0], [0.6, 0.6], [0.0, 1.0]])

    def loss(masks: Tensor, step: int) -> Tensor:
        return (masks @ outputs - target).square().sum(1)

    best = min(itertools.combinations(range(3), 2), key=lambda pair: float(loss(_mask(3, pair), 0)[0]))
    assert best == (0, 2)
    assert GFS().forward(3, 2, loss).kept(2) == (0, 1)  # the middle one comes first, and nothing goes out again


def _mask(units: int, kept: tuple[int, ...]) -> Tensor:
    mask = torch.zeros(1, units)
    mask[0, list(kept)] = 1.0
    return mask


@pytest.mark.parametrize("seed", range(5))
def test_planted_units_are_found(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.linalg.qr(torch.randn(12, 12, generator=generator)).Q  # orthogonal: no unit hides another
    planted = torch.randperm(12, generator=generator)[:4]
    target = outputs[planted].sum(0)
    found = GFS().forward(12, 4, lambda masks, step: (masks @ outputs - target).square().sum(1))
    assert found.kept(4) == tuple(sorted(planted.tolist()))


@pytest.mark.parametrize("seed", range(5))
def test_units_in_another_order_give_the_same_units(seed: int) -> None:
    loss = problem(9, seed, batches=3)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    kept = GFS().forward(9, 4, loss).kept(4)

    def shuffled(masks: Tensor, step: int) -> Tensor:
        back = torch.zeros_like(masks)
        back[:, order] = masks  # unit j of the shuffled problem is unit order[j]
        return loss(back, step)

    again = GFS().forward(9, 4, shuffled).kept(4)
    assert tuple(sorted(order[list(again)].tolist())) == kept


def test_the_lowest_index_comes_first_among_equals() -> None:
    assert grow(4, 3, lambda kept, tried, step: torch.full((len(tried),), 0.1 + 0.2)).order == (0, 1, 2)
    nearly = torch.tensor([0.3, 0.1 + 0.2, 0.3], dtype=torch.float64)
    assert grow(3, 1, lambda kept, tried, step: nearly).order == (0,)


def test_steps_are_numbered_and_masks_hold_the_set_and_one_more() -> None:
    seen: list[tuple[int, Tensor]] = []

    def loss(masks: Tensor, step: int) -> Tensor:
        seen.append((step, masks))
        return -(masks @ torch.arange(5.0))

    GFS().forward(5, 0.6, loss)
    assert [step for step, _ in seen] == [0, 1, 2]
    assert [tuple(masks.shape) for _, masks in seen] == [(5, 5), (4, 5), (3, 5)]
    assert torch.equal(seen[2][1].sum(0), torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0]))


def test_a_larger_growth_begins_with_the_smaller_one() -> None:
    loss = as_addition(problem(10, 3, batches=10))
    large, small = grow(10, 8, loss), grow(10, 3, loss)  # type: ignore[arg-type]
    assert large.order[:3] == small.order
    assert large.kept(3) == small.kept(3) == tuple(sorted(small.order))


def recorded(candidates: int | None, seed: int, s: int = 6) -> tuple[Growth, list[Tensor]]:
    tried: list[Tensor] = []
    loss = as_addition(problem(10, 0, batches=6))

    def record(kept: Tensor, candidates: Tensor, step: int) -> Tensor:
        assert not bool(kept[candidates].any())
        tried.append(candidates)
        return loss(kept, candidates, step)  # type: ignore[operator,no-any-return]

    return grow(10, s, record, candidates, seed), tried


@pytest.mark.parametrize("seed", range(4))
def test_the_stochastic_variant_takes_the_best_of_its_draw(seed: int) -> None:
    found, tried = recorded(candidates=7, seed=seed)
    assert [len(draw) for draw in tried] == [7, 7, 7, 7, 6, 5]  # never more than are out
    loss = problem(10, 0, batches=6)
    for step, draw in enumerate(tried):
        assert draw.tolist() == sorted(set(draw.tolist()))
        values = {u: float(loss(_mask(10, (*found.order[:step], u)), step)[0]) for u in draw.tolist()}
        assert found.order[step] == min(values, key=lambda u: values[u])


def test_draws_follow_the_seed_and_reach_every_unit() -> None:
    assert recorded(4, seed=1)[0] == recorded(4, seed=1)[0]
    draws = [recorded(4, seed, s=1)[1][0].tolist() for seed in range(30)]
    assert len(set(map(tuple, draws))) > 10
    assert {unit for draw in draws for unit in draw} == set(range(10))


def test_as_many_candidates_as_units_is_the_vanilla_variant() -> None:
    assert recorded(10, seed=5)[0] == recorded(None, seed=0)[0]
    loss = problem(8, 1)
    assert GFS(candidates=3, seed=4).forward(8, 5, loss).order == grow(8, 5, as_addition(loss), 3, 4).order  # type: ignore[arg-type]


def test_a_unit_that_overflows_the_loss_comes_last() -> None:
    values = torch.tensor([float("inf"), 2.0, 1.0])
    assert grow(3, 2, lambda kept, tried, step: values[tried]).order == (2, 1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: GFS(candidates=0), "candidates=0: pass an integer >= 1"),
        (lambda: GFS(candidates=True), "candidates=True"),
        (lambda: GFS(seed=-1), "seed=-1: pass an integer from 0"),
        (lambda: grow(3, 4, lambda k, t, s: torch.zeros(len(t))), "keep=4 asks for more"),
        (lambda: grow(3, 1, lambda k, t, s: torch.zeros(2)), r"loss of 3 candidates came as \(2,\)"),
        (lambda: grow(3, 1, lambda k, t, s: [1.0] * 3), "came as list"),  # type: ignore[arg-type,return-value]
        (lambda: grow(3, 1, lambda k, t, s: torch.tensor([1.0, torch.nan, 2.0])), "1 of 3 losses are not finite"),
        (lambda: grow(2, 1, lambda k, t, s: torch.full((2,), torch.inf)), "2 of 2 losses are not finite"),
        (lambda: grow(2, 1, lambda k, t, s: torch.tensor([-torch.inf, 1.0])), "1 of 2 losses are not finite"),
    ],
)
def test_bad_input_is_refused(call, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=says):
        call()


def test_statistics_alone_are_refused_with_a_remedy() -> None:
    statistics = Statistics(2, (Reading(LinearConsumer(torch.eye(2))),))
    with pytest.raises(InputError, match="choose gfs-local"):
        GFS().select(statistics, 1)
