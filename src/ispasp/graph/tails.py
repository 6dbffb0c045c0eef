"""What follows a layer: a BatchNorm or other factor on its outputs, and the skip connection it is added to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ispasp.graph.trace import Source

aten = torch.ops.aten
_ADD = (aten.add.Tensor, aten.add_.Tensor)
_NOTHING = (aten.dropout.default, aten.dropout_.default, aten.clone.default, aten.contiguous.default)
_SCALE = (aten.mul.Tensor, aten.mul_.Tensor)


@dataclass(frozen=True, eq=False)
class Tail:
    """A node's output goes through `norm` and `factors` (each alone), then is added to `other`.

    All of them multiply each output channel by a number of its own; none may have another user, so that nothing else in
    the network sees the values in between.
    """

    norm: fx.Node | None = None
    factors: tuple[fx.Node, ...] = ()
    other: fx.Node | None = None


def tail(node: fx.Node, channel: int, sources: Mapping[str, Source]) -> Tail:
    """Follow the output of a layer whose output channels are on dimension `channel`."""
    rank = len(node.meta["val"].shape)
    norm, at = None, node
    factors: list[fx.Node] = []
    while len(at.users) == 1:
        (user,) = at.users
        if user.target is aten.batch_norm.default and norm is None and not factors and channel % rank == 1:
            if user.args[0] is not at or user.args[3] is None or user.args[5]:  # batch statistics are no affine map
                break
            norm = user
        elif user.target in _NOTHING:
            if user.target in _NOTHING[:2] and user.args[2]:  # training=True
                break
        elif user.target in _SCALE and (factor := _factor(user, at, channel % rank, rank, sources)) is not None:
            factors.append(factor)
        elif user.target in _ADD:
            return Tail(norm, tuple(factors), _other(user, at))
        else:
            break
        at = user
    return Tail(norm, tuple(factors))


def _factor(user: fx.Node, at: fx.Node, channel: int, rank: int, sources: Mapping[str, Source]) -> fx.Node | None:
    """The parameter that a product multiplies output channels with, if that is what it does."""
    other = user.args[1] if user.args[0] is at else user.args[0]
    if not isinstance(other, fx.Node) or other.op != "placeholder":
        return None
    if sources[other.name].kind not in ("parameter", "buffer"):
        return None
    shape = [1] * (rank - len(other.meta["val"].shape)) + list(other.meta["val"].shape)
    outputs = at.meta["val"].shape[channel]
    fits = len(shape) == rank and all(n == (outputs if k == channel else 1) for k, n in enumerate(shape))
    return other if fits else None


def _other(user: fx.Node, at: fx.Node) -> fx.Node | None:
    """The other summand, if it has the full shape and is not the same value."""
    first, second = user.args[0], user.args[1]
    other = second if first is at else first
    alpha = user.kwargs.get("alpha", 1)
    if not isinstance(other, fx.Node) or other is at or alpha != 1:
        return None
    shape = getattr(other.meta.get("val"), "shape", None)
    return other if shape == at.meta["val"].shape else None


def scale(found: Tail, value_of: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The factor on each output channel in float64, None for one. (outputs,)"""
    total = None
    if found.norm is not None:
        gamma, _, _, var = found.norm.args[1:5]
        eps = found.norm.args[7]
        total = torch.rsqrt(value_of[var].double() + eps)  # type: ignore[index, operator, arg-type]
        if gamma is not None:
            total = total * value_of[gamma].double()  # type: ignore[index]
    for factor in found.factors:
        more = value_of[factor].double().flatten()
        total = more if total is None else total * more
    return None if total is None else total.detach()
