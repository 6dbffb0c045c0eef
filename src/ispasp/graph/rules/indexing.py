"""Ops that pick positions: the axis they pick from is frozen, the others pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ispasp.graph.atoms import Reason, freeze, length
from ispasp.graph.rules.pointwise import broadcast, overloads
from ispasp.graph.rules.shape import with_axes
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import Value, fresh

aten = torch.ops.aten


@rule(aten.select.int)
def select(t: Tracker, node: fx.Node, x: Value, dim: int, index: Any) -> Value:
    """One position of an axis."""
    t.freeze(node, x, [dim], "is indexed by position")
    dim %= len(x.axes)
    return with_axes(x, [axis for k, axis in enumerate(x.axes) if k != dim])


@rule(aten.embedding.default)
def embedding(t: Tracker, node: fx.Node, weight: Value, indices: Value, **_: Any) -> Value:
    """Rows of a table."""
    t.freeze(node, weight, [0], "is looked up by index")
    return Value((*indices.axes, weight.axes[1]))


@rule(*overloads(["embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"]))
def embedding_bag(t: Tracker, node: fx.Node, weight: Value, per_sample_weights: Value | None = None, **_: Any) -> Any:
    """Rows of a table, added up in bags."""
    t.freeze(node, weight, [0], "is looked up by index")
    if per_sample_weights is not None:
        per_sample_weights.freeze(Reason("weighs rows of a table", node.name))
    made = fresh(node, Reason("counts bags", node.name))
    return [Value((made[0].axes[0], weight.axes[1])), *made[1:]]


@rule(aten.index_select.default)
def index_select(t: Tracker, node: fx.Node, x: Value, dim: int, index: Value) -> Value:
    """Some positions of an axis."""
    t.freeze(node, x, [dim], "is indexed by position")
    axes = list(x.axes)
    axes[dim] = t.new(node, t.shape(node)[dim], "is indexed by position")
    return with_axes(x, axes)


@rule(aten.index.Tensor)
def index(t: Tracker, node: fx.Node, x: Value, indices: list[Value | None]) -> Any:
    """Advanced indexing: indexed axes are frozen; the result's new axes come from the indices."""
    given = [dim for dim, value in enumerate(indices) if value is not None]
    t.freeze(node, x, given, "is indexed by position")
    made = fresh(node, Reason("is made by indexing", node.name))
    rest = [axis for dim, axis in enumerate(x.axes) if dim not in given]
    new = len(made.axes) - len(rest)
    adjacent = given == list(range(given[0], given[-1] + 1))
    at = given[0] if adjacent else 0
    bools = any(node.args[1][d].meta["val"].dtype == torch.bool for d in given)  # type: ignore[index,union-attr]
    if bools:
        x.freeze(Reason("is masked by the data", node.name))
        return made
    axes = [*rest[:at], *made.axes[at : at + new], *rest[at:]]
    return with_axes(x, axes)


@rule(aten.gather.default)
def gather(t: Tracker, node: fx.Node, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """Positions of one axis, chosen for each position of the others."""
    t.freeze(node, x, [dim], "is indexed by position")
    dim %= len(x.axes)
    axes = [
        index.axes[k]
        if k == dim
        else t.unite(node, axis, index.axes[k])
        if _same(axis, index.axes[k])
        else index.axes[k]
        for k, axis in enumerate(x.axes)
    ]
    for k, axis in enumerate(x.axes):
        if k != dim and not _same(axis, index.axes[k]):
            freeze(axis, Reason("is cropped by gather", node.name))
    freeze(index.axes[dim], Reason("is indexed by position", node.name))
    return with_axes(x, axes)


def _same(a: Any, b: Any) -> bool:
    return bool(length(a) == length(b))


@rule(aten.unfold.default)
def unfold(t: Tracker, node: fx.Node, x: Value, dimension: int, size: int, step: int) -> Value:
    """Sliding windows along one axis."""
    t.freeze(node, x, [dimension], "is cut into windows")
    axes = list(x.axes)
    axes[dimension] = t.new(node, t.shape(node)[dimension], "counts windows")
    return with_axes(x, [*axes, t.new(node, size, "is a position in a window")])


@rule(*overloads(["one_hot"]))
def one_hot(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    """A new axis of classes."""
    return Value((*x.axes, t.new(node, t.shape(node)[-1], "counts classes")))


@rule(*overloads(["meshgrid", "histc", "bincount", "bucketize", "searchsorted"]))
def by_value(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    """Positions are treated by value."""
    reason = Reason(f"{node.target} treats positions by value", node.name)
    for value in arguments.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Value):
                item.freeze(reason)
    return fresh(node, reason)


@rule(
    *overloads(
        ["index_put", "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"]
    )
)
def written(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> Value:
    """Positions are written by index: everything that takes part is frozen."""
    reason = Reason("is written by index", node.name)
    for value in (x, *arguments.values()):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Value):
                item.freeze(reason)
    return x


@rule(*overloads(["slice_scatter", "select_scatter"]))
def scattered(t: Tracker, node: fx.Node, x: Value, src: Value, **_: Any) -> Value:
    """A part is replaced."""
    reason = Reason("is written by position", node.name)
    src.freeze(reason)
    return broadcast(t, node, [x.freeze(reason)])
