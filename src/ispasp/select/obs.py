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
from ispasp.select.ordering import smallest
from ispasp.select.registry import register
from ispasp.select.scores import prefixes
from ispasp.types import Selection, Statistics, units_to_keep

_PENDING = 128  # columns removed before all is brought up to date


@register
@dataclass(frozen=True)
class OBS(Selector):
    """Remove one unit at a time, the one the refitted others replace best, and refit.

    Hassibi, Stork (1993), Second order derivatives for network pruning: Optimal Brain Surgeon, in the layer-wise form
    of Frantar, Alistarh (2022), Optimal Brain Compression, for whole units as Kurtic, Frantar, Alistarh (2023), ZipLM.
    A step removes the unit u with the least increase

        tr(W_u ((G^-1)_uu)^-1 W_u^T)

    of ||(W - W') X||_F^2, G = X X^T, over all W' that do not read u; then W becomes that W'. Where we leave them: a
    unit is a block of channels x taps, and the increases of several consumers and groups add up. Channels outside the
    hidden dimension keep their weights. The last W' is not handed on: a selection is a set, and local compensation
    finds W' again, with a shift besides. So pair it with compensation.

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
        return evidence.selection(self._left(statistics, evidence, [s]), converged=True)

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """One sequence of removals passes all widths."""
        return self._left(statistics, Evidence(statistics), widths)

    def _left(self, statistics: Statistics, evidence: Evidence, widths: Sequence[int]) -> list[tuple[int, ...]]:
        dense = float(evidence.energy(self.name).diagonal().sum())
        n = statistics.units
        try:
            gone = _eliminate(_regressions(statistics, self.ridge), n, min(widths), dense)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # public, but not in its __all__
            raise InputError(
                f"a Gram matrix is not positive definite with ridge={self.ridge}: take it in float64, or pass a "
                "larger ridge such as OBS(ridge=1e-3)"
            ) from error
        stay = sorted(set(range(n)) - set(gone))
        return prefixes([*stay, *reversed(gone)], widths)


def _eliminate(regressions: Sequence[_Regression], n: int, s: int, dense: float) -> list[int]:
    """The units that go, in order, until s of n are left; increases below rounding of `dense` are equal."""
    read_by: list[list[int]] = [[] for _ in range(n)]
    for number, regression in enumerate(regressions):
        for unit in regression.units.tolist():
            read_by[unit].append(number)
    increase = torch.stack([regression.increase(n) for regression in regressions])  # (regressions, n)
    stays = torch.ones(n, dtype=torch.bool, device=increase.device)
    gone: list[int] = []
    for _ in range(n - s):
        u = smallest(increase.sum(0), stays, dense)
        stays[u] = False
        gone.append(u)
        for number in read_by[u]:
            regressions[number].remove(u)
            increase[number] = regressions[number].increase(n)
    return gone


class _Regression:
    """Least squares of one group of one consumer.

    Columns are laid out unit by unit, b for each; a unit with fewer is filled up by columns that are always zero, which
    change nothing. W is kept transposed. Removing unit u makes

        G^-1 <- G^-1 - F^T F,  W <- W - F^T Z,  F = L^-1 (G^-1)_u,:,  Z = L^-1 W_u,  L L^T = (G^-1)_uu.

    Scores need only the diagonal blocks of G^-1 and of W W^T, which are kept up to date; all else is wanted when its
    unit goes, and made then from the F and Z since the last `catch_up`. So a step reads W once and writes no matrix.
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
        self._inverse = torch.cholesky_inverse(torch.linalg.cholesky(padded))
        blocks = self._inverse.reshape(n, b, n, b).diagonal(dim1=0, dim2=2)  # (b, b, n)
        self._blocks = blocks.permute(2, 0, 1).contiguous()
        each = self.W.reshape(n, b, -1)
        self._squares = each @ each.mT  # W_u W_u^T of every unit, (n, b, b)
        self._F = G.new_empty(_PENDING + b, n * b)  # of removals that W and G^-1 do not know yet
        self._Z = G.new_empty(_PENDING + b, len(W))
        self._pending = 0
        self._alive = torch.ones(n, dtype=torch.bool, device=G.device)

    def increase(self, units: int) -> Tensor:
        """tr(W_u ((G^-1)_uu)^-1 W_u^T) for all units at once, 0 for those that are not read here. (units,)"""
        solved = torch.cholesky_solve(self._squares, torch.linalg.cholesky(self._blocks))
        scores = solved.diagonal(dim1=1, dim2=2).sum(1)
        return scores.new_zeros(units).index_copy(0, self.units, scores)

    def remove(self, unit: int) -> None:
        """Take a unit out and refit the others."""
        b = self._blocks.shape[1]
        k = int(torch.searchsorted(self.units, unit))
        C = slice(k * b, (k + 1) * b)
        L = torch.linalg.cholesky(self._blocks[k])
        past, of_W = self._F[: self._pending], self._Z[: self._pending]
        Z = torch.linalg.solve_triangular(L, self.W[C] - past[:, C].T @ of_W, upper=False)  # (b, O)
        due = torch.cat([past[:, C], of_W @ Z.T], dim=1).T @ past  # (2b, K)
        F = torch.linalg.solve_triangular(L, self._inverse[C] - due[:b], upper=False)  # (b, K)
        cross = _by_unit((self.W @ Z.T).T - due[b:], b)  # W_u Z^T of every unit
        f = _by_unit(F, b)
        cross = (cross - f @ (0.5 * Z @ Z.T)) @ f.mT
        self._squares -= cross + cross.mT
        self._blocks -= f @ f.mT
        self._squares[k] = 0.0
        self._blocks[k] = torch.eye(b, dtype=F.dtype, device=F.device)  # it was the inverse of nothing
        self._alive[k] = False
        at = slice(self._pending, self._pending + b)
        self._F[at], self._Z[at] = F, Z
        self._pending += b
        if self._pending >= _PENDING:
            self.catch_up()

    def catch_up(self) -> None:
        """Bring all of W and G^-1 up to date: few large products instead of many small ones."""
        F, Z = self._F[: self._pending], self._Z[: self._pending]
        self.W.addmm_(F.T, Z, alpha=-1)
        self._inverse.addmm_(F.T, F, alpha=-1)
        self._pending = 0
        if 2 * int(self._alive.sum()) <= len(self._alive):
            self._shrink()

    def _shrink(self) -> None:
        """Leave removed units out of all matrices: the second half of the removals costs a quarter of the first."""
        alive, b = self._alive, self._blocks.shape[1]
        columns = alive.repeat_interleave(b)
        self.units, self._blocks, self._squares = self.units[alive], self._blocks[alive], self._squares[alive]
        self.W, self._inverse = self.W[columns], self._inverse[columns][:, columns]
        self._F = self._F[:, columns].contiguous()
        self._alive = alive[alive]


def _by_unit(x: Tensor, b: int) -> Tensor:
    """(m, K) -> (n, b, m)"""
    return x.reshape(len(x), -1, b).permute(1, 2, 0)


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
