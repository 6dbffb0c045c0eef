"""How fast the sorted rows of mu(H) decay: (p, R) row-compressibility and the tails it implies (Lemma 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.theory.moments import as_moment

_ROUNDING = 1e-9  # relative; the fit and the check go through logarithms


@dataclass(frozen=True)
class RowCompressibility:
    """The i-th largest |mu(H)| is at most R / i^(1/p), for i = 1, 2, ...

    A small p means few strong rows: p = 0 that only one row is not zero, p = inf that all are alike.

    >>> fit = RowCompressibility(p=0.5, R=1.0)
    >>> fit.bound(2), fit.tail(10), fit.holds(torch.tensor([0.2, 1.0]))
    (0.25, 0.1, True)
    """

    p: float
    R: float

    def __post_init__(self) -> None:
        """Refuse what is no exponent or no magnitude."""
        if not self.p >= 0 or not 0 <= self.R < math.inf:
            raise InputError(f"p={self.p} and R={self.R} were given: pass p > 0 and a finite R >= 0")

    @property
    def exponent(self) -> float:
        """1/p, the slope of the decay in a log-log plot.

        >>> RowCompressibility(p=0.5, R=1.0).exponent
        2.0
        """
        return 1 / self.p if self.p > 0 else math.inf

    def bound(self, i: int) -> float:
        """R / i^(1/p), the bound on the i-th largest row, counted from 1.

        >>> RowCompressibility(p=1.0, R=6.0).bound(3)
        2.0
        """
        _at_least_one(i=i)
        return float(self.R * float(i) ** -self.exponent)

    def tail(self, s: int, order: int = 1) -> float:
        """Bound the l_q norm of mu(E) for the best split with s rows, q = `order`; Lemma 2 is q = 1.

        (sum over i > s of (R i^(-1/p))^q)^(1/q) <= R s^(1/q - 1/p) / (q/p - 1)^(1/q): the integral from s on.
        For p >= q there is no bound that is free of the number of rows, and inf is returned.

        >>> fit = RowCompressibility(p=0.5, R=1.0)
        >>> fit.tail(4), round(fit.tail(4, order=2), 4), RowCompressibility(p=1.0, R=1.0).tail(4)
        (0.25, 0.0722, inf)
        """
        _at_least_one(s=s, order=order)
        a, q = self.exponent, order
        if q * a <= 1:
            return math.inf if self.R > 0 else 0.0
        return float(self.R * float(s) ** (1 / q - a) / (q * a - 1) ** (1 / q))

    def holds(self, H: Tensor) -> bool:
        """Whether a measured H (n, B), or mu(H) (n,), is compressible with this p and R.

        >>> RowCompressibility(p=0.5, R=1.0).holds(torch.tensor([1.0, 0.3]))
        False
        """
        log_R = math.log(self.R) if self.R > 0 else -math.inf
        return _log_magnitude(_sorted_logs(H), self.exponent) <= log_R + _ROUNDING


def row_compressibility(H: Tensor, p: float | None = None) -> RowCompressibility:
    """Fit (p, R) to a measured H (n, B) or mu(H) (n,).

    Without p, -1/p is the least-squares slope of log |mu(H)|_(i) over log i, i >= 1, taken over the rows that
    are not zero. R = max_i i^(1/p) |mu(H)|_(i) is then the smallest magnitude for which the definition holds.

    >>> i = torch.arange(1, 101)
    >>> fit = row_compressibility(3.0 / i**2)
    >>> round(fit.p, 6), round(fit.R, 6)
    (0.5, 3.0)
    >>> row_compressibility(torch.tensor([0.0, 4.0, 0.0])).p
    0.0
    """
    if p is not None and not p > 0:
        raise InputError(f"p={p} was given: pass p > 0, or leave it out to have it fitted")
    logs = _sorted_logs(H)
    p = _fitted_p(logs) if p is None else p
    log_R = _log_magnitude(logs, 1 / p if p > 0 else math.inf)
    if log_R > 709:
        raise InputError(f"with p={p:.4g} the magnitude R is exp({log_R:.0f}), beyond float64: pass a larger p")
    return RowCompressibility(p, math.exp(log_R))


def _sorted_logs(H: Tensor) -> tuple[Tensor, Tensor]:
    """log i and log |mu(H)|_(i) over the non-zero rows, largest first, i = 1, 2, ..."""
    h = as_moment(H).abs()
    h = h[h > 0].sort(descending=True).values
    return torch.arange(1, len(h) + 1, dtype=torch.float64, device=h.device).log(), h.log()


def _log_magnitude(logs: tuple[Tensor, Tensor], a: float) -> float:
    """log max_i i^a |mu(H)|_(i); the first row needs no weight, so that a = inf is fine for a single row."""
    log_i, log_h = logs
    if len(log_h) == 0:
        return -math.inf
    return float((log_h + torch.where(log_i > 0, a * log_i, 0.0)).max())


def _fitted_p(logs: tuple[Tensor, Tensor]) -> float:
    log_i, log_h = logs
    if len(log_h) < 2:
        return 0.0
    x = log_i - log_i.mean()
    slope = -float((x @ log_h) / (x @ x))
    return 1 / slope if slope > _ROUNDING else math.inf


def _at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{name}={value} was given: it counts from 1")
