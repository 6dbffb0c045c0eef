"""Helpers of selectors: order without ties, the error of any choice of units, residuals of a chosen set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types import Consumer, Gram, Moment, Reading, Selection, Statistic, Statistics, Step, Total
from ispasp.types.dimension import check_sum

S = TypeVar("S", bound=Statistic)
_BITS = 40  # bits to compare, of 53: the same numbers summed in another order differ in the last bits


def comparable(x: Tensor, floor: float = 0.0) -> Tensor:
    """Round float64 values to 40 bits, and to zero below 2^-40 `floor`, so that rounding never breaks a tie."""
    mantissa, exponent = torch.frexp(x)
    rounded = torch.ldexp(torch.round(mantissa * 2.0**_BITS), exponent - _BITS)
    return torch.where(x.abs() <= floor * 2.0**-_BITS, torch.zeros_like(x), rounded)


def descending(x: Tensor, floor: float = 0.0) -> Tensor:
    """Indices of x from the largest value to the smallest; ties in order of index. (n,)"""
    return torch.sort(comparable(x, floor), descending=True, stable=True).indices


def largest(x: Tensor, among: Tensor, floor: float = 0.0) -> int:
    """Index of the largest value where `among` is true; the lowest index of a tie. (n,), (n,)"""
    return int(torch.where(among, comparable(x, floor), -torch.inf).argmax())


def smallest(x: Tensor, among: Tensor, floor: float = 0.0) -> int:
    """Index of the smallest value where `among` is true; the highest index of a tie. (n,), (n,)"""
    return len(x) - 1 - int(torch.where(among, comparable(x, floor), torch.inf).flip(0).argmin())


def columns(consumer: Consumer) -> tuple[Tensor, Tensor]:
    """The consumer as one matrix per group, which multiplies patches, and the unit of each of its columns.

    Returns W (groups, outputs / groups, K) in float64 with the scale multiplied in, and units (groups, K), -1 outside
    the hidden dimension. K = channels / groups x taps, as in a `Gram`.
    """
    W = consumer.grouped_weight().double()  # (g, O/g, C/g, *kernel)
    if consumer.scale is not None:
        W = W * consumer.scale.double().reshape(W.shape[0], -1, *(1,) * (W.ndim - 2))
    unit_of = consumer.unit_of().reshape(W.shape[0], -1).repeat_interleave(math.prod(consumer.kernel), dim=1)
    return W.flatten(2), unit_of


def energy(consumer: Consumer, gram: Gram, units: int) -> Tensor:
    """E with E_ij = sum over data of <A H_i, A H_j>, H_i unit i alone. (units, units)

    For any set R of removed units ||A H_R||_F^2 = 1_R^T E 1_R, so one matrix gives the error of every choice.

    >>> from ispasp.select import LinearConsumer, measure
    >>> A = LinearConsumer(torch.tensor([[1.0, 2.0]])); H = torch.tensor([[1.0, 1.0], [0.0, 3.0]])
    >>> energy(A, measure(A, H, ["gram"]).gram, 2)
    tensor([[ 1.,  2.],
            [ 2., 40.]], dtype=torch.float64)
    """
    W, unit_of = columns(consumer)  # (g, O/g, K), (g, K)
    check_sum("the Gram matrix", gram.total, gram.examples, (W.shape[0], W.shape[2], W.shape[2]))
    if consumer.count_units() > units:
        raise InputError(f"units={units}, but the consumer reads {consumer.count_units()}: pass the number it reads")
    E = (W.mT @ W).mul_(gram.total)  # (g, K, K)
    g, K, _ = E.shape
    row = unit_of + 1  # 0 for channels outside
    place = row + (units + 1) * torch.arange(g, device=row.device)[:, None]
    half = E.new_zeros(g * (units + 1), K).index_add_(0, place.flatten(), E.flatten(0, 1))  # sum rows: contiguous
    half = half.reshape(g, units + 1, K).mT.flatten(0, 1)  # (g K, units + 1): E is symmetric
    return E.new_zeros(units + 1, units + 1).index_add_(0, row.flatten(), half)[1:, 1:]


def total_energy(statistics: Statistics) -> Tensor | None:
    """Energy of all consumers together, or None unless every one of them has a Gram matrix. (units, units)"""
    parts = [energy(row.consumer, row.gram, statistics.units) for row in statistics.readings if row.gram is not None]
    return torch.stack(parts).sum(0) if len(parts) == len(statistics.readings) else None


def required(reading: Reading, kind: type[S], number: int, shape: tuple[int, ...]) -> S:
    """The statistic of this class, whose sums have this shape and a size; `number` names the consumer in errors."""
    taken = reading.get(kind)
    if taken is None:
        remedy = f"take it with measure(consumer, H, ['{kind.name}'])"
        if kind.needs_loss:
            remedy = "calibrate with a loss, or choose a method that needs none, such as 'ispasp'"
        raise InputError(f"consumer {number} has no {kind.name}: {remedy}")
    for size, total in taken.tensors().items():
        check_sum(f"the {kind.name} of consumer {number}", total, taken.examples, (*shape, *size))
    return taken


def by_channel_sums(statistics: Statistics, kind: type[Total], *rows: int) -> list[tuple[Consumer, Tensor]]:
    """Every consumer with what it has of a statistic of channels, in float64. (*rows, channels)"""
    readings = enumerate(statistics.readings)
    taken = ((r.consumer, required(r, kind, number, (*rows, r.consumer.channels))) for number, r in readings)
    return [(consumer, found.total.double()) for consumer, found in taken]


def moments(statistics: Statistics) -> list[tuple[Consumer, Tensor]]:
    """Every consumer with its first moment, in float64, for each size of map it reads. (channels, *size)"""
    found = []
    for number, reading in enumerate(statistics.readings):
        maps = required(reading, Moment, number, (reading.consumer.channels,)).maps
        if not maps:
            raise InputError(f"the moment of consumer {number} holds no data: calibrate on at least one example")
        for size, total in maps.items():
            axes = len(reading.consumer.kernel)
            if len(size) != axes:
                raise InputError(
                    f"the moment of consumer {number} is for maps of size {size}, the consumer reads maps with "
                    f"{axes} axes: take it with measure(consumer, H)"
                )
            found.append((reading.consumer, total.double()))
    return found


class Evidence:
    """Residuals of any kept set of one hidden dimension.

    ||mu(V)||_2 needs first moments, ||V||_F needs Gram matrices; a residual without its statistic is None. A
    convolution's mu(V) is summed over the data but not over positions, because borders are treated differently.
    """

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics

    @cached_property
    def _energy(self) -> Tensor | None:
        return total_energy(self.statistics)

    @cached_property
    def _moments(self) -> list[tuple[Consumer, Tensor]] | None:
        return moments(self.statistics) if all(r.moment for r in self.statistics.readings) else None

    def energy(self, method: str) -> Tensor:
        """E of all consumers together, see `energy`; `method` names who needs it. (units, units)"""
        if self._energy is None:
            raise InputError(f"{method} needs a Gram matrix at every consumer: measure(consumer, H, ['gram']) takes it")
        return self._energy

    def step(self, kept: Sequence[int]) -> Step:
        n = self.statistics.units
        if not all(0 <= unit < n for unit in kept):
            raise InputError(f"kept={tuple(kept)}: pass unit indices from 0 to {n - 1}")
        removed = torch.ones(n, dtype=torch.float64, device=self.statistics.readings[0].consumer.weight.device)
        removed[list(kept)] = 0.0
        residual = moment_residual = None
        if self._energy is not None:
            residual = math.sqrt(max(float(removed @ self._energy @ removed), 0.0))
        if self._moments is not None:  # A is linear: mu(V) = A mu(H - H_S)
            V = [A((M * A.per_channel(removed))[None]) for A, M in self._moments]
            moment_residual = math.sqrt(sum(float(v.square().sum()) for v in V))
        return Step(tuple(kept), moment_residual, residual)

    def selection(self, sets: Sequence[Sequence[int]], *, converged: bool = True) -> Selection:
        """The selection that went through these sets, with the residuals of each.

        >>> from ispasp.select import LinearConsumer, measure
        >>> r = measure(LinearConsumer(torch.eye(2)), torch.tensor([[3.0, 4.0]]))
        >>> Evidence(Statistics(2, (r,))).selection([(0,), (1,)], converged=False)
        Selection(kept 1 units [1], iterations=2, converged=False, moment residual 5 -> 3)
        """
        if not sets:
            raise InputError("no sets given: pass the set after each iteration, at least one")
        known = {kept: self.step(kept) for kept in dict.fromkeys(map(tuple, sets))}
        steps = tuple(known[tuple(kept)] for kept in sets)
        return Selection(steps[-1].kept, self.step(()), steps, converged=converged)


def places(unit_of: Tensor, units: int) -> Tensor:
    """Which channel of its unit each channel is: 0, 1, ... in order of index. (channels,)"""
    order = torch.sort(unit_of, stable=True).indices
    counts = torch.bincount(unit_of, minlength=units)
    within = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[unit_of[order]]
    return torch.empty_like(order).index_copy(0, order, within)
