"""Curves: the error a hidden dimension is predicted to have at every width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.evidence import columns, energy, total_energy
from ispasp.types import Consumer, ConvConsumer, Gram, Reading, Statistics
from ispasp.types.consumer import patches
from ispasp.types.dimension import CHECK_DATA, check_finite, is_integer

_RIDGE = 1e-6
_WIDEST = 8192  # a Gram matrix of more columns takes more than half a gigabyte


@dataclass(frozen=True)
class Curve:
    """Predicted relative squared error ||V||^2 / ||U||^2 of one hidden dimension against its kept units.

    V is the dense minus the pruned output of the consumers, U the dense output. `kept` ascends to all units, where the
    error is 0; `error` never rises. Between the points it is linear.

    >>> Curve(kept=(2, 4, 8), error=(0.5, 0.1, 0.0)).at([2, 3, 8])
    array([0.5, 0.3, 0. ])
    """

    kept: tuple[int, ...]
    error: tuple[float, ...]

    def __post_init__(self) -> None:
        kept, error = self.kept, self.error
        if not kept or len(kept) != len(error):
            raise InputError(f"{len(kept)} widths and {len(error)} errors: pass one error for each width, at least one")
        if not all(is_integer(k) and k >= 0 for k in kept) or any(a >= b for a, b in pairwise(kept)):
            raise InputError(f"kept={kept}: pass different whole numbers >= 0, ascending to all units")
        if not all(math.isfinite(e) and e >= 0.0 for e in error):
            raise InputError(f"error={error}: pass finite numbers >= 0, relative squared errors")
        if error[-1] != 0.0:
            raise InputError(f"error={error} ends with {error[-1]}: nothing is lost with all units, end with 0.0")
        if any(a < b for a, b in pairwise(error)):
            raise InputError(f"error={error} rises with more units: pass its running minimum")

    @property
    def units(self) -> int:
        return self.kept[-1]

    def at(self, width: ArrayLike) -> NDArray[np.float64]:
        """The error at a width, or at an array of widths (same shape); flat outside the points."""
        return np.asarray(np.interp(np.asarray(width, dtype=np.float64), self.kept, self.error), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Curves:
    """The curve of every hidden dimension, and its units in an order whose beginnings are what widths keep."""

    curves: Mapping[str, Curve] = field(default_factory=dict)
    order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def kept(self, name: str, width: int) -> tuple[int, ...]:
        return tuple(sorted(self.order[name][:width]))


def error_curve(
    selector: Selector,
    statistics: Statistics,
    points: int = 12,
    *,
    energy: Tensor | None = None,
    compensated: bool = False,
    least: int = 1,
) -> tuple[Curve, tuple[int, ...]]:
    """Select units at about `points` widths, in one call of the selector, and compute the error of each choice.

    Returns the curve, and an order of all units: its first n are about what the selector keeps at width n.

    The error of a choice comes from the energy matrix E (units, units): ||V||^2 = 1_R^T E 1_R, R the removed units.
    Without `energy`, E is computed from the Gram matrices of the statistics. With `compensated`, each kept unit is
    rescaled as least squares would: the shape of the error that a refit leaves, from E alone. With `least=0` the curve
    begins at no units, where everything is lost.

    >>> from ispasp.engine import measure
    >>> from ispasp.select import TopK
    >>> from ispasp.types import LinearConsumer
    >>> r = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, 2.0, 2.0]]), ["magnitude", "gram"])
    >>> error_curve(TopK(), Statistics(3, (r,)))
    (Curve(kept=(1, 2, 3), error=(0.555..., 0.111..., 0.0)), (1, 2, 0))
    """
    E, units = _checked_energy(statistics, points, energy), statistics.units
    if "gram" not in selector.needs:  # every selection would compute E again from the Gram matrices, as evidence
        rows = [(row.consumer, [s for s in row.statistics.values() if s.name != "gram"]) for row in statistics.readings]
        statistics = replace(statistics, readings=tuple(Reading(consumer, *rest) for consumer, rest in rows))
    kept, dense = _grid(units, int(points)), float(E.sum())  # dense: ||U||^2
    alive = dense > 0.0 and len(kept) > 1  # an output that is zero everywhere cannot lose anything
    chosen = selector.path(statistics, kept[:-1]) if alive else []
    error = [_lost(E, each, compensated) / dense for each in chosen] if alive else [0.0] * (len(kept) - 1)
    if least == 0:
        kept, error = (0, *kept), [float(dense > 0.0), *error]
    # Enforce monotonicity: more units can be worse, as their outputs cancel less. The smaller set was also available.
    curve = Curve(kept, tuple(np.minimum.accumulate([*error, 0.0]).tolist()))
    times = torch.bincount(torch.tensor([u for each in chosen for u in each], dtype=torch.long), minlength=units)
    rank = list(zip((-times).tolist(), (-E.diagonal()).tolist(), strict=True))
    return curve, tuple(sorted(range(units), key=rank.__getitem__))


def _checked_energy(statistics: Statistics, points: int, energy: Tensor | None) -> Tensor:
    if not is_integer(points) or points < 2:
        raise InputError(f"points={points!r}: pass an integer >= 2; 12 follow a curve well")
    E, units = total_energy(statistics) if energy is None else energy.double(), statistics.units
    if E is None:
        raise InputError("a consumer has no Gram matrix: take it with measure(consumer, H, ['gram']), or pass energy")
    if E.shape != (units, units):
        raise InputError(f"energy has shape {tuple(E.shape)}, the dimension {units} units: pass ({units}, {units})")
    check_finite("the energy matrix", E, CHECK_DATA)
    return E


def _grid(units: int, points: int) -> tuple[int, ...]:
    """Widths from 1 to all, denser where few units stay: errors fall fastest there."""
    if units <= points:
        return tuple(range(1, units + 1))
    inner = {math.ceil(units * (i / points) ** 1.5) for i in range(1, points)}  # some coincide in small dimensions
    return tuple(sorted({1, *inner, units}))


def _lost(E: Tensor, kept: tuple[int, ...], compensated: bool) -> float:
    removed = torch.ones(len(E), dtype=torch.bool, device=E.device)
    removed[list(kept)] = False
    missing = E[:, removed].sum(1)  # <A H_i, what is removed>
    lost = missing[removed].sum()
    if compensated:  # minimise ||removed - sum over kept of x_i A H_i||^2
        inner, b = E[~removed][:, ~removed].clone(), missing[~removed]
        inner.diagonal().add_(_RIDGE * inner.diagonal().mean())
        lost = lost - b @ torch.linalg.lstsq(inner, b[:, None]).solution[:, 0]
    return max(float(lost), 0.0)


def sampled_energy(consumer: Consumer, H: Tensor, units: int, positions: int = 2048) -> Tensor:
    """E with E_ij = sum of <A H_i, A H_j> over at most `positions` outputs, evenly spread. (units, units)

    H is what the consumer gets. A consumer that reads very many channels gives only the diagonal of E: the error of a
    choice is then the sum of its units' own errors.

    >>> from ispasp.types import LinearConsumer
    >>> sampled_energy(LinearConsumer(torch.tensor([[1.0, 2.0]])), torch.tensor([[1.0, 1.0], [0.0, 3.0]]), units=2)
    tensor([[ 1.,  2.],
            [ 2., 40.]], dtype=torch.float64)
    """
    H = H.detach() if H.dtype in (torch.float32, torch.float64) else H.detach().float()
    if not isinstance(consumer, ConvConsumer):
        H = H.reshape(-1, H.shape[-1])
    wanted = min(len(H), -(-positions // max(1, H[:1, :1].numel())))
    X = patches(consumer, H[:: max(1, len(H) // max(1, wanted))][:wanted])  # an expert may get no token at all
    X = X[..., :: max(1, X.shape[-1] // positions)][..., :positions]  # (g, K, N)
    if X.shape[1] <= _WIDEST:
        return energy(consumer, Gram((X @ X.mT).double(), X.shape[-1]), units)
    W, unit_of = columns(consumer)  # (g, O/g, K), (g, K)
    E = torch.zeros(units, dtype=torch.float64, device=X.device)
    for group in range(len(W)):
        for unit in range(units):
            mine = unit_of[group] == unit
            G = X[group, mine] @ X[group, mine].T  # (channels of the unit, same)
            V = W[group][:, mine]
            E[unit] += ((V.T @ V) * G.double()).sum()
    return torch.diag(E)
