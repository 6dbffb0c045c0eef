"""Restricted isometry constants of a matrix, exact or between two bounds, and Assumption 1.

delta_r(W) is the largest ||W_T^T W_T - I||_2 over all sets T of r columns. All bounds hold up to rounding of float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, combinations, islice

import numpy as np
import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp_lab.theory.moments import as_matrix

_METHODS = ("auto", "exact", "monte_carlo", "coherence")
_AUTO_SUPPORTS, _MAX_SUPPORTS = 20_000, 5_000_000  # below a second; minutes
_BLOCK = 1 << 22  # numbers per batch of Gram submatrices (32 MB)
_REFINED, _ROUNDS = 8, 10  # how many sampled supports are improved, and how often

Interval = tuple[float, float]


@dataclass(frozen=True)
class RestrictedIsometry:
    """Bounds on delta_r: the eigenvalues of all W_T^T W_T, |T| = r, span `inner` and stay within `outer`.

    With `rescaled`, delta_r is that of c W for the best factor c, which Algorithm 1 does not see. `lower` and `upper`
    bound delta_r, `scale` is the c for which c W has the constant `upper`.

    >>> known = RestrictedIsometry(r=2, inner=(1.5, 2.5), outer=(1.0, 3.0), rescaled=True)
    >>> known.lower, known.upper, known.exact, round(known.scale, 4)
    (0.25, 0.5, False, 0.7071)
    """

    r: int
    inner: Interval
    outer: Interval
    rescaled: bool = False

    @property
    def lower(self) -> float:
        """Lower bound on delta_r."""
        return self._delta(*self.inner)

    @property
    def upper(self) -> float:
        """Upper bound on delta_r."""
        return self._delta(*self.outer)

    @property
    def exact(self) -> bool:
        """Whether both bounds are delta_r itself."""
        return self.inner == self.outer

    @property
    def scale(self) -> float:
        """The best factor c; 1 if not rescaled."""
        return math.sqrt(2 / sum(self.outer)) if self.rescaled and self.outer[1] > 0 else 1.0

    def _delta(self, low: float, high: float) -> float:
        if self.rescaled and high > 0:
            return (high - low) / (high + low)  # c^2 high - 1 = 1 - c^2 low
        return max(high - 1, 1 - low)


@dataclass(frozen=True)
class Assumption1:
    """Whether delta_4s(W) <= threshold; None where the bounds on delta_4s leave it open."""

    s: int
    isometry: RestrictedIsometry
    holds: bool | None
    reason: str


def restricted_isometry(
    W: Tensor, r: int, method: str = "auto", *, samples: int = 64, seed: int = 0, rescale: bool = False
) -> RestrictedIsometry:
    """Bound the r-th restricted isometry constant of W (d_out, d_hid).

    r above d_hid counts as d_hid; d_out < r means delta_r >= 1, since r columns are then linearly dependent.

    - "exact" tries all sets of r columns.
    - "monte_carlo" has a lower bound from `samples` random sets and sets of correlated columns, the best improved by a
      truncated power iteration, and an upper bound from the spectrum of W^T W or from Gershgorin discs with the r - 1
      largest off-diagonal entries in each row.
    - "coherence" has the same upper bound, and delta_1 as lower bound.
    - "auto" is "exact" where that takes below a second, else "monte_carlo".

    >>> [restricted_isometry(3 * torch.eye(4), r=2, rescale=rescale).upper for rescale in (False, True)]
    [8.0, 0.0]
    """
    W = as_matrix(W, "W")
    if r < 1 or samples < 1:
        raise InputError(f"r={r} and samples={samples} were given: pass whole numbers from 1 on")
    if method not in _METHODS:
        raise InputError(f"method={method!r} is unknown: pass one of {', '.join(_METHODS)}")
    d_out, n = W.shape
    r = min(r, n)
    supports = math.comb(n, r)
    if method == "exact" and supports > _MAX_SUPPORTS:
        raise InputError(f"{n} columns have {supports} sets of {r}, too many to try: pass 'monte_carlo'")
    G = W.T @ W  # (n, n)
    if method == "exact" or supports <= (_AUTO_SUPPORTS if method == "auto" else 1):
        inner = outer = _enumerated(G, r)
    else:
        outer, g = _outer(W, G, r), G.diagonal()
        inner = (float(g.min()), float(g.max())) if method == "coherence" else _sampled(G, r, samples, seed)
    if d_out < r:  # W_T^T W_T is singular, which eigvalsh reports as 1e-17
        inner, outer = (0.0, inner[1]), (0.0, outer[1])
    return RestrictedIsometry(r, inner, outer, rescale)


def assumption1(
    W: Tensor, s: int, *, threshold: float = 0.1, samples: int = 64, seed: int = 0, rescale: bool = False
) -> Assumption1:
    """Decide whether delta_4s(W) <= 0.1, for a consumer W (d_out, d_hid) that is pruned to s units.

    `rescale=True` asks whether some c W satisfies it, which is enough: Algorithm 1 keeps the same units for W and c W.

    >>> assumption1(torch.eye(8), s=2).holds
    True
    >>> assumption1(torch.ones(10, 1000), s=100).reason
    '10 outputs cannot carry 400 independent columns, so delta_400 >= 1: only s <= 2 is possible'
    """
    if s < 1:
        raise InputError(f"s={s} was given: pass how many units stay, s >= 1")
    W = as_matrix(W, "W")
    d_out, r = W.shape[0], min(4 * s, W.shape[1])
    if d_out < r:  # no need of the Gram matrix, which is large for such a W
        longest, largest = float(W.square().sum(0).max()), float(torch.linalg.matrix_norm(W, 2)) ** 2
        known = RestrictedIsometry(r, (0.0, longest), (0.0, largest), rescale)
        why = f"{d_out} outputs cannot carry {r} independent columns, so delta_{r} >= 1"
        return Assumption1(s, known, False, f"{why}: only s <= {d_out // 4} is possible")
    known = restricted_isometry(W, r, samples=samples, seed=seed, rescale=rescale)
    if known.upper <= threshold:
        return Assumption1(s, known, True, f"delta_{r} <= {known.upper:.4g}")
    if known.lower > threshold:
        return Assumption1(s, known, False, f"delta_{r} >= {known.lower:.4g} > {threshold:g}")
    return Assumption1(s, known, None, f"open: {known.lower:.4g} <= delta_{r} <= {known.upper:.4g}")


def _ends(G: Tensor, T: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest eigenvalue of G on each support, T (k, r) -> (k,), (k,)."""
    blocks = torch.split(T, _BLOCK // T.shape[1] ** 2 + 1)
    spectra = torch.cat([torch.linalg.eigvalsh(G[t[:, :, None], t[:, None, :]]) for t in blocks])
    return spectra[:, 0], spectra[:, -1]


def _enumerated(G: Tensor, r: int) -> Interval:
    sets, found = combinations(range(len(G)), r), []
    while block := list(islice(sets, _BLOCK // r**2 + 1)):
        T = np.fromiter(chain.from_iterable(block), np.int64, len(block) * r).reshape(-1, r)
        found.append(_ends(G, torch.from_numpy(T)))
    return min(float(low.min()) for low, _ in found), max(float(high.max()) for _, high in found)


def _gershgorin(G: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each column: the r columns that overlap it most (itself first), and the two ends of its disc."""
    g, overlap = G.diagonal(), G.abs().fill_diagonal_(math.inf).topk(r, dim=1)
    radius = overlap.values[:, 1:].sum(1)
    return overlap.indices, g - radius, g + radius


def _outer(W: Tensor, G: Tensor, r: int) -> Interval:
    _, low, high = _gershgorin(G, r)
    wide = W.shape[0] < W.shape[1]  # then W W^T is smaller, and has all eigenvalues of G but 0
    spectrum = torch.linalg.eigvalsh(W @ W.T if wide else G)
    return max(float(low.min()), 0.0 if wide else float(spectrum[0]), 0.0), min(float(high.max()), float(spectrum[-1]))


def _sampled(G: Tensor, r: int, samples: int, seed: int) -> Interval:
    n, k = len(G), min(_REFINED, len(G))
    generator = torch.Generator("cpu").manual_seed(seed)
    T = torch.rand(samples, n, generator=generator, dtype=torch.float32, device="cpu").topk(r, dim=1).indices
    near, low, high = _gershgorin(G, r)
    T = torch.cat([T, near[low.topk(k, largest=False).indices], near[high.topk(k).indices]])
    low, high = _ends(G, T)
    shift = torch.linalg.matrix_norm(G, 1)  # >= lambda_max, so that shift I - G is positive semidefinite
    narrow = _refined(shift * torch.eye(n, dtype=G.dtype, device=G.device) - G, T[low.topk(k, largest=False).indices])
    wide = _refined(G, T[high.topk(k).indices])
    low, high = _ends(G, torch.cat([T, narrow, wide]))
    return float(low.min()), float(high.max())


def _refined(B: Tensor, T: Tensor) -> Tensor:
    """Move each support to the r largest entries of B x, x the top eigenvector of B on it; it never gets worse."""
    for _ in range(_ROUNDS):
        x = torch.linalg.eigh(B[T[:, :, None], T[:, None, :]]).eigenvectors[:, :, -1]  # (k, r)
        X = torch.zeros(len(T), len(B), dtype=B.dtype, device=B.device).scatter_(1, T, x)
        T = (X @ B).abs().topk(T.shape[1], dim=1).indices
    return T
