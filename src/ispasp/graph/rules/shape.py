"""Ops that rearrange axes: views, permutations, concatenations and cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ispasp.graph.atoms import UNKNOWN, Axis, Reason, cut, flatten, freeze, is_frozen, length, new_axis, split
from ispasp.graph.track import Tracker, Value, common_parameters, fresh, rule

_CUT_BY_DATA = "is cut at a place that depends on the data"


def _by_data(node: fx.Node, x: Value, why: str) -> Any:
    """A result whose axes have no known relation to those of x."""
    x.freeze(reason := Reason(why, node.name))
    return fresh(node, reason)


@rule("view _unsafe_view reshape flatten unflatten view_as reshape_as squeeze unsqueeze squeeze_ unsqueeze_")
def _view(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Any:
    """Merge and split axes by the sizes before and after."""
    before, after = [length(axis) for axis in x.axes], list(t.shape(node))
    if UNKNOWN in before or UNKNOWN in after or 0 in before:
        return _by_data(node, x, "has no entries" if 0 in before else "is reshaped to a size that depends on the data")
    reason = Reason("is reshaped across its structure", node.name)
    axes: list[Axis] = []
    for sources, targets in _matched(before, after):
        if after[targets]:
            axes += split(flatten(x.axes[sources]), after[targets], reason)
    return x.with_axes(axes)


def _matched(before: list[int], after: list[int]) -> Iterator[tuple[slice, slice]]:
    """Smallest groups of dimensions with equal products."""
    i = j = 0
    while i < len(before) or j < len(after):
        sources, targets = i, j
        if i < len(before) and (j >= len(after) or before[i] == 1 != after[j]):  # a dimension of size 1 goes
            i += 1
        elif i >= len(before) or after[j] == 1 != before[i]:  # a dimension of size 1 comes
            j += 1
        else:
            i, j = i + 1, j + 1
            while (p := math.prod(before[sources:i])) != (q := math.prod(after[targets:j])):
                i, j = (i + 1, j) if p < q else (i, j + 1)
        yield slice(sources, i), slice(targets, j)


@rule("permute transpose transpose_ swapaxes swapdims t numpy_T mT adjoint movedim.int movedim.intlist")
def _permute(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    """Read where each axis goes from what the op does to a tensor of distinct sizes."""
    sizes = torch.empty(tuple(range(1, len(x.axes) + 1)), device="meta")
    moved = node.target(sizes, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return x.with_axes(x.axes[size - 1] for size in moved.shape)


def _padded(x: Value, rank: int) -> list[Axis]:
    return [((),)] * (rank - len(x.axes)) + list(x.axes)


@rule("expand expand_as broadcast_to")
def _expand(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    """Copies of a position. Any may go where nothing else of the tensor can, as in a mask for all heads."""
    shape = t.shape(node)
    reason = None if all(map(is_frozen, x.axes)) else Reason("is made by expand", node.name)
    pairs = zip(_padded(x, len(shape)), shape, strict=True)
    return x.with_axes(axis if length(axis) == n else new_axis(n, reason) for axis, n in pairs)


@rule("repeat.default tile.default")
def _repeat(t: Tracker, node: fx.Node, x: Value, **repeats: list[int]) -> Value:
    """The whole axis again and again: the copies are the slow factor."""
    (times,) = repeats.values()
    own = _padded(x, len(times))
    pairs = zip(own, [1] * (len(own) - len(times)) + list(times), strict=True)
    return x.with_axes(axis if n == 1 else flatten([t.new(node, n, "counts copies"), axis]) for axis, n in pairs)


@rule("repeat_interleave.self_int")
def _repeat_interleave(t: Tracker, node: fx.Node, x: Value, repeats: int, dim: int | None, **_: Any) -> Value:
    """Each position again and again: the copies are the fast factor."""
    if dim is None:
        x, dim = x.with_axes([flatten(x.axes)]), 0
    return x.with_axis(dim, flatten([x.axes[dim], t.new(node, repeats, "counts copies")]))


@rule("cat.default concat.default concatenate.default")
def _cat(t: Tracker, node: fx.Node, tensors: list[Value], dim: int = 0) -> Value:
    tensors = [value for value in tensors if not (len(value.axes) == 1 and length(value.axes[0]) == 0)]
    axes = list(tensors[0].axes)
    dim %= len(axes)
    for k in range(len(axes)):
        for other in tensors[1:]:
            if k != dim:
                axes[k] = t.unite(node, axes[k], other.axes[k])
    axes[dim] = tuple(segment for value in tensors for segment in value.axes[dim])
    return Value(tuple(axes), common_parameters(tensors))


@rule("stack.default")
def _stack(t: Tracker, node: fx.Node, tensors: list[Value], dim: int = 0) -> Value:
    axes = list(tensors[0].axes)
    for other in tensors[1:]:
        axes = [t.unite(node, a, b) for a, b in zip(axes, other.axes, strict=True)]
    axes.insert(dim % (len(axes) + 1), t.new(node, len(tensors), "counts stacked tensors"))
    return Value(tuple(axes), common_parameters(tensors))


def _piece(node: fx.Node, x: Value, dim: int, start: int, stop: int) -> Value:
    return x.with_axis(dim, cut(x.axes[dim], start, stop, Reason("is cut across its structure", node.name)))


@rule("split_with_sizes split.sizes tensor_split")
def _pieces(t: Tracker, node: fx.Node, x: Value, dim: int = 0, **_: Any) -> Any:
    found, start = [], 0
    for part in node.meta["val"]:
        size = part.shape[dim]
        if not isinstance(size, int):
            return _by_data(node, x, _CUT_BY_DATA)
        found.append(_piece(node, x, dim, start, start + size))
        start += size
    return found


@rule("chunk unsafe_chunk split.Tensor unsafe_split")
def _equal_pieces(t: Tracker, node: fx.Node, x: Value, dim: int = 0, **_: Any) -> Any:
    """Parts of one size: they must lose the same positions, or their ends would move."""
    found = _pieces(t, node, x, dim)
    for other in found[1:]:
        if length(other.axes[dim]) == length(found[0].axes[dim]):
            t.unite(node, found[0].axes[dim], other.axes[dim])
        else:
            t.freeze(node, x, [dim], "is cut into unequal parts")
    return found


@rule("slice.Tensor")
def _slice(t: Tracker, node: fx.Node, x: Value, dim: int, start: Any, end: Any, step: int) -> Any:
    """One cut; a step takes single positions, which freezes the axis."""
    size = length(x.axes[dim])
    if size == UNKNOWN or not all(isinstance(value, (int, type(None))) for value in (start, end)):
        return _by_data(node, x, _CUT_BY_DATA)
    if step != 1:
        return t.remake(node, x, [dim], "is sampled by position")
    first, last, _ = slice(start, end).indices(size)
    return _piece(node, x, dim, first, max(first, last))


@rule("narrow.default")
def _narrow(t: Tracker, node: fx.Node, x: Value, dim: int, start: int, length: int) -> Value:
    return _piece(node, x, dim, start, start + length)


@rule("glu.default")
def _glu(t: Tracker, node: fx.Node, x: Value, dim: int = -1) -> Value:
    half = length(x.axes[dim]) // 2
    a, b = _piece(node, x, dim, 0, half), _piece(node, x, dim, half, 2 * half)
    return x.with_axis(dim, t.unite(node, a.axes[dim], b.axes[dim]))


@rule("channel_shuffle native_channel_shuffle")
def _channel_shuffle(t: Tracker, node: fx.Node, x: Value, groups: int) -> Value:
    """(groups, rest) -> (rest, groups) on axis 1."""
    sizes = [groups, length(x.axes[1]) // groups]
    outer, inner = split(x.axes[1], sizes, Reason("is shuffled across its structure", node.name))
    freeze(outer, Reason("counts the groups of a shuffle", node.name))
    return x.with_axis(1, flatten([inner, outer]))


def _space(t: Tracker, node: fx.Node, count: int) -> list[Axis]:
    return [t.new(node, size, "is spatial") for size in t.shape(node)[-count:]]


@rule("pixel_shuffle.default col2im.default")
def _to_space(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    """A fast factor of the channels goes into space."""
    at, count = len(t.shape(node)) - 3, t.shape(node)[-3]
    reason = Reason("is spread over space", node.name)
    channels, inner = split(x.axes[at], [count, length(x.axes[at]) // count], reason)
    freeze(inner, reason)
    return x.with_axes([*x.axes[:at], channels, *_space(t, node, 2)])


@rule("pixel_unshuffle.default im2col.default")
def _from_space(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    """Space goes into channels as a fast factor."""
    at, shape = len(x.axes) - 3, t.shape(node)
    inner = t.new(node, shape[at] // length(x.axes[at]), "comes from space")
    return x.with_axes([*x.axes[:at], flatten([x.axes[at], inner]), *_space(t, node, len(shape) - at - 1)])


@rule("constant_pad_nd.default pad.default")
def _pad(t: Tracker, node: fx.Node, x: Value, pad: list[int], mode: str = "constant", **_: Any) -> Any:
    """Constant padding adds frozen positions; other modes freeze the axes they copy from."""
    for k in range(len(pad) // 2):
        before, after = pad[2 * k : 2 * k + 2]
        dim = len(x.axes) - 1 - k
        if mode != "constant" or before < 0 or after < 0:
            if (before, after) != (0, 0):
                x = t.remake(node, x, [dim], "is padded with its own values, or cropped")
            continue
        ends = [t.new(node, n, "is padding") for n in (before, after)]
        x = x.with_axis(dim, (*ends[0], *x.axes[dim], *ends[1]))
    return x
