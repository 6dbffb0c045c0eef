"""The table of contraction ops: data, weight and bias arguments, output axis and linear form of each.

A contraction sums over an axis with a parameter. In its linear form it is one or more products `A H`: a weight in the
layout of `LinearConsumer` or `ConvConsumer`, and a function that arranges the op's activations as their input. A
product with one matrix for each of several groups (batched matmul, einsum) is a convolution of one tap in groups.
An op that is not in the table has no linear form: what it reads cannot be calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ispasp.graph.trace import Source, call_op
from ispasp.types import Consumer, ConvConsumer, LinearConsumer
from ispasp.types.consumer import Geometry

aten = torch.ops.aten

Arguments = dict[str, Any]  # of a call, by their names in the op's schema


@dataclass(frozen=True)
class Operand:
    """An argument of an op by its name in the schema; `index` picks one of a list of tensors."""

    name: str
    index: int | None = None

    def get(self, given: Arguments) -> Any:
        return given[self.name] if self.index is None else given[self.name][self.index]

    def put(self, given: Arguments, value: Any) -> Arguments:
        if self.index is None:
            return {**given, self.name: value}
        items = [value if k == self.index else item for k, item in enumerate(given[self.name])]
        return {**given, self.name: items}


@dataclass(frozen=True, eq=False)
class Form:
    """One product: the consumer and how its input is arranged from the op's activations.

    `restore` puts a weight of the consumer's layout back into that of the op's argument; None where the op's weight
    cannot be replaced (it is used for several products).
    """

    consumer: Consumer
    arrange: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor] | None = None
    output: Callable[[Tensor], Tensor] = field(default=lambda y: y)  # the op's output in the consumer's layout


Maker = Callable[[Arguments, Operand], Sequence[Form]]


@dataclass(frozen=True)
class Op:
    """A contraction op.

    `form` gives its products from the arguments and the operand that holds activations. `weight` and `bias` name
    arguments; without `weight` the weight is the other one of two operands. `channels` is the output's axis of output
    channels, counted from the end: a number, or "conv" for the one in front of the spatial axes. `sliced` is the axis
    of the activations that axis 1 of the weight reads, where both may be cut to fewer positions. `total` says that
    every call has a form.
    """

    form: Maker
    weight: str = ""
    bias: str = ""
    channels: int | Literal["conv"] | None = None
    sliced: int | None = None
    total: bool = False


OPS: dict[Any, Op] = {}


def overloads(names: str) -> list[Any]:
    """The ATen overloads of these names that this version of torch has; a bare name stands for all its overloads."""
    found: list[Any] = []
    for name in names.split():
        op, _, overload = name.partition(".")
        if "::" in name:  # an op of an optional package
            found.append(name.replace("::", "."))
        elif packet := getattr(aten, op, None):
            found += [getattr(packet, each) for each in packet.overloads() if overload in ("", each)]
    return found


def contraction(ops: str, **facts: Any) -> Callable[[Maker], Maker]:
    """Put ops into the table with this function as their linear form, by their names as `overloads` reads them."""

    def register(maker: Maker) -> Maker:
        OPS.update(dict.fromkeys(overloads(ops), Op(maker, **facts)))
        return maker

    return register


def _same(x: Tensor) -> Tensor:
    return x


# The table ----------------------------------------------------------------------------------------------------------
@contraction("linear.default", weight="weight", bias="bias", channels=-1, sliced=-1, total=True)
def _linear(a: Arguments, data: Operand) -> Sequence[Form]:
    return linear_forms(a["weight"]) if data.name == "input" else []


def linear_forms(W: Tensor) -> Sequence[Form]:
    """The linear form of x W^T, W (outputs, channels)."""
    return [Form(LinearConsumer(W), _same, _same)] if W.ndim == 2 else []


_CONV: dict[str, Any] = {"weight": "weight", "bias": "bias", "channels": "conv"}


@contraction("conv1d.default conv2d.default conv3d.default", **_CONV, sliced=1, total=True)
@contraction("conv1d.padding conv2d.padding conv3d.padding", **_CONV, total=True)
@contraction("conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution", **_CONV)
def _convolution(a: Arguments, data: Operand) -> Sequence[Form]:
    if data.name != "input":
        return []
    W = a["weight"]
    transposed = bool(a.get("transposed", "output_padding" in a))
    axes = W.ndim - 2

    def each_axis(values: Any) -> Any:
        return values if isinstance(values, str) else tuple(values) * (axes if len(values) == 1 else 1)

    def batched(x: Tensor) -> Tensor:
        return x if x.ndim == axes + 2 else x[None]

    strides, padding, dilation = (each_axis(a[name]) for name in ("stride", "padding", "dilation"))
    extra = each_axis(a["output_padding"]) if transposed else ()
    geometry = Geometry(strides, padding, dilation, a["groups"], transposed=transposed, output_padding=extra)
    return [Form(ConvConsumer(W, geometry=geometry), batched, _same, batched)]


@contraction("addmm.default", bias="self", channels=-1)
@contraction("matmul.default mm.default bmm.default mv.default")
def _matmul(a: Arguments, data: Operand) -> Sequence[Form]:
    first, second = _factors(a)
    if (a.get("beta", 1), a.get("alpha", 1)) != (1, 1):
        return []
    left = data.name == first
    W = a[second] if left else a[first]
    if W.ndim == 1:
        return [Form(LinearConsumer(W[None]), _same if left else lambda x: x.mT)]
    if W.ndim == 2 and left:
        return [Form(LinearConsumer(W.T), _same, lambda w: w.T)]
    if W.ndim == 2:
        return [Form(LinearConsumer(W), _columns, _same, _columns)]
    if data.get(a).shape[:-2] != W.shape[:-2]:  # broadcast batches: one matrix would be counted as several
        return []
    return [_grouped(W.mT.flatten(0, -3) if left else W.flatten(0, -3), lambda x: x if left else x.mT)]


def _factors(given: Arguments) -> list[str]:
    return [name for name in given if name in ("self", "other", "mat1", "mat2", "vec")][-2:]


def _columns(x: Tensor) -> Tensor:
    return x.mT if x.ndim > 1 else x


def _grouped(W: Tensor, rows: Callable[[Tensor], Tensor]) -> Form:
    """W (groups, outputs, K); rows(x) (..., groups..., T, K)."""
    g, out, K = W.shape
    consumer = ConvConsumer(W.reshape(g * out, K, 1), geometry=Geometry(groups=g))
    return Form(consumer, lambda x: rows(x).reshape(g, -1, K).transpose(0, 1).reshape(-1, g * K, 1))


@contraction("einsum.default")
def _einsum(a: Arguments, data: Operand) -> Sequence[Form]:
    tensors, at = a["tensors"], data.index
    if at is None or len(tensors) != 2:
        return []
    left, out = a["equation"].split("->")
    terms = left.split(",")
    return _labelled(terms[at], terms[1 - at], out, tensors[at], tensors[1 - at])


@contraction("tensordot.default")
def _tensordot(a: Arguments, data: Operand) -> Sequence[Form]:
    ours, theirs = ("self", "other") if data.name == "self" else ("other", "self")
    X, W = a[ours], a[theirs]
    x, w = list(range(X.ndim)), list(range(X.ndim, X.ndim + W.ndim))
    for d, e in zip(a[f"dims_{ours}"], a[f"dims_{theirs}"], strict=True):
        w[e] = x[d]
    return _labelled(x, w, set(x) ^ set(w), X, W)


def _labelled(x: Sequence[Any], w: Sequence[Any], out: Container[Any], X: Tensor, W: Tensor) -> Sequence[Form]:
    """The product of X with axes x and W with axes w, summed over what is not in `out`."""
    sizes = dict(zip(w, W.shape, strict=True))
    broadcast = any(n != sizes.get(c, n) for c, n in zip(x, X.shape, strict=True))
    if broadcast or len(set(x)) < len(x) or len(set(w)) < len(w):
        return []
    read = [c for c in x if c in w and c not in out]
    groups = [c for c in x if c in w and c in out]
    rows = [c for c in x if c not in w]
    made = [c for c in w if c not in x]
    if any(c not in out for c in (*rows, *made)):
        return []
    K, g = math.prod(sizes[c] for c in read), math.prod(sizes[c] for c in groups)
    weight = W.permute([w.index(c) for c in (*groups, *made, *read)]).reshape(g, -1, K)
    order = [x.index(c) for c in (*groups, *rows, *read)]
    if g == 1:
        return [Form(LinearConsumer(weight[0]), lambda v: v.permute(order).reshape(-1, K))]
    return [_grouped(weight, lambda v: v.permute(order).reshape(g, -1, K))]


@contraction("transformers::grouped_mm_fallback.default _grouped_mm")
def _experts(a: Arguments, data: Operand) -> Sequence[Form]:
    names = list(a)
    W, ends = a[names[1]], a[names[2]]
    if data.name != names[0] or W.ndim != 3 or ends is None:
        return []

    def rows(start: int, end: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x[start:end]

    bounds = pairwise([0, *ends.tolist()])
    return [Form(LinearConsumer(W[expert].T), rows(*bound)) for expert, bound in enumerate(bounds)]


# Reading the table --------------------------------------------------------------------------------------------------
def op_of(node: fx.Node) -> Op | None:
    """The entry of a node's op."""
    return OPS.get(node.target) or OPS.get(str(node.target))


