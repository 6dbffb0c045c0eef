"""CoSaMP, the sparse recovery that i-SpaSP started from, and Subspace Pursuit: both with a least-squares step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.select.base import Found, Search, option, register, whole
from ispasp.select.evidence import Evidence, descending
from ispasp.select.obs import Fit, Regression, positive_definite, regressions, ridge_option, total_scores

_RIDGE = 1e-8  # columns have norm 1; equal columns share their weight instead of failing
_EQUAL = 2.0**-20  # rounding over ridge is about 1e-8: values this close, relative to the largest, are equal
_FALLS = 1 - 1e-6  # a step must lower the error to this fraction, else rounding decides


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

    name, needs = "cosamp", ("gram",)

    iterations: int = option(20, whole(1), "an integer >= 1")

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """Every width is a search of its own; they share the energy matrix."""
        return [_iterate(evidence.energy(self.name), width, self.iterations) for width in widths]


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


@register
@dataclass(frozen=True)
class SubspacePursuit(Search):
    """Grow the kept set S by candidates, refit, and shrink it to s units again, as long as the refitted error falls.

    Dai, Milenkovic (2009), Subspace Pursuit for Compressive Sensing Signal Reconstruction. The first S are the s units
    that alone explain most of the consumers' output. In each iteration, with W' the least-squares weights that read S:

        Omega = the s units outside S that lower ||(W - W') X||_F most when they enter;
        S = the s units of Omega and S whose loss raises the refitted error of Omega and S most.

    i-SpaSP takes 2s candidates and then the strongest activations, which is Top-K once 2s >= n. Here both steps look
    at the error, so no keep is special.

    Where we leave the paper: a unit is a block of channels x taps, its coefficients are the weights of all outputs, and
    consumers add up. The paper shrinks by the size of coefficients, which suits nearly orthogonal columns; here a unit
    counts by the error its loss costs, as in `OBS`, but all at once. The paper stops when the error does not fall; we
    then halve the number of candidates, down to one.

    Needs Gram matrices. Costs two inverses of order K, about 4 K^3, for each iteration, K what a group of the consumer
    reads. `ridge` as in `OBS`.

    >>> from ispasp.select import select_units
    >>> H = torch.tensor([[1.0, 1.0, 0.3], [2.0, 2.0, 0.0]])   # units 0 and 1 can stand in for each other
    >>> select_units(torch.ones(1, 3), H, 2, "sp").kept
    (0, 2)
    """

    name, needs = "sp", ("gram",)

    iterations: int = option(20, whole(1), "an integer >= 1")
    ridge: float = ridge_option()

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """Every width is a search of its own; they share the regressions."""
        dense, n = float(evidence.energy(self.name).diagonal().sum()), evidence.statistics.units
        with positive_definite("SubspacePursuit", self.ridge):
            problems = list(regressions(evidence.statistics, self.ridge))
            return [_pursue(problems, n, s, self.iterations, dense) for s in widths]


def _pursue(problems: Sequence[Regression], n: int, s: int, T: int, dense: float) -> Found:
    """The set after each iteration, and whether no further one would lower the error."""

    def fitted(kept: Tensor) -> tuple[float, Tensor]:
        fits = [Fit(problem, kept) for problem in problems]
        return sum(fit.error for fit in fits), total_scores(fits, n)

    def best(scores: Tensor, among: Tensor, count: int) -> Tensor:
        order = descending(scores, dense)
        return torch.zeros_like(among).index_fill(0, order[among[order]][:count], True)

    nothing = torch.zeros(n, dtype=torch.bool, device=problems[0].G.device)
    S = best(fitted(nothing)[1], ~nothing, s)
    error, gains = fitted(S)
    sets, candidates = [S], min(s, n - s)
    while candidates and len(sets) < T:
        merged = S | best(gains, ~S, candidates)
        shrunk = best(fitted(merged)[1], merged, s)
        lower, next_gains = fitted(shrunk)
        if lower < _FALLS * error:
            S, error, gains = shrunk, lower, next_gains
        else:
            candidates //= 2
        sets.append(S)
    return Found([torch.nonzero(S).flatten().tolist() for S in sets], converged=candidates == 0)
