"""Ops that work on each position alone: their operands' axes are united, with broadcasting."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ispasp.graph.atoms import Axis, live_atoms, mark
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import Value

aten = torch.ops.aten

UNARY = """
relu relu_ gelu gelu_ silu silu_ sigmoid sigmoid_ tanh tanh_ elu elu_ selu selu_ celu celu_ mish mish_ softplus
hardswish hardswish_ hardsigmoid hardsigmoid_ hardtanh hardtanh_ leaky_relu leaky_relu_ relu6 relu6_
threshold threshold_ log_sigmoid softshrink hardshrink rrelu rrelu_ softsign
exp exp_ exp2 expm1 log log2 log10 log1p sqrt sqrt_ rsqrt rsqrt_ reciprocal abs abs_ neg neg_ sign sgn square sin cos
tan
asin acos atan sinh cosh erf erfc erfinv ceil floor round trunc frac logit bitwise_not logical_not isnan isinf isfinite
clone contiguous detach detach_ alias dropout dropout_ feature_dropout alpha_dropout lift_fresh_copy lift lift_fresh
nan_to_num positive real zeros_like ones_like empty_like rand_like randn_like full_like zero_ bernoulli
_to_copy clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ native_dropout _conj resolve_conj resolve_neg
""".split()

UNARY_OVERLOADS = """
to.dtype to.device to.dtype_layout pow.Tensor_Scalar pow_.Scalar pow.Scalar
add.Scalar sub.Scalar mul.Scalar div.Scalar add_.Scalar sub_.Scalar mul_.Scalar div_.Scalar rsub.Scalar
div.Scalar_mode remainder.Scalar fmod.Scalar floor_divide.Scalar bitwise_and.Scalar bitwise_or.Scalar
eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar masked_fill.Scalar masked_fill_.Scalar fill_.Scalar
fill_.Tensor fill.Scalar fill.Tensor round.decimals bernoulli.p xor.Scalar __and__.Scalar __or__.Scalar
""".split()

BINARY = """
mul.Tensor mul_.Tensor multiply.Tensor multiply_.Tensor div.Tensor div_.Tensor div.Tensor_mode divide.Tensor
true_divide.Tensor
pow.Tensor_Tensor atan2.default maximum.default minimum.default max.other min.other remainder.Tensor fmod.Tensor
floor_divide.default eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and.default logical_or.default
logical_xor.default bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor
where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Tensor masked_fill_.Tensor addcmul.default
addcdiv.default lerp.Tensor lerp.Scalar clamp.Tensor copy_.default copy.default xlogy.Tensor prelu_kernel.default
""".split()

SUMS = """
add.Tensor add_.Tensor sub.Tensor sub_.Tensor rsub.Tensor subtract.Tensor
""".split()


def overloads(names: list[str]) -> list[Any]:
    """The overloads that this version of torch has; a bare name stands for all overloads of an op."""
    found = []
    for name in names:
        op, _, overload = name.partition(".")
        packet = getattr(aten, op, None)
        if packet is None:
            continue
        chosen = [overload] if overload else packet.overloads()
        found += [getattr(packet, each) for each in chosen if each in packet.overloads()]
    return found


def broadcast(t: Tracker, node: fx.Node, operands: list[Value]) -> Value:
    """The axes of a result that every operand is broadcast to."""
    shape = t.shape(node)
    axes: list[Axis] = []
    for dim, size in enumerate(shape):
        meeting = []
        for operand in operands:
            own = dim - (len(shape) - len(operand.axes))
            if own >= 0 and operand.axes[own] != ((),):
                meeting.append(operand.axes[own])
        result = meeting[0] if meeting else (((),) if size == 1 else t.new(node, size, "is made by broadcasting"))
        for other in meeting[1:]:
            result = t.unite(node, result, other)
        axes.append(result)
    parameters = [operand.parameters for operand in operands]
    return Value(tuple(axes), frozenset().union(*parameters) if all(parameters) else frozenset())


@rule(*overloads(UNARY), *overloads(UNARY_OVERLOADS), *overloads(BINARY))
def pointwise(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    """Unite all tensors among the arguments."""
    operands = [argument for argument in arguments.values() if isinstance(argument, Value)]
    value = broadcast(t, node, operands)
    return [value, value] if isinstance(node.meta["val"], (tuple, list)) else value


@rule(*overloads(SUMS))
def summed(t: Tracker, node: fx.Node, **arguments: Any) -> Value:
    """As `pointwise`; where outputs of different producers are added, the axis is a residual stream."""
    operands = [argument for argument in arguments.values() if isinstance(argument, Value)]
    data = [operand for operand in operands if not operand.is_parameter]
    rank = len(t.shape(node))
    streams = []
    for dim in range(-rank, 0):
        atoms = [live_atoms(operand.axes[dim]) for operand in data if len(operand.axes) >= -dim]
        if len(atoms) == 2 and all(atoms) and not atoms[0] & atoms[1]:
            streams.append(dim)
    value = broadcast(t, node, operands)
    for dim in streams:
        mark(value.axes[dim], stream=True)
    return value


@rule(aten.to.other, aten.type_as.default)
def converted(t: Tracker, node: fx.Node, x: Value, other: Value, **_: Any) -> Value:
    """Only the dtype of the other tensor counts."""
    return x


@rule(aten.prelu.default)
def prelu(t: Tracker, node: fx.Node, x: Value, weight: Value) -> Value:
    """One slope for all, or one per channel (axis 1)."""
    if weight.axes and weight.axes[0] != ((),) and len(x.axes) > 1:
        t.unite(node, x.axes[1], weight.axes[0])
    return x
