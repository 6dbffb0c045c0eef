"""Ops that rearrange axes: views, permutations, concatenations and cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ispasp.graph.atoms import UNKNOWN, Axis, Reason, flatten, length, split
from ispasp.graph.atoms import cut as cut_axis
from ispasp.graph.rules.pointwise import overloads
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import Value, fresh

aten = torch.ops.aten


def with_axes(value: Value, axes: Sequence[Axis]) -> Value:
    """The same value with other axes."""
    return Value(tuple(axes), value.parameters)


@rule(
    *overloads(
        [
            "view",
            "_unsafe_view",
            "reshape",
            "flatten",
            "unflatten",
            "view_as",
            "reshape_as",
            "squeeze",
            "unsqueeze",
            "squeeze_",
            "unsqueeze_",
        ]
    )
)
def view(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    """Axes are merged and split as the sizes before and after tell."""
    before, after = [length(axis) for axis in x.axes], list(t.shape(node))
    if UNKNOWN in before or UNKNOWN in after:
        reason = Reason("is reshaped to a size that depends on the data", node.name)
        x.freeze(reason)
        return fresh(node, reason)  # type: ignore[no-any-return]
    reason = Reason("is reshaped across its structure", node.name)
    axes: list[Axis] = []
    for sources, targets in _matched(before, after):
        whole = flatten([x.axes[i] for i in sources])
        axes += split(whole, [after[j] for j in targets], reason) if targets else []
    return with_axes(x, axes)


def _matched(before: list[int], after: list[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of dimensions with equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        sources: list[int] = []
        targets: list[int] = []
        p = q = 1
        if i < len(before) and (j >= len(after) or before[i] == 1 != after[j]):
            groups.append(([i], []))  # a dimension of size 1 goes
            i += 1
            continue
        if j < len(after) and (i >= len(before) or after[j] == 1 != before[i]):
            groups.append(([], [j]))  # a dimension of size 1 comes
            j += 1
            continue
        while not sources or p != q:
            if p <= q and i < len(before):
                p, i, sources = p * before[i], i + 1, [*sources, i]
            else:
                q, j, targets = q * after[j], j + 1, [*targets, j]
        groups.append((sources, targets))
    return groups


@rule(aten.permute.default)
def permute(t: Tracker, node: fx.Node, x: Value, dims: list[int]) -> Value:
    """Axes in another order."""
    return with_axes(x, [x.axes[dim] for dim in dims])


@rule(*overloads(["transpose.int", "transpose_.default", "swapaxes", "swapdims"]))
def transpose(t: Tracker, node: fx.Node, x: Value, **dims: int) -> Value:
    """Two axes change places."""
    a, b = dims.values()
    axes = list(x.axes)
    axes[a], axes[b] = axes[b], axes[a]
    return with_axes(x, axes)


@rule(*overloads(["t", "numpy_T", "mT", "adjoint"]))
def turned(t: Tracker, node: fx.Node, x: Value) -> Value:
    """A matrix transposed."""
    if len(x.axes) > 2 and "numpy" not in str(node.target):
        return with_axes(x, [*x.axes[:-2], x.axes[-1], x.axes[-2]])
    return with_axes(x, x.axes[::-1])


@rule(*overloads(["movedim.int", "movedim.intlist"]))
def movedim(t: Tracker, node: fx.Node, x: Value, source: Any, destination: Any) -> Value:
    """Axes moved, the others in order."""
    sources = [source] if isinstance(source, int) else source
    targets = [destination] if isinstance(destination, int) else destination
    n = len(x.axes)
    order: list[int | None] = [None] * n
    for s, d in zip(sources, targets, strict=True):
        order[d % n] = s % n
    rest = iter(i for i in range(n) if i not in {s % n for s in sources})
    return with_axes(x, [x.axes[i if i is not None else next(rest)] for i in order])


@rule(*overloads(["expand", "expand_as", "broadcast_to"]))
def expand(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    """Axes of size 1 are repeated."""
    shape = t.shape(node)
    own = [((),)] * (len(shape) - len(x.axes)) + list(x.axes)
    axes = [
        axis if length(axis) == size else t.new(node, size, "is made by expand")
        for axis, size in zip(own, shape, strict=True)
    ]
    return with_axes(x, axes)


@rule(aten.repeat.default, aten.tile.default)
def repeat(t: Tracker, node: fx.Node, x: Value, **repeats: list[int]) -> Value:
    """The whole axis again and again: the copies are the slow factor."""
    (times,) = repeats.values()
    own = [((),)] * (len(times) - len(x.axes)) + list(x.axes)
    times = [1] * (len(own) - len(times)) + list(times)
    return with_axes(
        x,
        [
            axis if n == 1 else flatten([t.new(node, n, "counts copies"), axis])
            for axis, n in zip(own, times, strict=True)
        ],
    )


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(t: Tracker, node: fx.Node, x: Value, repeats: int, dim: int | None, output_size: Any) -> Value:
    """Each position again and again: the copies are the fast factor."""
    axes = [flatten(x.axes)] if dim is None else list(x.axes)
    at = 0 if dim is None else dim
    axes[at] = flatten([axes[at], t.new(node, repeats, "counts copies")])
    return with_axes(x, axes)


@rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cat(t: Tracker, node: fx.Node, tensors: list[Value], dim: int = 0) -> Value:
    """Axes in a row along one dimension, united along the others."""
    tensors = [value for value in tensors if not (len(value.axes) == 1 and length(value.axes[0]) == 0)]
    first = tensors[0]
    dim %= len(first.axes)
    axes = list(first.axes)
    for k in range(len(axes)):
        for other in tensors[1:]:
            if k != dim:
                axes[k] = t.unite(node, axes[k], other.axes[k])
    axes[dim] = tuple(segment for value in tensors for segment in value.axes[dim])
    parameters = [value.parameters for value in tensors]
    return Value(tuple(axes), frozenset().union(*parameters) if all(parameters) else frozenset())


@rule(aten.stack.default)
def stack(t: Tracker, node: fx.Node, tensors: list[Value], dim: int = 0) -> Value:
    """A new axis over the tensors."""
    axes = list(tensors[0].axes)
    for other in tensors[1:]:
        axes = [t.unite(node, a, b) for a, b in zip(axes, other.axes, strict=True)]
    axes.insert(dim % (len(axes) + 1), t.new(node, len(tensors), "counts stacked tensors"))
    parameters = [value.parameters for value in tensors]
    return Value(tuple(axes), frozenset().union(*parameters) if all(parameters) else frozenset())


def piece(node: fx.Node, x: Value, dim: int, start: int, stop: int) -> Value:
    """Positions start..stop along one dimension."""
    axes = list(x.axes)
    axes[dim] = cut_axis(axes[dim], start, stop, Reason("is cut across its structure", node.name))
    return with_axes(x, axes)


@rule(*overloads(["chunk", "unsafe_chunk", "split.Tensor", "unsafe_split"]))
def equal_pieces(t: Tracker, node: fx.Node, x: Value, dim: int = 0, **_: Any) -> Any:
    """Parts of one size: they must lose the same positions, or their ends would move."""
    found = pieces(t, node, x, dim)
    for other in found[1:]:
        if length(other.axes[dim]) == length(found[0].axes[dim]):
            t.unite(node, found[0].axes[dim], other.axes[dim])
        else:
            t.freeze(node, x, [dim], "is cut into unequal parts")
    return found


@rule(*overloads(["split_with_sizes", "split.sizes", "tensor_split"]))
def pieces(t: Tracker, node: fx.Node, x: Value, dim: int = 0, **_: Any) -> Any:
    """A list of cuts, of the sizes the results have."""
    found, start = [], 0
    for part in node.meta["val"]:
        size = part.shape[dim]
        if not isinstance(size, int):
            return _by_data(t, node, x)
        found.append(piece(node, x, dim, start, start + size))
        start += size
    return found


def _by_data(t: Tracker, node: fx.Node, x: Value) -> Any:
    reason = Reason("is cut at a place that depends on the data", node.name)
    x.freeze(reason)
    return fresh(node, reason)


@rule(aten.slice.Tensor)
def slice_(t: Tracker, node: fx.Node, x: Value, dim: int, start: Any, end: Any, step: int) -> Any:
    """One cut; a step takes single positions, which freezes the axis."""
    if not all(isinstance(value, (int, type(None))) for value in (start, end)) or length(x.axes[dim]) == UNKNOWN:
        return _by_data(t, node, x)
    size = length(x.axes[dim])
    first, last, _ = slice(start, end).indices(size)
    if (first, last, step) == (0, size, 1):
        return x
    if step != 1:
        t.freeze(node, x, [dim], "is sampled by position")
        axes = list(x.axes)
        axes[dim] = t.new(node, t.shape(node)[dim], "is sampled by position")
        return with_axes(x, axes)
    return piece(node, x, dim, first, max(first, last))


@rule(aten.narrow.default)
def narrow(t: Tracker, node: fx.Node, x: Value, dim: int, start: int, length: int) -> Value:
    """One cut."""
    return piece(node, x, dim, start, start + length)


@rule(*overloads(["unbind.int"]))
def unbind(t: Tracker, node: fx.Node, x: Value, dim: int = 0) -> list[Value]:
    """One value per position: the axis is taken apart by position."""
    t.freeze(node, x, [dim], "is taken apart by position")
    dim %= len(x.axes)
    rest = with_axes(x, [axis for k, axis in enumerate(x.axes) if k != dim])
    return [rest] * length(x.axes[dim])


@rule(aten.glu.default)
def glu(t: Tracker, node: fx.Node, x: Value, dim: int = -1) -> Value:
    """Two halves, multiplied."""
    half = length(x.axes[dim]) // 2
    a, b = piece(node, x, dim, 0, half), piece(node, x, dim, half, 2 * half)
    axes = list(a.axes)
    axes[dim] = t.unite(node, a.axes[dim], b.axes[dim])
    return with_axes(x, axes)


@rule(*overloads(["channel_shuffle", "native_channel_shuffle"]))
def channel_shuffle(t: Tracker, node: fx.Node, x: Value, groups: int) -> Value:
    """(groups, rest) -> (rest, groups) on axis 1."""
    size = length(x.axes[1])
    outer, inner = split(x.axes[1], [groups, size // groups], Reason("is shuffled across its structure", node.name))
    t.freeze(node, Value((outer,)), [0], "counts the groups of a shuffle")
    return with_axes(x, [x.axes[0], flatten([inner, outer]), *x.axes[2:]])


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(t: Tracker, node: fx.Node, x: Value, upscale_factor: int) -> Value:
    """Channels x r x r become channels; the r x r go into space."""
    square, why = upscale_factor**2, "is spread over space by pixel_shuffle"
    channels, inner = split(x.axes[-3], [length(x.axes[-3]) // square, square], Reason(why, node.name))
    t.freeze(node, Value((inner,)), [0], why)
    shape = t.shape(node)
    return with_axes(x, [*x.axes[:-3], channels, *(t.new(node, size, "is spatial") for size in shape[-2:])])


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(t: Tracker, node: fx.Node, x: Value, downscale_factor: int) -> Value:
    """Space goes into channels as a fast factor."""
    inner = t.new(node, downscale_factor**2, "comes from space by pixel_unshuffle")
    shape = t.shape(node)
    return with_axes(
        x, [*x.axes[:-3], flatten([x.axes[-3], inner]), *(t.new(node, n, "is spatial") for n in shape[-2:])]
    )


@rule(aten.constant_pad_nd.default, aten.pad.default)
def pad(t: Tracker, node: fx.Node, x: Value, pad: list[int], mode: str = "constant", **_: Any) -> Any:
    """Constant padding adds frozen positions; other modes freeze the axes they copy from."""
    axes, shape = list(x.axes), t.shape(node)
    for k in range(len(pad) // 2):
        before, after = pad[2 * k : 2 * k + 2]
        dim = len(axes) - 1 - k
        if before == after == 0:
            continue
        if mode != "constant" or before < 0 or after < 0:
            t.freeze(node, x, [dim], "is padded with its own values, or cropped")
            axes[dim] = t.new(node, shape[dim], "is padded")
            continue
        ends = [((t.new(node, n, "is padding")[0]),) if n else () for n in (before, after)]
        axes[dim] = (*ends[0], *axes[dim], *ends[1])
    return with_axes(x, axes)


@rule(aten.im2col.default)
def im2col(t: Tracker, node: fx.Node, x: Value, kernel_size: list[int], **_: Any) -> Value:
    """Channels x taps, channels slowest."""
    taps = t.new(node, math.prod(kernel_size), "counts taps of a kernel")
    return with_axes(x, [x.axes[0], flatten([x.axes[1], taps]), t.new(node, t.shape(node)[2], "is spatial")])


@rule(aten.col2im.default)
def col2im(t: Tracker, node: fx.Node, x: Value, kernel_size: list[int], **_: Any) -> Value:
    """The inverse of im2col: taps are summed into space."""
    taps, why = math.prod(kernel_size), "counts taps of a kernel"
    channels, inner = split(x.axes[1], [length(x.axes[1]) // taps, taps], Reason(why, node.name))
    t.freeze(node, Value((inner,)), [0], why)
    return with_axes(x, [x.axes[0], channels, *(t.new(node, n, "is spatial") for n in t.shape(node)[2:])])
