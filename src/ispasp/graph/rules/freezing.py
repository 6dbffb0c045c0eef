"""Ops that freeze the axes they run over or pick from: reductions, normalisations, pooling, indexing."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ispasp.graph.atoms import Reason, flatten, freeze, length, split
from ispasp.graph.track import Tracker, Value, common_parameters, freeze_all, fresh, listed, rule
from ispasp.types.dimension import WeightNorm

# Reductions ---------------------------------------------------------------------------------------------------------
_GRN = (
    "global response normalisation averages over these channels: each one scales all others, by an amount that depends "
    "on the data, so no weights can make removing equal to masking"
)


def _name(node: fx.Node) -> str:
    """The name of an op without its namespace and overload; that of other nodes as it is."""
    return ".".join(str(node.target).split(".")[1:2]) or str(node.target)


_REDUCTIONS = """
    mean.dim mean.default sum.dim_IntList sum.default amax amin max.dim min.dim max.default min.default prod.dim_int
    var.dim var.correction std.dim std.correction var.default std.default var_mean.correction var_mean.dim
    linalg_vector_norm norm.ScalarOpt_dim norm.Scalar norm.ScalarOpt_dim_dtype argmax argmin logsumexp
    any.dim all.dim any.default all.default any.dims all.dims median.dim
"""


@rule(_REDUCTIONS)
def _reduction(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> Any:
    dim, rank = arguments.get("dim"), len(x.axes)
    dims = [dim] if isinstance(dim, int) else dim
    over = {d % rank for d in dims} if dims else set(range(rank))
    if node not in t.unread:
        t.freeze(node, x, sorted(over), _GRN if _averages_norms(node) else f"{_name(node)} runs over this axis")
    keep = bool(arguments.get("keepdim", False))
    axes = [((),) if k in over else axis for k, axis in enumerate(x.axes) if keep or k not in over]
    return listed(node, x.with_axes(axes))


def _averages_norms(node: fx.Node) -> bool:
    """Whether this is the mean of norms that the same norms are divided by."""
    norm = node.args[0]
    if not isinstance(norm, fx.Node) or _name(node) != "mean" or "norm" not in str(norm.target):
        return False
    near = {node, *(user for user in node.users if _name(user) in ("add", "clamp", "clamp_min"))}  # a small number
    return any(_name(user) == "div" and norm in user.args and near & {*user.args} for user in norm.users)


_ALONG_AN_AXIS = """
    softmax.int _softmax log_softmax.int _log_softmax cumsum cumprod sort.default sort.stable argsort.default
    argsort.stable flip roll diff.default cummax cummin logcumsumexp topk
