"""Normal forms: whatever op reads a hidden dimension, as consumers with their inputs.

Every contraction of the graph becomes one or more products `A H`: a weight in the layout of `LinearConsumer` or
`ConvConsumer`, and a function that arranges the op's activations as their input. A product with a matrix for each of
several groups (batched matmul, einsum) is a convolution of one tap in groups. An op that is not in the table has no
normal form, and what it reads cannot be calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from ispasp.types import Consumer, ConvConsumer, LinearConsumer
from ispasp.types.geometry import Geometry

aten = torch.ops.aten
Arguments = dict[str, Any]


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


# Ops that have a normal form whatever their arguments.
ALWAYS = frozenset(
    {"aten.linear.default", *(f"aten.conv{n}d.{how}" for n in (1, 2, 3) for how in ("default", "padding"))}
)

Maker = Callable[[Arguments, str], Sequence[Form]]
FORMS: dict[Any, Maker] = {}


def form(*ops: Any) -> Callable[[Maker], Maker]:
    """Register the normal form of these ops: called with the arguments by name, and which of them holds activations."""

    def register(maker: Maker) -> Maker:
        for op in ops:
            FORMS[op] = maker
        return maker

    return register


def named_arguments(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Arguments of a call by their names in the op's schema, defaults filled in."""
    found: Arguments = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given
    return found


def forms(node: fx.Node, arguments: Arguments, data: str) -> Sequence[Form]:
    """The products of a node, none where it has no normal form. `data` names the activations, as in Contraction."""
    maker = FORMS.get(node.target) or FORMS.get(str(node.target))
    if maker is None or node.meta["val"].is_complex():  # methods are defined for real numbers
        return []
    return maker(arguments, data)


def _same(x: Tensor) -> Tensor:
    return x


@form(aten.linear.default)
def _linear(a: Arguments, data: str) -> Sequence[Form]:
    W = a["weight"]
    if data != "input" or W.ndim != 2:
        return []
    return [Form(LinearConsumer(W), _same, _same)]


def _overloads(*names: str) -> list[Any]:
    return [getattr(getattr(aten, name), overload) for name in names for overload in getattr(aten, name).overloads()]


def _tuple(values: Any, axes: int) -> Any:
    if isinstance(values, str):
        return values
    given = [values] if isinstance(values, int) else list(values)
    return tuple(given * axes if len(given) == 1 else given)


def _conv(a: Arguments, data: str, transposed: bool) -> Sequence[Form]:
    W = a["weight"]
    if data != "input":
        return []
    axes = W.ndim - 2
    geometry = Geometry(
        _tuple(a["stride"], axes),
        _tuple(a["padding"], axes),
        _tuple(a["dilation"], axes),
        a["groups"],
        transposed=transposed,
        output_padding=_tuple(a["output_padding"], axes) if transposed else (),
    )

    def batched(x: Tensor) -> Tensor:
        return x if x.ndim == axes + 2 else x[None]

    return [Form(ConvConsumer(W, geometry=geometry), batched, _same, batched)]


@form(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
      aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)  # fmt: skip
def _plain(a: Arguments, data: str) -> Sequence[Form]:
    return _conv(a, data, transposed=False)


