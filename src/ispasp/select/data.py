"""Selection straight from a weight and the activations it reads: the one-call form for tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ispasp.calibrate import measure
from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.function import Score
from ispasp.select.registry import selector
from ispasp.types import Consumer, ConvConsumer, LinearConsumer, Producer, Selection, Statistics, Step
from ispasp.types.checks import checked_tensor

_ELSEWHERE = {"producers", "sensitivity"}  # needs that are not statistics of H


def select_units(
    consumers: Tensor | Consumer | Sequence[Consumer],
    H: Tensor | Sequence[Tensor],
    keep: float | int,
    method: str | Selector | Score = "ispasp",
    *,
    producers: Tensor | Producer | Sequence[Producer] = (),
) -> Selection:
    """Choose the units to keep from activations that fit in memory, and measure ||V||_F on them, V = A H - A H_S.

    `consumers`: a weight (outputs, channels) or (outputs, channels, *kernel), a consumer, or several that read the
    same hidden dimension. `H`: what they get, (batch, ..., channels) or (batch, channels, *size); one tensor for all,
    or one for each. `producers`: what makes the units, for methods that need it: a weight (channels, *fan-in), a
    Producer, or several.

    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> H = torch.rand(100, 8) * torch.tensor([9.0, 8, 7, 6, 0.1, 0.1, 0.1, 0.1]); W = torch.randn(4, 8)
    >>> select_units(W, H, keep=0.5).kept
    (0, 1, 2, 3)
    >>> select_units(W, H, keep=2, method="l1", producers=torch.arange(8.0)[:, None]).kept
    (6, 7)
    """
    maps = [consumers] if isinstance(consumers, (Tensor, Consumer)) else consumers
    if not isinstance(maps, Sequence):
        raise InputError(f"consumers is a {type(maps).__name__}: pass a weight, a Consumer, or a list of them")
    if not isinstance(H, (Tensor, Sequence)):
        raise InputError(f"H is a {type(H).__name__}: pass a torch.Tensor, or a list with one for each consumer")
    As = [_consumer(c) for c in maps]
    Hs = [H] * len(As) if isinstance(H, Tensor) else list(H)
    if not As or len(Hs) != len(As):
        raise InputError(f"{len(As)} consumers and {len(Hs)} activations: pass one tensor for all, or one for each")
    chosen = selector(method)
    needs = {"moment", *chosen.needs} - _ELSEWHERE
    readings = tuple(measure(A, X, needs) for A, X in zip(As, Hs, strict=True))
    selection = chosen.select(Statistics(As[0].count_units(), readings, _producers(producers)), keep)
    measured = [_with_residual(step, As, Hs) for step in (selection.start, *selection.steps)]
    return replace(selection, start=measured[0], steps=tuple(measured[1:]))


def _consumer(given: Tensor | Consumer) -> Consumer:
    if isinstance(given, Consumer):
        return given
    weight = checked_tensor("a consumer", given)
    return LinearConsumer(weight) if weight.ndim == 2 else ConvConsumer(weight)


def _producers(given: Tensor | Producer | Sequence[Producer]) -> tuple[Producer, ...]:
    if isinstance(given, Tensor):
        return (Producer(given.flatten(1) if given.ndim > 2 else given),)
    if isinstance(given, Producer):
        return (given,)
    if not isinstance(given, Sequence) or not all(isinstance(producer, Producer) for producer in given):
        raise InputError(f"producers is a {type(given).__name__}: pass a weight, a Producer, or a list of Producers")
    return tuple(given)


def _with_residual(step: Step, As: Sequence[Consumer], Hs: Sequence[Tensor]) -> Step:
    if step.residual is not None:
        return step
    total = 0.0
    for A, H in zip(As, Hs, strict=True):
        unit_of = A.unit_of()
        kept = torch.tensor(step.kept, dtype=unit_of.dtype, device=unit_of.device)
        removed = (unit_of >= 0) & ~torch.isin(unit_of, kept)
        axes = (1,) * len(A.kernel) if isinstance(A, ConvConsumer) else ()
        V = A(H.detach().double() * removed.double().reshape(-1, *axes))
        total += float(V.square().sum())
    return replace(step, residual=math.sqrt(total))
