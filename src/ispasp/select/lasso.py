"""LASSO: the units that an l1 penalty on a factor per unit leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.select.base import Found, Search, register
from ispasp.select.evidence import Evidence, comparable, descending

_RIDGE = 1e-10  # relative to each diagonal entry: units that depend on others may enter without failing
_END = 1e-8  # end at this fraction of the first lambda: below it the ridge decides who enters
_STEPS = 20  # per unit: far more than a path has, unless rounding lets a unit come and go for ever


@register
@dataclass(frozen=True)
class Lasso(Search):
    """Choose units by LASSO regression of the dense output on what each unit contributes to it.

        min over beta of 1/2 ||A H - sum_i beta_i A H_i||_F^2 + lambda sum_i |beta_i|

    He, Zhang, Sun (2017), Channel Pruning for Accelerating Very Deep Neural Networks. With the energy matrix this is a
    quadratic in n unknowns. lambda falls from where no unit is left until s are; if it reaches zero before, the units
    that contribute most of the rest are added. Needs Gram matrices; costs n s for each unit that enters or leaves,
    after the energy matrix.

    Where we leave the paper: it solves for one lambda after the other and raises it until few enough are left. The
    solution is piecewise linear in lambda (Efron, Hastie, Johnstone, Tibshirani 2004, Least angle regression), so we
    walk from one kink to the next: exact, with no step or tolerance to choose. Only which factors beta are zero is
    used; refitting the weights is left to compensation. Contributions keep their size (the paper gives weights norm
    one), so units that contribute much enter first.

    >>> from ispasp.select import select_units
    >>> select_units(torch.eye(3), torch.tensor([[1.0, 3.0, -2.0]]), 2, "lasso").kept
    (1, 2)
    """

    name, needs = "lasso", ("gram",)

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """One walk down lambda passes all widths."""
        E = evidence.energy(self.name)
        ranked, found = descending(E.diagonal()).tolist(), []
        for kept, width in zip(_path(E, widths), widths, strict=True):
            rest = [unit for unit in ranked if unit not in set(kept)]
            found.append(Found([sorted([*kept, *rest][:width])]))
        return found


def _path(E: Tensor, widths: Sequence[int]) -> list[list[int]]:
    """For each width, the non-zero units at the largest lambda with that many; fewer if lambda reaches zero."""
    E = E + torch.diag(_RIDGE * E.diagonal())
    c, beta = E.sum(1), torch.zeros_like(E[0])  # c: correlations with the residual, E (1 - beta)
    first = float(c.abs().max())
    lam, active = first, _Active(E)
    seen: dict[int, list[int]] = {}
    enters, left = int(descending(c.abs())[0]), -1  # the unit that enters at this kink, the one that has just left
    for _ in range(_STEPS * len(E)):
        if lam <= _END * first:
            break
        if enters >= 0:
            active.add(enters)
        S = active.units
        seen.setdefault(len(S), list(S))
        if len(S) == max(widths):
            break
        d = active.solve(torch.sign(c[S]))  # beta_S grows by d when lambda falls by 1
        a = active.rows[: len(S)].T @ d  # and c falls by a
        to_enter = torch.minimum(_positive((lam - c) / (1 - a), lam), _positive((lam + c) / (1 + a), lam))
        to_enter[[*S, left] if left >= 0 else S] = lam
        to_leave = _positive(-beta[S] / d, lam)
        enters, leaves = int(comparable(to_enter, lam).argmin()), int(to_leave.argmin())
        step = min(float(to_enter[enters]), float(to_leave[leaves]))
        lam, c = lam - step, c - step * a
        beta[S] += step * d
        left = -1
        if float(to_leave[leaves]) < float(to_enter[enters]):
            enters, left = -1, S[leaves]
            active.drop(leaves)
            beta[left] = 0.0
    return [seen.get(width, active.units) for width in widths]


def _positive(step: Tensor, end: float) -> Tensor:
    return torch.where((step > 0) & (step < end), step, end)


class _Active:
    """The units S with beta_i != 0: their rows of E, and M = L^-1 with L L^T = E_SS.

    M instead of L makes a step products only, and is exact enough: its condition is the root of E's.
    """

    def __init__(self, E: Tensor) -> None:
        self.units: list[int] = []
        self.rows = torch.empty_like(E)
        self._E = E
        self._M = torch.zeros_like(E)

    def add(self, i: int) -> None:
        k = len(self.units)
        M, own = self._M[:k, :k], self._E[i, i]
        new = M @ self.rows[:k, i]  # the new row of L
        pivot = torch.maximum(own - new @ new, _RIDGE * own).sqrt()  # smaller: E is not exact to the ridge
        self._M[k, :k] = M.T @ new / -pivot
        self._M[k, k] = 1 / pivot
        self.rows[k] = self._E[i]
        self.units.append(i)

    def drop(self, k: int) -> None:
        """Without unit k the block of L after it becomes L K, K K^T = I + p p^T, where row k of L^-1 gives p."""
        n = len(self.units)
        below, row = self._M[k + 1 : n, :n], self._M[k, :n]
        p = -below[:, k] / row[k]
        below = below + p[:, None] * row  # column k is zero now
        t = torch.cat([p.new_ones(1), p.square()]).cumsum(0)
        sums = torch.cumsum(p[:, None] * below, 0).roll(1, 0)  # of the rows before
        sums[:1] = 0.0
        below = (below - (p / t[:-1])[:, None] * sums) * (t[:-1] / t[1:]).sqrt()[:, None]  # K^-1, substituting forward
        self._M[k : n - 1, :k] = below[:, :k]
        self._M[k : n - 1, k : n - 1] = below[:, k + 1 :]
        self._M[n - 1, :n] = 0.0
        self.rows[k : n - 1] = self.rows[k + 1 : n].clone()
        self.units.pop(k)

    def solve(self, x: Tensor) -> Tensor:
        k = len(self.units)
        M = self._M[:k, :k]
        return M.T @ (M @ x)
