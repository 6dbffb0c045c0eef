"""First moments mu(H), the best split H = Z + E, and row-compressibility: how fast sorted rows of mu(H) decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ispasp.errors import InputError

_ROUNDING = 1e-9  # relative; fits and checks go through logarithms


class Split(NamedTuple):
    """H = Z + E with at most s non-zero rows in Z; both have the shape of H."""

    Z: Tensor
    E: Tensor


def mu(X: Tensor) -> Tensor:
    """Sum the columns of a matrix: mu(X)_i = sum_j X_ij, X (m, n) -> (m,) in float64.

    It is linear: mu(A B) = A mu(B), and mu(A + B) = mu(A) + mu(B) for A and B of equal shape.

    >>> A, B = torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> mu(A @ B), A.double() @ mu(B)
    (tensor([-5.], dtype=torch.float64), tensor([-5.], dtype=torch.float64))
    """
    return as_matrix(X, "X").sum(1)


def best_split(H: Tensor, s: int) -> Split:
    """Split H into its s rows with the largest |mu(H)| and the rest: H = Z + E.

    H is (n, B), or mu(H) itself as (n,). Among all splits with an s-row-sparse Z this one has the smallest mu(E) in
    every l_q norm at once, so bounds that grow with norms of mu(E) are tightest here. Of equal rows the first is kept.

    >>> split = best_split(torch.tensor([[1.0, 1.0], [0.0, 3.0], [0.5, 0.0]]), s=1)
    >>> mu(split.Z), mu(split.E)
    (tensor([0., 3., 0.], dtype=torch.float64), tensor([2.0000, 0.0000, 0.5000], dtype=torch.float64))
    """
    h = as_moment(H)
    if not 0 <= s <= len(h):
        raise InputError(f"H has {len(h)} rows and s={s} was given: pass 0 <= s <= {len(h)}")
    X, Z = H.detach().to("cpu", torch.float64), torch.zeros_like(H, dtype=torch.float64, device="cpu")
    D = h.abs().sort(descending=True, stable=True).indices[:s]
    Z[D] = X[D]
    return Split(Z, X - Z)


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
        if not self.p >= 0 or not 0 <= self.R < math.inf:
            raise InputError(f"p={self.p} and R={self.R} were given: pass p > 0 and a finite R >= 0")

    @property
    def exponent(self) -> float:
        """1/p, the slope of the decay in a log-log plot."""
        return 1 / self.p if self.p > 0 else math.inf

    def bound(self, i: int) -> float:
        """R / i^(1/p), the bound on the i-th largest row, counted from 1."""
        if i < 1:
            raise InputError(f"i={i} was given: it counts from 1")
        return float(self.R * float(i) ** -self.exponent)

    def tail(self, s: int, order: int = 1) -> float:
        """Bound the l_q norm of mu(E) for the best split with s rows, q = `order`; Lemma 2 is q = 1.

        (sum over i > s of (R i^(-1/p))^q)^(1/q) <= R s^(1/q - 1/p) / (q/p - 1)^(1/q): the integral from s on.
        It is inf for p >= q, where no bound is free of the number of rows.

        >>> fit = RowCompressibility(p=0.5, R=1.0)
        >>> fit.tail(4), round(fit.tail(4, order=2), 4), RowCompressibility(p=1.0, R=1.0).tail(4)
        (0.25, 0.0722, inf)
        """
        if s < 1 or order < 1:
            raise InputError(f"s={s} and order={order} were given: both count from 1")
        a, q = self.exponent, order
        if q * a <= 1:
            return math.inf if self.R > 0 else 0.0
        return float(self.R * float(s) ** (1 / q - a) / (q * a - 1) ** (1 / q))

    def holds(self, H: Tensor) -> bool:
        """Whether a measured H (n, B), or mu(H) (n,), is compressible with this p and R."""
        log_R = math.log(self.R) if self.R > 0 else -math.inf
        return _log_magnitude(_sorted_logs(H), self.exponent) <= log_R + _ROUNDING


def row_compressibility(H: Tensor, p: float | None = None) -> RowCompressibility:
    """Fit (p, R) to a measured H (n, B) or mu(H) (n,).

    Without p, -1/p is the least-squares slope of log |mu(H)|_(i) over log i, taken over the rows that are not zero.
    R = max_i i^(1/p) |mu(H)|_(i) is the smallest magnitude for which the definition holds.

    >>> fit = row_compressibility(3.0 / torch.arange(1, 101) ** 2)
    >>> round(fit.p, 6), round(fit.R, 6)
    (0.5, 3.0)
    """
    if p is not None and not p > 0:
        raise InputError(f"p={p} was given: pass p > 0, or leave it out to have it fitted")
    log_i, log_h = logs = _sorted_logs(H)
    if p is None and len(log_h) < 2:
        p = 0.0
    elif p is None:
        x = log_i - log_i.mean()
        slope = -float((x @ log_h) / (x @ x))
        p = 1 / slope if slope > _ROUNDING else math.inf
    log_R = _log_magnitude(logs, 1 / p if p > 0 else math.inf)
    if log_R > 709:
        raise InputError(f"with p={p:.4g} the magnitude R is exp({log_R:.0f}), beyond float64: pass a larger p")
    return RowCompressibility(p, math.exp(log_R))


def as_moment(H: Tensor) -> Tensor:
    """mu(H) of a matrix (n, B); a vector (n,) is mu(H) already."""
    return as_matrix(H.unsqueeze(1) if H.ndim == 1 else H, "H").sum(1)


def as_matrix(X: Tensor, name: str) -> Tensor:
    """X (m, n) detached, on the CPU and in float64, checked to be a finite matrix."""
    if X.ndim != 2 or X.numel() == 0:
        raise InputError(f"{name} has shape {tuple(X.shape)}, a matrix is expected: pass two non-empty axes")
    X = X.detach().to("cpu", torch.float64)
    if not bool(X.isfinite().all()):
        raise InputError(f"{name} has NaN or infinite entries, finite ones are expected: look where it was made")
    return X


def _sorted_logs(H: Tensor) -> tuple[Tensor, Tensor]:
    """log i and log |mu(H)|_(i) over the non-zero rows, largest first, i = 1, 2, ..."""
    h = as_moment(H).abs()
    h = h[h > 0].sort(descending=True).values
    return torch.arange(1, len(h) + 1, dtype=torch.float64, device=h.device).log(), h.log()


def _log_magnitude(logs: tuple[Tensor, Tensor], a: float) -> float:
    """log max_i i^a |mu(H)|_(i); log 1 = 0 needs no weight, so a = inf is fine for a single row."""
    log_i, log_h = logs
    if len(log_h) == 0:
        return -math.inf
    return float((log_h + torch.where(log_i > 0, a * log_i, 0.0)).max())
