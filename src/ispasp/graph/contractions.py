"""The table of contraction ops: one entry for each, its linear form with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ispasp.graph.ops import OPERANDS, Arguments, Form, Operand, contraction
from ispasp.types import ConvConsumer, LinearConsumer
from ispasp.types.geometry import Geometry

aten = torch.ops.aten


def _same(x: Tensor) -> Tensor:
    return x


@contraction(aten.linear.default, weight="weight", bias="bias", channels=-1, sliced=-1, total=True)
def _linear(a: Arguments, data: Operand) -> Sequence[Form]:
    W = a["weight"]
    if data.name != "input" or W.ndim != 2:
        return []
    return [Form(LinearConsumer(W), _same, _same)]


def _overloads(*names: str) -> list[Any]:
    return [getattr(getattr(aten, name), overload) for name in names for overload in getattr(aten, name).overloads()]


def _tuple(values: Any, axes: int) -> Any:
    if isinstance(values, str):
        return values
    given = [values] if isinstance(values, int) else list(values)
    return tuple(given * axes if len(given) == 1 else given)


def _conv(a: Arguments, data: Operand, transposed: bool) -> Sequence[Form]:
    W = a["weight"]
    if data.name != "input":
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


_CONV: dict[str, Any] = {"weight": "weight", "bias": "bias", "channels": "conv"}


@contraction(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, **_CONV, sliced=1, total=True)
@contraction(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, **_CONV, total=True)
def _plain(a: Arguments, data: Operand) -> Sequence[Form]:
    return _conv(a, data, transposed=False)


@contraction(*_overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), **_CONV)
def _transposed(a: Arguments, data: Operand) -> Sequence[Form]:
    return _conv(a, data, transposed=True)


@contraction(*_overloads("convolution", "_convolution"), **_CONV)
def _general(a: Arguments, data: Operand) -> Sequence[Form]:
    return _conv(a, data, transposed=bool(a["transposed"]))


@contraction(aten.addmm.default, bias="self", channels=-1)
@contraction(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default)
def _matmul(a: Arguments, data: Operand) -> Sequence[Form]:
    first, second = [name for name in a if name in OPERANDS][-2:]
    if (a.get("beta", 1), a.get("alpha", 1)) != (1, 1):
        return []
    left = data.name == first
    W = a[second] if left else a[first]
    if W.ndim == 1:
        return [Form(LinearConsumer(W[None]), _same)] if left else [Form(LinearConsumer(W[None]), lambda x: x.mT)]
    if W.ndim == 2 and left:
        return [Form(LinearConsumer(W.T), _same, lambda w: w.T)]
    if W.ndim == 2:
        return [Form(LinearConsumer(W), _columns, _same, _columns)]
    X = data.get(a)
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


@contraction(aten.einsum.default)
def _einsum(a: Arguments, data: Operand) -> Sequence[Form]:
    tensors, at = a["tensors"], data.index
    if at is None or len(tensors) != 2 or "." in a["equation"] or "->" not in a["equation"]:
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


@contraction(aten.tensordot.default)
def _tensordot(a: Arguments, data: Operand) -> Sequence[Form]:
    mine, yours = ("self", "other") if data.name == "self" else ("other", "self")
    X, W = a[mine], a[yours]
    dims = [d % X.ndim for d in a[f"dims_{mine}"]]
    weights = [d % W.ndim for d in a[f"dims_{yours}"]]
    rows, made = [d for d in range(X.ndim) if d not in dims], [d for d in range(W.ndim) if d not in weights]
    weight = W.permute(*made, *weights).flatten(len(made)).reshape(-1, torch.Size(W.shape[d] for d in weights).numel())
    K = weight.shape[1]
    return [Form(LinearConsumer(weight), lambda x: x.permute(*rows, *dims).reshape(-1, K))]


@contraction("transformers.grouped_mm_fallback.default", *_overloads("_grouped_mm"))
def _experts(a: Arguments, data: Operand) -> Sequence[Form]:
    names = list(a)
    W, ends = a[names[1]], a[names[2]]
    if data.name != names[0] or W.ndim != 3 or ends is None:
        return []
    stops = [0, *ends.tolist()]

    def part(start: int, end: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x[start:end]

    return [Form(LinearConsumer(W[e].T), part(start, end)) for e, (start, end) in enumerate(pairwise(stops))]
