"""CoSaMP: sparse recovery with its least-squares step, the algorithm i-SpaSP started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.evidence import Evidence
from ispasp.select.ordering import descending
from ispasp.select.registry import register
from ispasp.types import Selection, Statistics, units_to_keep
from ispasp.types.checks import is_integer

_RIDGE = 1e-8  # columns have norm 1; makes equal columns share their weight instead of failing
_EQUAL = 2.0**-20  # rounding over ridge is about 1e-8: values this close, relative to the largest, are equal


@register
@dataclass(frozen=True)
class CoSaMP(Selector):
    """Recover the dense output from s columns A H_i (one per unit) by CoSaMP.

    Needell, Tropp (2009), CoSaMP: Iterative signal recovery from incomplete and inaccurate samples. Needs Gram
    matrices; costs `iterations` solves with at most 3s unknowns, after the energy matrix.

    Columns are divided by their norms, as the theory asks, so the signal is x_i = ||A H_i||. In each iteration, with
    a the current estimate: Omega = the 2s largest of |Phi^T (u - Phi a)|; b = least squares on Omega and the support of
    a; a = the s largest of |b|. It stops once the merged set repeats, since b depends on that set only.

    For keep >= 0.5 the merged set may be all units: b is then x, and the choice that of the largest ||A H_i||.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> r = measure(LinearConsumer(torch.eye(4)), torch.tensor([[1.0, 3.0, -2.0, 0.5]]), ["gram"])
    >>> CoSaMP().select(Statistics(4, (r,)), keep=2).kept
    (1, 2)
    """

    name: ClassVar[str] = "cosamp"
    needs: ClassVar[tuple[str, ...]] = ("gram",)

    iterations: int = 20

    def __post_init__(self) -> None:
        """Refuse options that mean nothing."""
        if not is_integer(self.iterations) or self.iterations < 1:
            raise InputError(f"iterations={self.iterations!r}: pass an integer >= 1")

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose `keep` units, the lowest index first among equals.

        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> r = measure(LinearConsumer(torch.ones(1, 3)), torch.tensor([[1.0, 1.0, 0.1], [2.0, 2.0, 0.0]]), ["gram"])
        >>> CoSaMP().select(Statistics(3, (r,)), keep=1)
        Selection(kept 1 units [0], iterations=2, converged=True, residual 4.518 -> 2.283)
        """
        s = units_to_keep(keep, statistics.units)
        evidence = Evidence(statistics)
        masks, converged = _iterate(evidence.energy(self.name), s, self.iterations)
        return evidence.selection([torch.nonzero(S).flatten().tolist() for S in masks], converged=converged)

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """Every width is a search of its own; they share the energy matrix."""
        E = Evidence(statistics).energy(self.name)
        found = [_iterate(E, width, self.iterations)[0][-1] for width in widths]
        return [tuple(torch.nonzero(S).flatten().tolist()) for S in found]


def _iterate(E: Tensor, s: int, T: int) -> tuple[list[Tensor], bool]:
    """The support after each iteration, as masks (n,), and whether the last two are a fixed point."""
    x = E.diagonal().clamp(min=0.0).sqrt()  # the signal: norms of the columns
    safe = torch.where(x > 0, x, 1.0)
    G = E / safe / safe[:, None]  # Phi^T Phi, unit diagonal
    correlation = G @ x  # Phi^T u
    floor = float(correlation.abs().max()) * _EQUAL
    a, before = torch.zeros_like(x), None
    supports: list[Tensor] = []
    for _ in range(T):
        y = (correlation - G @ a).abs()
        merged = a != 0
        merged[descending(torch.where(y > floor, y, 0.0))[: 2 * s]] = True
        if before is not None and bool((merged == before).all()):
            supports.append(supports[-1])
            return supports, True
        before = merged
        on = torch.nonzero(merged).flatten()
        b = torch.zeros_like(x)
        b[on] = _solved(G[on[:, None], on], correlation[on])
        order = descending(torch.round(b.abs() / (_EQUAL * b.abs().max().clamp(min=1e-300))))
        S = torch.zeros_like(merged)
        S[order[merged[order]][:s]] = True
        a = torch.where(S, b, 0.0)
        supports.append(S)
    return supports, False


def _solved(G: Tensor, right: Tensor) -> Tensor:
    G.diagonal().add_(_RIDGE)
    L, info = torch.linalg.cholesky_ex(G)
    if not bool(info.any()):
        return torch.cholesky_solve(right[:, None], L).flatten()
    solution: Tensor = torch.linalg.solve(G, right)  # a Gram matrix in float32 may have negative eigenvalues
    return solution