def named_arguments(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Arguments of a call by their names in the op's schema, defaults filled in."""
    known = enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
    return {a.name: args[k] if k < len(args) else kwargs.get(a.name, a.default_value) for k, a in known}


def given_to(node: fx.Node) -> Arguments:
    """Arguments of a node by name, other nodes standing for their values."""
    return named_arguments(node, node.args, node.kwargs)


def call(node: fx.Node, given: Arguments) -> Any:
    """Run a node's op with arguments by name."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    args = [given[a.name] for a in arguments if not a.kwarg_only]
    kwargs = {a.name: given[a.name] for a in arguments if a.kwarg_only}
    return call_op(node, args, kwargs)


def forms(node: fx.Node, given: Arguments, data: Operand) -> Sequence[Form]:
    """The products of a node; none where it has no linear form. `data` is where its activations are."""
    op = op_of(node)
    if op is None or node.meta["val"].is_complex():  # methods are defined for real numbers
        return []
    return op.form(given, data)


def weight_operand(node: fx.Node, data: Operand) -> Operand | None:
    """The argument that holds a contraction's weight, `data` being the one with its activations."""
    if (op := op_of(node)) is not None and op.weight:
        return Operand(op.weight)
    return next((Operand(name) for name in _factors(given_to(node)) if name != data.name), None)


def bias_of(node: fx.Node, given: Arguments) -> Any:
    """The bias among the arguments of a contraction, None where it has none."""
    op = op_of(node)
    return given.get(op.bias) if op is not None and op.bias else None


def output_channels(node: fx.Node) -> int | None:
    """The axis of a contraction's output that counts its output channels, counted from the end.

    Counting from the end also fits a convolution of one example without a batch dimension.
    """
    channels = getattr(op_of(node), "channels", None)
    return 1 - len(given_to(node)["weight"].meta["val"].shape) if channels == "conv" else channels


def some_of(x: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Some positions of an axis. Images with their channels last in memory stay so.

    >>> image = torch.rand(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    >>> some_of(image, 1, torch.tensor([2, 0])).is_contiguous(memory_format=torch.channels_last)
    True
    """
    last = x.movedim(dim, -1)
    if x.ndim > 3 and last.is_contiguous() and not x.is_contiguous():
        return last[..., positions].movedim(-1, dim)
    return x.index_select(dim, positions)


def along(values: Tensor, axis: int, rank: int) -> Tensor:
    """A vector shaped so that it broadcasts along one axis of a tensor."""
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)


def without_bias(node: fx.Node, y: Tensor, given: Arguments) -> Tensor:
    """The output of a contraction without its bias, where that is one number for each output channel."""
    bias, channel = bias_of(node, given), output_channels(node)
    if not isinstance(bias, Tensor) or channel is None or bias.ndim != 1:
        return y
    return y - along(bias.to(y), channel, y.ndim)


# What follows a layer -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Tail:
    """A layer's output goes through `norm` and `factors` (a number per channel each), then is added to `other`.

    Nothing else in the network sees the values in between.
    """

    norm: fx.Node | None = None
    factors: tuple[fx.Node, ...] = ()
    other: fx.Node | None = None


def tail(node: fx.Node, channel: int, sources: Mapping[str, Source]) -> Tail:
    """Follow the output of a layer whose output channels are on dimension `channel`."""
    channel %= len(node.meta["val"].shape)
    norm, at = None, node
    factors: list[fx.Node] = []
    while len(at.users) == 1:
        (user,) = at.users
        if user.target is aten.batch_norm.default and norm is None and not factors and channel == 1:
            if user.args[0] is not at or user.args[5]:  # batch statistics are no affine map
                break
            norm = user
        elif user.target in (aten.dropout.default, aten.dropout_.default):
            if user.args[2]:  # training=True
                break
        elif user.target in (aten.mul.Tensor, aten.mul_.Tensor):
            factor = _factor(user, at, channel, sources)
            if factor is None:
                break
            factors.append(factor)
        elif user.target in (aten.add.Tensor, aten.add_.Tensor):
            return Tail(norm, tuple(factors), _summand(user, at))
        elif user.target not in (aten.clone.default, aten.contiguous.default):
            break
        at = user
    return Tail(norm, tuple(factors))


def _factor(user: fx.Node, at: fx.Node, channel: int, sources: Mapping[str, Source]) -> fx.Node | None:
    """The parameter that a product multiplies output channels with, if that is what it does."""
    other = user.args[1] if user.args[0] is at else user.args[0]
    if not isinstance(other, fx.Node) or other.op != "placeholder":
        return None
    outputs, given = at.meta["val"].shape, other.meta["val"].shape
    shape = [1] * (len(outputs) - len(given)) + list(given)
    fits = shape == [n if k == channel else 1 for k, n in enumerate(outputs)]
    return other if fits and sources[other.name].kind in ("parameter", "buffer") else None


def _summand(user: fx.Node, at: fx.Node) -> fx.Node | None:
    """The other summand, if it has the full shape and is not the same value."""
    other = user.args[1] if user.args[0] is at else user.args[0]
    if not isinstance(other, fx.Node) or other is at or user.kwargs.get("alpha", 1) != 1:
        return None
    return other if getattr(other.meta.get("val"), "shape", None) == at.meta["val"].shape else None


def scale(found: Tail, value_of: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The factor on each output channel in float64, None for one. (outputs,)"""
    total = None
    if found.norm is not None:
        arguments: Any = found.norm.args  # x, gamma, beta, mean, variance, training, momentum, eps
        total = torch.rsqrt(value_of[arguments[4]].double() + arguments[7])
        if arguments[1] is not None:
            total = total * value_of[arguments[1]].double()
    for factor in found.factors:
        more = value_of[factor].double().flatten()
        total = more if total is None else total * more
    return None if total is None else total.detach()
