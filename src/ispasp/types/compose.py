"""Two plans as one: which positions of the dense model are left after a first and a second plan.

The first extent of an axis describes the dense model, the second what the first plan leaves of it. Both are walked side
by side. Factors that meet are one hidden dimension of the composed plan. Where they do not meet, because the second
survey saw a finer or a coarser dimension, the positions of the group are the units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ispasp.errors import PlanError
from ispasp.types.dimension import (
    Attribute,
    Extent,
    Factor,
    Kept,
    Structure,
    TensorLayout,
    distinct,
    full_length,
    kept_length,
    kept_mask,
    names_in,
    without,
)

_UNCHANGED = "compose plans of one model that was not changed in between"
Units = dict[str, tuple[int, ...]]
Segment = tuple[Factor, ...]
Part = tuple[Extent, Extent]  # a part of the dense axis, and what the second plan sees in its place
Axis = list[list[Part]]  # segments of parts


def compose(first: Kept, one: Structure, second: Kept, two: Structure) -> tuple[Units, Structure]:
    """The units that both plans keep, in indices of the dense model, and where they lie in it.

    `one` is the structure of the dense model, `two` that of the model which the first plan leaves.
    """
    if one.model != two.model:
        raise PlanError(f"plans of {one.model} and {two.model} do not follow each other: compose plans of one model")
    dense = {name: one.tensors.get(name) or _before(first, one, two, name) for name in {**one.tensors, **two.tensors}}
    tensors = {name: _tensor_axes(first, second, name, dense[name], two.tensors.get(name)) for name in dense}
    attributes = _attribute_axes(first, one, second, two)
    all_axes = [*(axis for axes in tensors.values() for axis in axes), *attributes.values()]
    names = _names(part for axis in all_axes for segment in axis for part in segment)

    def extent(axis: Axis) -> Extent:
        return tuple(tuple((names.get(part), full_length(part[0])) for part in segment) for segment in axis)

    layouts = {}
    for name, axes in tensors.items():
        extents = {number: extent(axis) for number, axis in enumerate(axes)}
        layouts[name] = TensorLayout(dense[name].shape, {number: e for number, e in extents.items() if names_in(e)})
    structure = Structure(
        one.model,
        {name: full_length(part[0]) for part, name in names.items()},
        layouts,
        tuple(Attribute(*number, extent(axis)) for number, axis in attributes.items()),
        tuple(dict.fromkeys((*one.weight_norms, *two.weight_norms))),
        tuple(dict.fromkeys((*one.biases, *two.biases))),
        tuple(dict.fromkeys((*one.folded, *two.folded))),
    )
    kept: Units = {}
    for (before, after), name in names.items():
        positions = torch.nonzero(kept_mask(before, first)).flatten()
        kept[name] = tuple(positions[kept_mask(after, second)].tolist())
    return kept, structure


def _tensor_axes(first: Kept, second: Kept, name: str, dense: TensorLayout, pruned: TensorLayout | None) -> list[Axis]:
    if pruned is not None and len(pruned.shape) != len(dense.shape):
        raise PlanError(
            f"{name!r} has {len(dense.shape)} axes in one plan, {len(pruned.shape)} in the next: {_UNCHANGED}"
        )
    axes = []
    for axis, size in enumerate(dense.shape):
        before = dense.axes.get(axis, _whole(size))
        left = kept_length(before, first)
        after = _whole(left) if pruned is None else pruned.axes.get(axis, _whole(pruned.shape[axis]))
        axes.append(_axis(first, second, f"axis {axis} of {name!r}", before, after))
    return axes


def _attribute_axes(first: Kept, one: Structure, second: Kept, two: Structure) -> dict[tuple[str, str], Axis]:
    ones, twos = ({(a.module, a.name): a.extent for a in structure.attributes} for structure in (one, two))
    axes = {}
    for number in {**ones, **twos}:
        dense = ones.get(number) or _whole(full_length(twos[number]))
        pruned = twos.get(number) or _whole(kept_length(dense, first))
        axes[number] = _axis(first, second, ".".join(number), dense, pruned)
    return axes


def _before(first: Kept, one: Structure, two: Structure, name: str) -> TensorLayout:
    """The dense layout of a tensor that only the second plan names: it lost nothing, or is a new bias."""
    found, path = two.tensors[name], name.removesuffix(".bias")
    weight, after = one.tensors.get(f"{path}.weight"), two.tensors.get(f"{path}.weight")
    if path in two.biases and weight is not None:
        for axis, size in enumerate(weight.shape[:2]):  # the outputs: axis 0, or 1 where the layer is transposed
            extent = weight.axes.get(axis, _whole(size))
            alike = after is None or after.axes.get(axis) == found.axes.get(0)
            if alike and (kept_length(extent, first),) == found.shape:
                return TensorLayout((size,), {0: extent})
    return TensorLayout(found.shape, {})


def _axis(first: Kept, second: Kept, what: str, dense: Extent, pruned: Extent) -> Axis:
    left, found = kept_length(dense, first), full_length(pruned)
    if left != found:
        raise PlanError(f"the first plan leaves {left} of {what}, the second was made for {found}: {_UNCHANGED}")
    ones = without(dense, names_in(dense) - set(first))
    twos = [s for s in without(pruned, names_in(pruned) - set(second)) if full_length((s,))]
    axis = []
    for a, b in _groups(ones, twos, first, product=False):
        if not b:  # gone entirely
            axis += [[(_plain(((f,),)), _whole(kept_length(((f,),), first))) for f in segment] for segment in a]
        elif len(a) == len(b) == 1:
            factors = _groups([(f,) for f in a[0]], [(f,) for f in b[0]], first, product=True)
            axis.append([(_plain((sum(c, ()),)), _plain((sum(d, ()),))) for c, d in factors])
        else:
            axis.append([(_plain(tuple(a)), _plain(tuple(b)))])
    return axis


def _groups(
    ones: Iterable[Segment], twos: Iterable[Segment], first: Kept, *, product: bool
) -> Iterator[tuple[list[Segment], list[Segment]]]:
    """Walk two sequences of the same total length, and yield the shortest groups that end at the same place.

    Lengths add up, or multiply where segments are the factors of a product. A segment that reaches beyond the place
    where the other side stands is divided there, if that can be done.
    """
    left, at = (list(ones), list(twos)), [int(product)] * 2
    group: tuple[list[Segment], list[Segment]] = ([], [])
    while left[0] or left[1]:
        lengths = {k: kept_length((left[k][0],), {} if k else first) for k in (0, 1) if left[k]}
        side = min(lengths, key=lambda k: (at[k], lengths[k]))  # the one behind; at the same place, the shorter one
        divide = _divided_factor if product else _divided_segment
        segment, *rest = divide(left[side].pop(0), lengths[side], at[side], at[1 - side])
        left[side][:0] = rest
        group[side].append(segment)
        length = kept_length((segment,), {} if side else first)
        at[side] = at[side] * length if product else at[side] + length
        if at[0] == at[1]:
            yield group
            group = ([], [])


def _divided_segment(segment: Segment, size: int, at: int, goal: int) -> list[Segment]:
    (name, times), *rest = segment if names_in((segment,)) else ((None, size),)
    part, over = divmod(goal - at, size // times) if name is None and size else (0, 0)
    if over or not 0 < part < times:
        return [segment]
    return [((None, part), *rest), ((None, times - part), *rest)]


def _divided_factor(segment: Segment, size: int, at: int, goal: int) -> list[Segment]:
    times, over = divmod(goal, at)
    if names_in((segment,)) or over or not 1 < times < size or size % times:
        return [segment]
    return [((None, times),), ((None, size // times),)]


def _plain(extent: Extent) -> Extent:
    return extent if names_in(extent) else _whole(full_length(extent))


def _whole(size: int) -> Extent:
    return (((None, size),),)


def _names(parts: Iterable[Part]) -> dict[Part, str]:
    """A name for each part that holds units: its dense name, with a number where that is taken.

    Single factors of one name come first, then single factors of two names, then groups.
    """

    def strangeness(part: Part) -> tuple[int, bool]:
        return sum(len(segment) for extent in part for segment in extent), names_in(part[0]) != names_in(part[1])

    given: dict[str, Part] = {}
    for part in sorted(dict.fromkeys(p for p in parts if names_in(p[0]) | names_in(p[1])), key=strangeness):
        given[distinct(min(names_in(part[0]) or names_in(part[1])), given, "{}~{}")] = part
    return {part: name for name, part in given.items()}
