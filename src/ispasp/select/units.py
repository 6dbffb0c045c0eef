"""`select_units`: choose units straight from a weight and the activations it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.select.base import Score, Selector, selector
from ispasp.types import Consumer, ConvConsumer, LinearConsumer, Producer, Selection, Statistics, Step
from ispasp.types.dimension import checked_tensor


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
    same hidden dimension. `H`: what they read, (batch, ..., channels) or (batch, channels, *size); one tensor for all,
    or one for each. `producers`: what makes the units, for methods that need it: a weight (channels, *fan-in), a
    Producer, or several.

    >>> H = torch.ones(100, 8) * torch.tensor([9.0, 8, 7, 6, 0.1, 0.1, 0.1, 0.1]); W = torch.eye(8)
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
    needs = {"moment", *chosen.needs} - {"producers", "sensitivity", "fisher"}  # those are not statistics of H
    readings = tuple(measure(A, X, needs) for A, X in zip(As, Hs, strict=True))
    selection = chosen.select(Statistics(As[0].count_units(), readings, _producers(producers)), keep)
    start, *steps = (_with_residual(step, As, Hs) for step in (selection.start, *selection.steps))
    return replace(selection, start=start, steps=tuple(steps))


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
        removed = torch.ones(A.count_units(), dtype=torch.float64, device=A.weight.device)
        removed[list(step.kept)] = 0.0
        total += float(A(H.detach().double() * A.per_channel(removed)).square().sum())
    return replace(step, residual=math.sqrt(total))
