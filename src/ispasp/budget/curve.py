"""Curves: the error a hidden dimension is predicted to have at every width."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.energy import total_energy
from ispasp.types import Reading, Statistics
from ispasp.types.checks import check_finite, is_integer


@dataclass(frozen=True)
class Curve:
    """Predicted relative squared error ||V||^2 / ||U||^2 of one hidden dimension against its kept units.

    V is the dense minus the pruned output of the consumers, U the dense one. `kept` ascends to all units, where the
    error is 0; `error` never rises. Between the points it is linear.

    >>> Curve(kept=(2, 4, 8), error=(0.5, 0.1, 0.0)).at([2, 3, 8])
    array([0.5, 0.3, 0. ])
    """

    kept: tuple[int, ...]
    error: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse points that make no curve."""
        kept, error = self.kept, self.error
        if not kept or len(kept) != len(error):
            raise InputError(f"{len(kept)} widths and {len(error)} errors: pass one error for each width, at least one")
        if not all(is_integer(k) and k >= 1 for k in kept) or any(a >= b for a, b in pairwise(kept)):
            raise InputError(f"kept={kept}: pass different whole numbers >= 1, ascending to all units")
        if not all(math.isfinite(e) and e >= 0.0 for e in error):
            raise InputError(f"error={error}: pass finite numbers >= 0, relative squared errors")
        if error[-1] != 0.0:
            raise InputError(f"error={error} ends with {error[-1]}: nothing is lost with all units, end with 0.0")
        if any(a < b for a, b in pairwise(error)):
            raise InputError(f"error={error} rises with more units: pass its running minimum")

    @property
    def units(self) -> int:
        """All units of the hidden dimension."""
        return self.kept[-1]

    def at(self, width: ArrayLike) -> NDArray[np.float64]:
        """The error at a width, or at an array of them (same shape); flat outside the points.

        >>> float(Curve((1, 3), (1.0, 0.0)).at(2))
        0.5
        """
        return np.asarray(np.interp(np.asarray(width, dtype=np.float64), self.kept, self.error), dtype=np.float64)


def error_curve(selector: Selector, statistics: Statistics, points: int = 12, *, energy: Tensor | None = None) -> Curve:
    """Let the selector choose at about `points` widths, and evaluate what each choice loses.

    The error of a choice comes from the energy matrix E (units, units): ||V||^2 = 1_R^T E 1_R, R the removed units. It
    is made of the statistics' Gram matrices unless it is given.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.select import TopK
    >>> from ispasp.types import LinearConsumer
    >>> r = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, 2.0, 2.0]]), ["magnitude", "gram"])
    >>> error_curve(TopK(), Statistics(3, (r,)))
    Curve(kept=(1, 2, 3), error=(0.555..., 0.111..., 0.0))
    """
    if not is_integer(points) or points < 2:
        raise InputError(f"points={points!r}: pass an integer >= 2; 12 follow a curve well")
    E = _energy(statistics) if energy is None else energy.double()
    units = statistics.units
    if E.shape != (units, units):
        raise InputError(
            f"energy has shape {tuple(E.shape)}, the hidden dimension {units} units: pass ({units}, {units})"
        )
    check_finite("the energy matrix", E, "check the calibration data and the layers before, or run them in float32")
    if "gram" not in selector.needs:  # with Gram matrices at hand every selection would make E anew, as evidence
        statistics = replace(statistics, readings=tuple(map(_without_gram, statistics.readings)))
    kept = _grid(units, int(points))
    dense = float(E.sum())  # ||U||^2; an output that is zero everywhere cannot lose anything
    chosen = selector.path(statistics, kept[:-1]) if kept[1:] and dense > 0.0 else [()] * (len(kept) - 1)
    error = [_lost(E, units) / dense if dense > 0.0 else 0.0 for units in chosen]
    # A choice of more units can be worse, for its outputs cancel less; then the smaller one was to be had as well.
    return Curve(kept, tuple(np.minimum.accumulate([*error, 0.0]).tolist()))


def _without_gram(reading: Reading) -> Reading:
    return Reading(reading.consumer, *(each for name, each in reading.statistics.items() if name != "gram"))


def _energy(statistics: Statistics) -> Tensor:
    E = total_energy(statistics)
    if E is None:
        raise InputError(
            "a consumer has no Gram matrix: take it with measure(consumer, H, [..., 'gram']), or pass energy"
        )
    return E


def _grid(units: int, points: int) -> tuple[int, ...]:
    """Widths from 1 to all, denser where few units stay: errors fall fastest there."""
    if units <= points:
        return tuple(range(1, units + 1))
    inner = {math.ceil(units * (i / points) ** 1.5) for i in range(1, points)}  # some fall together in small dimensions
    return tuple(sorted({1, *inner, units}))


def _lost(E: Tensor, kept: tuple[int, ...]) -> float:
    removed = torch.ones(len(E), dtype=E.dtype, device=E.device)
    removed[list(kept)] = 0.0
    return max(float(removed @ E @ removed), 0.0)