@form(*_overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
def _transposed(a: Arguments, data: str) -> Sequence[Form]:
    return _conv(a, data, transposed=True)


@form(*_overloads("convolution", "_convolution"))
def _general(a: Arguments, data: str) -> Sequence[Form]:
    return _conv(a, data, transposed=bool(a["transposed"]))


@form(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default)
def _matmul(a: Arguments, data: str) -> Sequence[Form]:
    first, second = [name for name in a if name in ("self", "other", "mat1", "mat2", "vec")][-2:]
    if (a.get("beta", 1), a.get("alpha", 1)) != (1, 1):
        return []
    left = data == first
    W = a[second] if left else a[first]
    if W.ndim == 1:
        return [Form(LinearConsumer(W[None]), _same)] if left else [Form(LinearConsumer(W[None]), lambda x: x.mT)]
    if W.ndim == 2 and left:
        return [Form(LinearConsumer(W.T), _same, lambda w: w.T)]
    if W.ndim == 2:
        return [Form(LinearConsumer(W), _columns, _same, _columns)]
    X = a[data]
    if X.shape[:-2] != W.shape[:-2]:  # broadcast batches: one matrix would be counted as several
        return []
    return [_grouped(W.mT.flatten(0, -3) if left else W.flatten(0, -3), lambda x: x if left else x.mT)]


def _columns(x: Tensor) -> Tensor:
    return x.mT if x.ndim > 1 else x


def _grouped(W: Tensor, rows: Callable[[Tensor], Tensor]) -> Form:
    """W (groups, outputs, K); rows(x) (..., groups..., T, K)."""
    g, out, K = W.shape
    consumer = ConvConsumer(W.reshape(g * out, K, 1), geometry=Geometry(groups=g))
    return Form(consumer, lambda x: rows(x).reshape(g, -1, K).transpose(0, 1).reshape(-1, g * K, 1))


@form(aten.einsum.default)
def _einsum(a: Arguments, data: str) -> Sequence[Form]:
    tensors, at = a["tensors"], int(data.partition(".")[2])
    if len(tensors) != 2 or "." in a["equation"] or "->" not in a["equation"]:
        return []
    left, out = a["equation"].replace(" ", "").split("->")
    terms = left.split(",")
    x, w = terms[at], terms[1 - at]
    X, W = tensors[at], tensors[1 - at]
    sizes = dict(zip(w, W.shape, strict=True))
    if (
        len(set(x)) < len(x)
        or len(set(w)) < len(w)
        or any(n != sizes.get(c, n) for c, n in zip(x, X.shape, strict=True))
    ):
        return []
    read = [c for c in x if c in w and c not in out]
    groups = [c for c in x if c in w and c in out]
    rows = [c for c in x if c not in w]
    made = [c for c in w if c not in x]
    if any(c not in out for c in (*rows, *made)):
        return []
    K, g = torch.Size(sizes[c] for c in read).numel(), torch.Size(sizes[c] for c in groups).numel()
    weight = W.permute([w.index(c) for c in (*groups, *made, *read)]).reshape(g, -1, K)
    order = [x.index(c) for c in (*groups, *rows, *read)]
    if g == 1:
        return [Form(LinearConsumer(weight[0]), lambda v: v.permute(order).reshape(-1, K))]
    return [_grouped(weight, lambda v: v.permute(order).reshape(g, -1, K))]


@form(aten.tensordot.default)
def _tensordot(a: Arguments, data: str) -> Sequence[Form]:
    mine, yours = ("self", "other") if data == "self" else ("other", "self")
    X, W = a[mine], a[yours]
    dims = [d % X.ndim for d in a[f"dims_{mine}"]]
    weights = [d % W.ndim for d in a[f"dims_{yours}"]]
    rows, made = [d for d in range(X.ndim) if d not in dims], [d for d in range(W.ndim) if d not in weights]
    weight = W.permute(*made, *weights).flatten(len(made)).reshape(-1, torch.Size(W.shape[d] for d in weights).numel())
    K = weight.shape[1]
    return [Form(LinearConsumer(weight), lambda x: x.permute(*rows, *dims).reshape(-1, K))]


@form("transformers.grouped_mm_fallback.default", *_overloads("_grouped_mm"))
def _experts(a: Arguments, data: str) -> Sequence[Form]:
    names = list(a)
    W, ends = a[names[1]], a[names[2]]
    if data != names[0] or W.ndim != 3 or ends is None:
        return []
    stops = [0, *ends.tolist()]

    def part(start: int, end: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x[start:end]

    return [Form(LinearConsumer(W[e].T), part(start, end)) for e, (start, end) in enumerate(pairwise(stops))]
