"""Evidence: the residuals that go with a kept set, as far as the statistics give them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.coupling import checked
from ispasp.select.energy import total_energy
from ispasp.types import Selection, Statistics, Step


class Evidence:
    """Residuals of any kept set of one hidden dimension.

    ||mu(V)||_2 needs first moments, ||V||_F Gram matrices; what is missing comes out as None. A convolution's mu(V)
    is summed over the data but not over positions, which it treats differently at borders.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> r = measure(LinearConsumer(torch.eye(2)), torch.tensor([[1.0, 2.0], [0.0, 2.0]]), ["moment", "gram"])
    >>> Evidence(Statistics(2, (r,))).step((0,))
    Step(kept=(0,), moment_residual=4.0, residual=2.8284271247461903)
    """

    def __init__(self, statistics: Statistics) -> None:
        """Prepare once what every set shares."""
        self._statistics = statistics
        for number, reading in enumerate(statistics.readings):
            if reading.moment is not None:
                checked(reading.moment, reading.consumer, number)
        self._energy = total_energy(statistics)

    def energy(self, method: str) -> Tensor:
        """E of all consumers together, see `select.energy`; `method` names who cannot do without. (units, units)

        >>> from ispasp.types import LinearConsumer, Reading
        >>> Evidence(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),))).energy("thinet")
        Traceback (most recent call last):
        ...
        ispasp.errors.InputError: thinet needs a Gram matrix at every consumer: take them with measure(...)
        """
        if self._energy is None:
            raise InputError(
                f"{method} needs a Gram matrix at every consumer: take them with measure(consumer, H, ['gram'])"
            )
        return self._energy

    def step(self, kept: Sequence[int]) -> Step:
        """The residuals if only `kept` stay.

        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> r = measure(LinearConsumer(torch.ones(1, 2)), torch.tensor([[1.0, 2.0], [1.0, -2.0]]), ["moment", "gram"])
        >>> Evidence(Statistics(2, (r,))).step(()).moment_residual   # the second unit's outputs cancel in the sum
        2.0
        """
        if not all(0 <= unit < self._statistics.units for unit in kept):
            raise InputError(f"kept={tuple(kept)}: pass unit indices from 0 to {self._statistics.units - 1}")
        device = self._statistics.readings[0].consumer.weight.device
        removed = torch.ones(self._statistics.units, dtype=torch.float64, device=device)
        removed[list(kept)] = 0.0
        residual = None
        if self._energy is not None:
            residual = math.sqrt(max(float(removed @ self._energy @ removed), 0.0))
        return Step(tuple(kept), self._moment_residual(removed), residual)

    def selection(self, sets: Sequence[Sequence[int]], *, converged: bool) -> Selection:
        """The selection that went through these sets; a set that stays the same is measured once.

        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> r = measure(LinearConsumer(torch.eye(2)), torch.tensor([[3.0, 4.0]]))
        >>> Evidence(Statistics(2, (r,))).selection([(0,), (1,)], converged=False)
        Selection(kept 1 units [1], iterations=2, converged=False, moment residual 5 -> 3)
        """
        if not sets:
            raise InputError("no sets given: pass the set after each iteration, at least one")
        known: dict[tuple[int, ...], Step] = {}
        for kept in map(tuple, sets):
            if kept not in known:
                known[kept] = self.step(kept)
        steps = tuple(known[tuple(kept)] for kept in sets)
        return Selection(steps[-1].kept, self.step(()), steps, converged=converged)

    def _moment_residual(self, removed: Tensor) -> float | None:
        total = 0.0
        for reading in self._statistics.readings:
            if reading.moment is None:
                return None
            unit_of = reading.consumer.unit_of()
            mask = torch.where(unit_of >= 0, removed[unit_of.clamp(min=0)], 0.0)  # (channels,)
            for M in reading.moment.maps.values():
                rest = M.double() * mask.reshape(-1, *(1,) * (M.ndim - 1))
                V = reading.consumer(rest[None])  # A is linear: mu(V) = A mu(H - H_S)
                total += float(V.square().sum())
        return math.sqrt(total)
