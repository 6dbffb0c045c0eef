"""Subspace Pursuit: i-SpaSP's iteration with s candidates and a least-squares second step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.select.base import Found, Search, option, register, whole
from ispasp.select.evidence import Evidence, descending
from ispasp.select.obs import Fit, Regression, positive_definite, regressions, ridge_option, total_scores

_FALLS = 1 - 1e-6  # a step must lower the error to this fraction, else rounding decides


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

    name = "sp"
    needs = ("gram",)

    iterations: int = option(20, whole(1), "an integer >= 1")
    ridge: float = ridge_option()

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """Every width is a search of its own; they share the regressions."""
        dense, n = float(evidence.energy(self.name).diagonal().sum()), evidence.statistics.units
        with positive_definite("SubspacePursuit", self.ridge):
            problems = list(regressions(evidence.statistics, self.ridge))
            return [_iterate(problems, n, s, self.iterations, dense) for s in widths]


def _iterate(problems: Sequence[Regression], n: int, s: int, T: int, dense: float) -> Found:
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