"""


@rule(_ALONG_AN_AXIS)
def _along_an_axis(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> Any:
    dim = arguments.get("dim", arguments.get("dims", -1))
    dims = list(range(len(x.axes))) if dim in (None, []) else [dim] if isinstance(dim, int) else dim
    return listed(node, t.remake(node, x, dims, f"{_name(node)} runs over this axis"))


@rule("tril triu tril_ triu_")
def _triangle(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    t.freeze(node, x, [-2, -1], "is masked by position")
    return x


# Normalisations -----------------------------------------------------------------------------------------------------
def _each_channel(t: Tracker, node: fx.Node, x: Value, arguments: dict[str, Any]) -> Value:
    axis = x.axes[1]
    for parameter in map(arguments.get, ("weight", "bias", "running_mean", "running_var")):
        if parameter is not None:
            axis = t.unite(node, axis, parameter.axes[0])
    return x.with_axis(1, axis)


@rule("batch_norm.default _native_batch_norm_legit_no_training.default _native_batch_norm_legit_functional.default")
def _batch_norm(t: Tracker, node: fx.Node, x: Value, training: bool = False, **arguments: Any) -> Any:
    """Inside torch.vmap it also returns tensors for a backward pass and new running statistics."""
    if training:
        t.freeze(node, x.without(1), range(len(x.axes) - 1), "batch statistics average over this axis")
    out, made = _each_channel(t, node, x, arguments), fresh(node, Reason("is kept for a backward pass", node.name))
    return [out, *made[1:]] if isinstance(made, list) else out


@rule("instance_norm.default")
def _instance_norm(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> Value:
    t.freeze(node, x, range(2, len(x.axes)), "instance_norm averages over this axis")
    return _each_channel(t, node, x, arguments)


@rule("layer_norm.default rms_norm.default")
def _layer_norm(t: Tracker, node: fx.Node, x: Value, normalized_shape: list[int], **rest: Any) -> Value:
    why = f"{_name(node)} normalises over this axis"
    t.freeze(node, x, range(-len(normalized_shape), 0), why)
    freeze_all([rest.get("weight"), rest.get("bias")], Reason(why, node.name))
    return x


@rule("group_norm.default")
def _group_norm(t: Tracker, node: fx.Node, x: Value, num_groups: int, **rest: Any) -> Value:
    """Whole groups can go; inside a group channels are averaged over."""
    why = Reason("group_norm normalises over the channels of a group", node.name)
    groups, inner = split(x.axes[1], [num_groups, length(x.axes[1]) // num_groups], why)
    freeze(inner, why)
    if num_groups == 1:
        freeze(x.axes[1], why)
    t.counts(rest["weight"], "num_groups", groups)
    t.freeze(node, x, range(2, len(x.axes)), "group_norm normalises over this axis")
    return _each_channel(t, node, x.with_axis(1, flatten([groups, inner])), rest)


@rule("_weight_norm.default")
def _weight_norm(t: Tracker, node: fx.Node, v: Value, g: Value, dim: int = 0) -> Value:
    """g v / ||v||: the norm runs over all axes but `dim`; surgery corrects g for what they lose."""
    t.weight_norms += [WeightNorm(a, b, dim) for a in v.parameters for b in g.parameters]
    return Value(v.with_axis(dim, t.unite(node, v.axes[dim], g.axes[dim])).axes, v.parameters | g.parameters)


# Pooling and interpolation ------------------------------------------------------------------------------------------
_SPATIAL = """
max_pool avg_pool lp_pool adaptive_max_pool adaptive_avg_pool _adaptive_avg_pool reflection_pad replication_pad
upsample_nearest upsample_linear upsample_bilinear upsample_bicubic upsample_trilinear
_upsample_nearest_exact _upsample_bilinear _upsample_bicubic
"""


@rule("grid_sampler grid_sampler_2d")
@rule(" ".join(f"{op}{n}d{end}" for op in _SPATIAL.split() for n in (1, 2, 3) for end in ("", "_aa", "_with_indices")))
def _resized(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    x = next(value for value in arguments.values() if isinstance(value, Value))
    count = next((n for n in (1, 2, 3) if f"{n}d" in _name(node)), len(x.axes) - 2)
    return listed(node, t.remake(node, x, range(-count, 0), "is spatial"))


# Indexing -----------------------------------------------------------------------------------------------------------
@rule("select.int unbind.int")
def _select(t: Tracker, node: fx.Node, x: Value, dim: int = 0, **_: Any) -> Any:
    t.freeze(node, x, [dim], "is indexed by position")
    return listed(node, x.without(dim))


@rule("embedding.default")
def _embedding(t: Tracker, node: fx.Node, weight: Value, indices: Value, **_: Any) -> Value:
    t.freeze(node, weight, [0], "is looked up by index")
    if weight.is_parameter:
        t.tables.append(weight)
    return Value((*indices.axes, weight.axes[1]))


@rule("embedding_bag _embedding_bag _embedding_bag_forward_only")
def _embedding_bag(t: Tracker, node: fx.Node, weight: Value, indices: Value, **arguments: Any) -> Any:
    _embedding(t, node, weight, indices)
    freeze_all(arguments.get("per_sample_weights"), Reason("weighs rows of a table", node.name))
    made = fresh(node, Reason("counts bags", node.name))
    return [Value((made[0].axes[0], weight.axes[1])), *made[1:]]


@rule("index_select.default")
def _index_select(t: Tracker, node: fx.Node, x: Value, dim: int, index: Value) -> Value:
    return t.remake(node, x, [dim], "is indexed by position")


@rule("index.Tensor")
def _index(t: Tracker, node: fx.Node, x: Value, indices: list[Value | None]) -> Any:
    """Advanced indexing: indexed axes are frozen; the result's new axes come from the indices."""
    given = [dim for dim, value in enumerate(indices) if value is not None]
    t.freeze(node, x, given, "is indexed by position")
    made = fresh(node, Reason("is made by indexing", node.name))
    if any(node.args[1][d].meta["val"].dtype == torch.bool for d in given):  # type: ignore[index,union-attr]
        x.freeze(Reason("is masked by the data", node.name))
        return made
    rest = [axis for dim, axis in enumerate(x.axes) if dim not in given]
    new = len(made.axes) - len(rest)
    at = given[0] if given == list(range(given[0], given[-1] + 1)) else 0  # adjacent indices stay in their place
    return x.with_axes([*rest[:at], *made.axes[at : at + new], *rest[at:]])


@rule("gather.default index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_")
def _by_index(t: Tracker, node: fx.Node, x: Value, dim: int, index: Value, **given: Any) -> Value:
    """Positions of one axis are chosen or summed into, for each position of the others."""
    others = [value for value in (index, *given.values()) if isinstance(value, Value)]
    for value in (each for each in others if len(each.axes) == len(x.axes)):
        for k, (own, other) in enumerate(zip(x.axes, value.axes, strict=True)):
            if k != dim % len(x.axes) and length(own) == length(other):
                t.unite(node, own, other)
            else:
                freeze_all([Value((own, other))], Reason("is indexed by position", node.name))
    t.freeze(node, x, [dim], "is indexed by position")
    return x.with_axes(index.axes) if "gather" in _name(node) else Value(x.axes, common_parameters([x, *others]))


@rule("unfold.default")
def _unfold(t: Tracker, node: fx.Node, x: Value, dimension: int, size: int, step: int) -> Value:
    windows = t.remake(node, x, [dimension % len(x.axes)], "is cut into windows")
    return x.with_axes([*windows.axes, t.new(node, size, "is a position in a window")])


@rule("one_hot")
def _one_hot(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    return Value((*x.axes, t.new(node, t.shape(node)[-1], "counts classes")))


@rule("index_put index_put_ scatter scatter_ slice_scatter select_scatter")
def _written(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> Value:
    freeze_all([x, *arguments.values()], Reason("is written by position", node.name))
    return x
