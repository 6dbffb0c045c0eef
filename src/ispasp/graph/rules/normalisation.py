"""Normalisations: what they average over cannot lose positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ispasp.graph.atoms import Reason, flatten, freeze, length, split
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import Value, fresh

aten = torch.ops.aten


def _each_channel(t: Tracker, node: fx.Node, x: Value, arguments: dict[str, Any]) -> Value:
    axis = x.axes[1]
    for parameter in (arguments[name] for name in ("weight", "bias", "running_mean", "running_var")):
        if parameter is not None:
            axis = t.unite(node, axis, parameter.axes[0])
    return Value((x.axes[0], axis, *x.axes[2:]), x.parameters)


@rule(aten.batch_norm.default)
def batch_norm(t: Tracker, node: fx.Node, x: Value, training: bool, **arguments: Any) -> Value:
    """Each channel alone; batch statistics average over all other axes."""
    if training:
        others = [dim for dim in range(len(x.axes)) if dim != 1]
        t.freeze(node, x, others, "batch statistics average over this axis")
    return _each_channel(t, node, x, arguments)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_eval(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> list[Value]:
    """What batch_norm becomes where torch.vmap is taken apart: the output, and two tensors for a backward pass."""
    rest = fresh(node, Reason("is kept for a backward pass", node.name))
    return [_each_channel(t, node, x, arguments), *rest[1:]]


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_in_training(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> list[Value]:
    """The same in training mode, with new running statistics beside."""
    others = [dim for dim in range(len(x.axes)) if dim != 1]
    t.freeze(node, x, others, "batch statistics average over this axis")
    out = _each_channel(t, node, x, arguments)
    return [out, *(Value((out.axes[1],)) for _ in range(4))]


@rule(aten.instance_norm.default)
def instance_norm(t: Tracker, node: fx.Node, x: Value, **arguments: Any) -> Value:
    """Each channel of each example alone."""
    t.freeze(node, x, range(2, len(x.axes)), "instance_norm averages over this axis")
    return _each_channel(t, node, x, arguments)


@rule(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(t: Tracker, node: fx.Node, x: Value, normalized_shape: list[int], **rest: Any) -> Value:
    """The last axes are averaged over."""
    name = str(node.target).split(".")[1]
    why = f"{name} normalises over this axis"
    t.freeze(node, x, range(-len(normalized_shape), 0), why)
    for parameter in (rest.get("weight"), rest.get("bias")):
        if parameter is not None:
            parameter.freeze(Reason(why, node.name))
    return x


@rule(aten.group_norm.default)
def group_norm(
    t: Tracker,
    node: fx.Node,
    x: Value,
    num_groups: int,
    weight: Value | None,
    bias: Value | None,
    **_: Any,
) -> Value:
    """Whole groups can go; inside a group channels are averaged over."""
    why = Reason("group_norm normalises over the channels of a group", node.name)
    groups, inner = split(x.axes[1], [num_groups, length(x.axes[1]) // num_groups], why)
    freeze(inner, why)
    if num_groups == 1:
        freeze(x.axes[1], why)
    t.counts(weight, "num_groups", groups)
    axis = flatten([groups, inner])
    for parameter in (weight, bias):
        if parameter is not None:
            axis = t.unite(node, axis, parameter.axes[0])
    t.freeze(node, x, range(2, len(x.axes)), "group_norm normalises over this axis")
    return Value((x.axes[0], axis, *x.axes[2:]), x.parameters)


@rule(aten._weight_norm.default)
def weight_norm(t: Tracker, node: fx.Node, v: Value, g: Value, dim: int = 0) -> Value:
    """g v / ||v||: the axis `dim` is kept; the norm runs over the others, which surgery makes good for."""
    axes = list(v.axes)
    axes[dim] = t.unite(node, axes[dim], g.axes[dim])
    t.weight_norms += [(a, b, dim) for a in v.parameters for b in g.parameters]
    return Value(tuple(axes), v.parameters | g.parameters)
