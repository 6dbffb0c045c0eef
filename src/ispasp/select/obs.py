"""OBS: optimal brain surgeon for whole units, the least-squares error of what stays decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.energy import columns
from ispasp.select.evidence import Evidence
from ispasp.select.ordering import descending
from ispasp.types import Selection, Statistics, units_to_keep


@dataclass(frozen=True)
class OBS(Selector):
    """Remove one unit at a time, the one the refitted others replace best, and refit.

    Hassibi, Stork (1993), Second order derivatives for network pruning: Optimal Brain Surgeon, in the layer-wise form
    of Frantar, Alistarh (2022), Optimal Brain Compression. A step removes the unit u with the least increase

        tr(W_u ((G^-1)_uu)^-1 W_u^T)

    of ||(W - W') X||_F^2, G = X X^T, over all W' that do not read u; then W becomes that W'. Where we leave them: a
    whole unit goes at once (a block of channels x taps), and the increases of several consumers and groups add up.
    Channels outside the hidden dimension keep their weights.

    Needs Gram matrices. Costs K^3 for the inverse and K^2 b for each unit removed at most, K what a group of the
    consumer reads and b the part of it that is one unit (9 for a 3 x 3 convolution).

    `ridge` is added to the diagonal of G, relative to its mean: it holds W' near W where the data do not decide. Below
    about 1e-9 rounding decides.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> H = torch.tensor([[1.0, 1.0, 0.3], [2.0, 2.0, 0.0]])   # units 0 and 1 can stand in for each other
    >>> r = measure(LinearConsumer(torch.ones(1, 3)), H, ["gram"])
    >>> OBS().select(Statistics(3, (r,)), keep=2).kept
    (0, 2)
    """

    name: ClassVar[str] = "obs"
    needs: ClassVar[tuple[str, ...]] = ("gram",)

    ridge: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse a ridge that makes nothing invertible."""
        if not isinstance(self.ridge, Real) or isinstance(self.ridge, bool) or not 0 < self.ridge < math.inf:
            raise InputError(f"ridge={self.ridge!r}: pass a number > 0, a part of the mean of the Gram's diagonal")

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose `keep` units; the highest index goes first among equals.

        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> r = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 2.0]]), ["gram"])
        >>> OBS().select(Statistics(3, (r,)), keep=2).kept   # unit 1 can stand in for unit 0
        (1, 2)
        """
        s = units_to_keep(keep, statistics.units)
        evidence = Evidence(statistics)
        dense = float(evidence.energy(self.name).diagonal().sum())
        try:
            stays = _eliminate(_regressions(statistics, self.ridge), statistics.units, s, dense)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # public, but not in its __all__
            raise InputError(
                f"a Gram matrix is not positive definite with ridge={self.ridge}: take it in float64, or pass a "
                "larger ridge such as OBS(ridge=1e-3)"
            ) from error
        return evidence.selection([torch.nonzero(stays).flatten().tolist()], converged=True)


def _eliminate(regressions: Sequence[_Regression], n: int, s: int, dense: float) -> Tensor:
    """Backward elimination down to s of n units, as a mask (n,); increases below rounding of `dense` are equal."""
    read_by: list[list[int]] = [[] for _ in range(n)]
    for number, regression in enumerate(regressions):
        for unit in regression.units.tolist():
            read_by[unit].append(number)
    increase = torch.stack([regression.increase(n) for regression in regressions])  # (regressions, n)
    stays = torch.ones(n, dtype=torch.bool, device=increase.device)
    for _ in range(n - s):
        order = descending(increase.sum(0), dense)
        u = int(order[stays[order]][-1])
        stays[u] = False
        for number in read_by[u]:
            regressions[number].remove(u)
            increase[number] = regressions[number].increase(n)
    return stays


class _Regression:
    """Least squares of one group of one consumer.

    Columns are laid out unit by unit, b for each; a unit with fewer is filled up by columns that are always zero, which
    change nothing. Removals downdate G^-1 <- G^-1 - F F^T with F = (G^-1)_:,u L^-T, L L^T = (G^-1)_uu. Only its
    diagonal blocks are kept up to date; any other entry is wanted once, when its unit goes, and made then from all F
    so far. So a step reads K x (columns removed) numbers instead of writing K^2.
    """

    def __init__(self, W: Tensor, G: Tensor, unit_of: Tensor, ridge: float) -> None:
        """W (O, K), G (K, K), unit of each column (K,)."""
        self.units, at = torch.unique(unit_of, return_inverse=True)  # (n,) sorted, (K,)
        counts = torch.bincount(at)
        n, b = len(counts), int(counts.max())
        order = torch.sort(at, stable=True).indices
        place = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[at[order]]
        where = at[order] * b + place  # of column order[c] in the new layout
        padded = G.new_zeros(n * b, n * b)
        padded[where[:, None], where] = G[order[:, None], order]
        padded.diagonal().add_(ridge)
        self.W = G.new_zeros(n * b, len(W))  # transposed: the columns of a unit are rows that lie together
        self.W[where] = W.T[order]
        self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(padded))
        blocks = self.inverse.reshape(n, b, n, b).diagonal(dim1=0, dim2=2)  # (b, b, n)
        self.blocks = blocks.permute(2, 0, 1).contiguous()
        self.F = G.new_empty(n * b, n * b)  # transposed, one row per column removed
        self.removed = 0

    def increase(self, units: int) -> Tensor:
        """tr(W_u ((G^-1)_uu)^-1 W_u^T) for all units at once, 0 for those that are not read here. (units,)"""
        W = self.W.reshape(*self.blocks.shape[:2], -1)  # (n, b, O)
        solved = torch.cholesky_solve(W @ W.mT, torch.linalg.cholesky(self.blocks))
        scores = solved.diagonal(dim1=1, dim2=2).sum(1)
        return scores.new_zeros(units).index_copy(0, self.units, scores)

    def remove(self, unit: int) -> None:
        """Take a unit out and refit the others."""
        b = self.blocks.shape[1]
        k = int(torch.searchsorted(self.units, unit))
        C = slice(k * b, (k + 1) * b)
        F = self.F[: self.removed]
        rows = self.inverse[C] - F[:, C].T @ F  # (b, K): (G^-1)_u,:
        L = torch.linalg.cholesky(rows[:, C])
        new = torch.linalg.solve_triangular(L, rows, upper=False)  # (b, K)
        self.W.addmm_(new.T, torch.linalg.solve_triangular(L, self.W[C], upper=False), alpha=-1)
        self.F[self.removed : self.removed + b] = new
        self.removed += b
        part = new.reshape(b, -1, b).permute(1, 2, 0)  # (n, b, b)
        self.blocks -= part @ part.mT
        self.blocks[k] = torch.eye(b, dtype=new.dtype, device=new.device)  # it was the inverse of nothing
        self.W[C] = 0.0


def _regressions(statistics: Statistics, ridge: float) -> list[_Regression]:
    """One regression for every group of every consumer."""
    found = []
    for reading in statistics.readings:
        if reading.gram is None:
            continue  # the energy has been asked for before, which refuses this
        W, unit_of = columns(reading.consumer)
        G = reading.gram.total.double()
        damping = ridge * (float(G.diagonal(dim1=1, dim2=2).mean()) or 1.0)  # 1 if the consumer gets nothing but zeros
        for w, g, units in zip(W, G, unit_of, strict=True):
            mine = units >= 0
            if bool(mine.any()):
                found.append(_Regression(w[:, mine], g[mine][:, mine], units[mine], damping))
    return found
