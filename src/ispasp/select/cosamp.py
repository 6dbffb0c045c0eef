"""CoSaMP: sparse recovery with its least-squares step, the algorithm i-SpaSP started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.select.base import Found, Search, option, register, whole
from ispasp.select.evidence import Evidence, descending

_RIDGE = 1e-8  # columns have norm 1; equal columns share their weight instead of failing
_EQUAL = 2.0**-20  # rounding over ridge is about 1e-8: values this close, relative to the largest, are equal


@register
@dataclass(frozen=True)
class CoSaMP(Search):
    """Recover the dense output from s columns A H_i (one per unit) by CoSaMP.

    Needell, Tropp (2009), CoSaMP: Iterative signal recovery from incomplete and inaccurate samples. Needs Gram
    matrices; costs `iterations` solves with at most 3s unknowns, after the energy matrix.

    Columns are divided by their norms, as the theory asks, so the signal is x_i = ||A H_i||. In each iteration, with
    a the current estimate: Omega = the 2s largest of |Phi^T (u - Phi a)|; b = least squares on Omega and the support of
    a; a = the s largest of |b|. It stops once the merged set repeats, since b depends on that set only.

    For keep >= 0.5 the merged set may be all units: b is then x, and the choice that of the largest ||A H_i||.

    >>> from ispasp.select import select_units
    >>> select_units(torch.eye(4), torch.tensor([[1.0, 3.0, -2.0, 0.5]]), 2, "cosamp").kept
    (1, 2)
    """

    name = "cosamp"
    needs = ("gram",)

    iterations: int = option(20, whole(1), "an integer >= 1")

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """Every width is a search of its own; they share the energy matrix."""
        E = evidence.energy(self.name)
        return [_iterate(E, width, self.iterations) for width in widths]


def _iterate(E: Tensor, s: int, T: int) -> Found:
    """The support after each iteration, and whether the last two are a fixed point."""
    x = E.diagonal().clamp(min=0.0).sqrt()  # the signal: norms of the columns
    safe = torch.where(x > 0, x, 1.0)
    G = E / safe / safe[:, None]  # Phi^T Phi, unit diagonal
    correlation = G @ x  # Phi^T u
    floor = float(correlation.abs().max()) * _EQUAL
    a, before = torch.zeros_like(x), None
    supports: list[list[int]] = []
    for _ in range(T):
        y = (correlation - G @ a).abs()
        merged = a != 0
        merged[descending(torch.where(y > floor, y, 0.0))[: 2 * s]] = True
        if before is not None and bool((merged == before).all()):
            return Found([*supports, supports[-1]])
        before = merged
        on = torch.nonzero(merged).flatten()
        b = torch.zeros_like(x)
        b[on] = _solved(G[on[:, None], on], correlation[on])
        order = descending(torch.round(b.abs() / (_EQUAL * b.abs().max().clamp(min=1e-300))))
        S = order[merged[order]][:s].sort().values
        a = torch.zeros_like(x).index_copy(0, S, b[S])
        supports.append(S.tolist())
    return Found(supports, converged=False)


def _solved(G: Tensor, right: Tensor) -> Tensor:
    G.diagonal().add_(_RIDGE)
    L, info = torch.linalg.cholesky_ex(G)
    if not bool(info.any()):
        return torch.cholesky_solve(right[:, None], L).flatten()
    solution: Tensor = torch.linalg.solve(G, right)  # a Gram matrix in float32 may have negative eigenvalues
    return solution
