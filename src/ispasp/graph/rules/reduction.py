"""Ops that run over an axis: what they run over cannot lose positions without changing the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ispasp.graph.atoms import Reason, freeze
from ispasp.graph.rules.pointwise import overloads
from ispasp.graph.rules.shape import with_axes
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import Value

aten = torch.ops.aten

REDUCTIONS = """
mean.dim mean.default sum.dim_IntList sum.default amax amin max.dim min.dim max.default min.default prod.dim_int var.dim
var.correction std.dim std.correction var.default std.default var_mean.correction var_mean.dim
linalg_vector_norm norm.ScalarOpt_dim norm.Scalar
norm.ScalarOpt_dim_dtype argmax argmin logsumexp any.dim all.dim any.default all.default any.dims all.dims median.dim
""".split()

ALONG = """
softmax.int _softmax log_softmax.int _log_softmax cumsum cumprod sort.default sort.stable argsort.default argsort.stable
flip roll diff.default cummax cummin logcumsumexp softmin
""".split()


_GRN = (
    "global response normalisation averages over these channels: each one scales all others, by an amount that depends "
    "on the data, so no weights can make removing equal to masking"
)


def name_of(node: fx.Node) -> str:
    """The op's short name."""
    return str(node.target).split(".")[1]


@rule(*overloads(REDUCTIONS))
def reduced(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> Any:
    """Axes that are averaged or summed over freeze and vanish (or stay with size 1)."""
    dim = arguments.get("dim")
    dims = [dim] if isinstance(dim, int) else dim
    rank = len(x.axes)
    over = set(range(rank)) if not dims else {d % rank for d in dims}
    if node not in t.unread:
        t.freeze(node, x, sorted(over), _GRN if _of_norms(node) else f"{name_of(node)} runs over this axis")
    keep = bool(arguments.get("keepdim", False))
    axes = [((),) if k in over else axis for k, axis in enumerate(x.axes) if keep or k not in over]
    value = with_axes(x, axes)
    return [value] * len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else value


def _of_norms(node: fx.Node) -> bool:
    """Whether this is the mean of norms that the same norms are divided by."""
    norm = node.args[0]
    if not isinstance(norm, fx.Node) or name_of(node) != "mean" or "norm" not in str(norm.target):
        return False
    near = {node, *(user for user in node.users if name_of(user) in ("add", "clamp", "clamp_min"))}  # a small number
    return any(name_of(user) == "div" and norm in user.args and near & {*user.args} for user in norm.users)


@rule(*overloads(ALONG))
def along(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> Any:
    """The shape stays (diff: loses one), but positions along the axis depend on each other."""
    dim = arguments.get("dim", arguments.get("dims", -1))
    dims = list(range(len(x.axes))) if dim in (None, []) else [dim] if isinstance(dim, int) else dim
    t.freeze(node, x, dims, f"{name_of(node)} runs over this axis")
    if isinstance(node.meta["val"], (tuple, list)):
        return [x] * len(node.meta["val"])
    axes = list(x.axes)
    for d, size in enumerate(t.shape(node)):
        if d in {k % len(axes) for k in dims}:
            axes[d] = t.new(node, size, f"{name_of(node)} runs over this axis")
    return with_axes(x, axes)


@rule(*overloads(["topk"]))
def topk(t: Tracker, node: fx.Node, x: Value, k: int, dim: int = -1, **_: Any) -> list[Value]:
    """A choice of positions."""
    t.freeze(node, x, [dim], "topk runs over this axis")
    axes = list(x.axes)
    axes[dim] = t.new(node, k, "is chosen by value")
    return [with_axes(x, axes)] * 2


@rule(*overloads(["tril", "triu", "tril_", "triu_"]))
def triangle(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    """The two last axes are compared by position."""
    for axis in x.axes[-2:]:
        freeze(axis, Reason("is masked by position", node.name))
    return x
