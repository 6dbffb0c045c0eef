"""OBS: optimal brain surgeon for whole units, which refits the others after every removal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Found, Search, option, prefixes, register, whole
from ispasp.select.evidence import Evidence, columns, descending, places, required, smallest
from ispasp.types import Fisher, Reading, Statistics

_PENDING = 128  # columns removed before all matrices are brought up to date
_FULL = 0.85  # part of the units up to which removed ones stay in the matrices
_WORTH = 1 - 1e-6  # an exchange costs at most this part of what it saves, else rounding decides


# Least squares for whole units: what removing one costs, and adding one gains, when the others are refitted ----------
class Regression(NamedTuple):
    """One group of one consumer: min over W' of tr (W - W')^T G (W - W'), W' zero outside the kept units.

    Columns are laid out unit by unit, b for each; a unit with fewer is padded with zero columns, which change nothing.
    """

    units: Tensor  # (n,) sorted
    W: Tensor  # (n b, O): the consumer's weight transposed
    G: Tensor  # (n b, n b): X X^T and the ridge
    b: int


def laid_out(W: Tensor, G: Tensor, unit_of: Tensor, ridge: float) -> Regression:
    """The regression of W (O, K) and G (K, K), given the unit of each column (K,)."""
    units, at = torch.unique(unit_of, return_inverse=True)  # (n,), (K,)
    n, place = len(units), places(at, len(units))
    b = int(place.max()) + 1
    where = at * b + place  # of each column in the new layout
    padded, transposed = G.new_zeros(n * b, n * b), G.new_zeros(n * b, len(W))
    padded[where[:, None], where] = G
    padded.diagonal().add_(ridge)
    transposed[where] = W.T
    return Regression(units, transposed, padded, b)


def regressions(statistics: Statistics, ridge: float) -> Iterator[Regression]:
    """One regression for every group of every consumer; `ridge` is relative to the mean of the Gram's diagonal."""
    for reading in statistics.readings:
        if reading.gram is None:
            continue  # `Evidence.energy` has raised before
        W, unit_of = columns(reading.consumer)
        G = reading.gram.total.double()
        damping = ridge * (float(G.diagonal(dim1=1, dim2=2).mean()) or 1.0)  # 1 if the consumer reads only zeros
        for w, g, units in zip(W, G, unit_of, strict=True):
            mine = units >= 0
            if bool(mine.any()):
                yield laid_out(w[:, mine], g[mine][:, mine], units[mine], damping)


def ridge_option() -> Any:
    """The ridge of `regressions`, as an option of a method."""

    def positive(ridge: Any) -> bool:
        return isinstance(ridge, Real) and not isinstance(ridge, bool) and 0 < float(ridge) < math.inf

    return option(1e-6, positive, "a number > 0, a part of the mean of the Gram's diagonal")


@contextmanager
def positive_definite(method: str, ridge: float) -> Iterator[None]:
    """Say in words that a Cholesky factorisation failed."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # public, but not in its __all__
        remedy = f"take it in float64, or raise ridge={ridge} of {method}"
        raise InputError(f"a Gram matrix is not positive definite: {remedy}") from error


class Fit:
    """The least squares of a kept set, which units may enter and leave.

    With M the kept columns and R the others, the symmetric matrix D holds -G_MM^-1, G_MM^-1 G_MR and the Schur
    complement of G_RR; B holds the fitted W' and the correlations of R with the residual. Then
    tr(B_u^T |D_uu|^-1 B_u) is the error that unit u of M costs when it leaves, and that u of R saves when it enters.
    """

    def __init__(self, regression: Regression, kept: Tensor) -> None:
        """`kept` is a mask over the units of the hidden dimension."""
        G, W, self._b, self.units = regression.G, regression.W, regression.b, regression.units
        self._kept = kept[self.units].clone()
        inside = self._kept.repeat_interleave(self._b)
        M, R = torch.nonzero(inside).flatten(), torch.nonzero(~inside).flatten()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(G[M[:, None], M]))
        P = inverse @ G[M[:, None], R]
        schur = G[R[:, None], R] - G[R[:, None], M] @ P
        self._D, self._B = torch.empty_like(G), torch.empty_like(W)
        self._D[M[:, None], M], self._D[M[:, None], R] = -inverse, P
        self._D[R[:, None], M], self._D[R[:, None], R] = P.T, schur
        self._B[M], self._B[R] = W[M] + P @ W[R], schur @ W[R]
        self.error = float((W[R] * self._B[R]).sum())  # of the set it was made for

    def scores(self, units: int) -> Tensor:
        """Cost or gain of each unit, 0 for those that are not read here. (units,)"""
        n, b = len(self.units), self._b
        D = self._D.reshape(n, b, n, b).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (n, b, b)
        D = torch.where(self._kept[:, None, None], -D, D)
        Z: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(D), self._B.reshape(n, b, -1), upper=False)
        return Z.new_zeros(units).index_copy(0, self.units, Z.square().sum((1, 2)))

    def move(self, unit: int) -> None:
        """Let a unit leave or enter, whichever it can: a sweep of D and B."""
        k = int(torch.searchsorted(self.units, unit))
        C = slice(k * self._b, (k + 1) * self._b)
        sign = -1.0 if bool(self._kept[k]) else 1.0
        inverse = torch.linalg.inv(self._D[C, C])
        rows, right = inverse @ self._D[C], inverse @ self._B[C]  # (b, K), (b, O)
        across = self._D[:, C].clone()
        self._D -= across @ rows
        self._B -= across @ right
        self._D[C], self._D[:, C] = sign * rows, sign * rows.T
        self._D[C, C], self._B[C] = -inverse, sign * right
        self._kept[k] = ~self._kept[k]


def total_scores(fits: Sequence[Fit], units: int) -> Tensor:
    """Cost or gain of each unit in all fits together. (units,)"""
    return torch.stack([fit.scores(units) for fit in fits]).sum(0)


# The method ----------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True)
class OBS(Search):
    """Remove one unit at a time, the one the refitted others replace best, and refit.

    Hassibi, Stork (1993), Second order derivatives for network pruning: Optimal Brain Surgeon, in the layer-wise form
    of Frantar, Alistarh (2022), Optimal Brain Compression, for whole units as Kurtic, Frantar, Alistarh (2023), ZipLM.
    A step removes the unit u with the least increase

        tr(W_u ((G^-1)_uu)^-1 W_u^T)

    of ||(W - W') X||_F^2, G = X X^T, over all W' that do not read u; then W becomes that W'. Where we leave them: a
    unit is a block of channels x taps, and the increases of several consumers and groups add up. Channels outside the
    hidden dimension keep their weights. The last W' is not handed on: compensation finds it again, so pair it with
    compensation.

    `ridge` is added to the diagonal of G, relative to its mean: it holds W' near W where the data do not decide. Below
    about 1e-9 rounding decides.
    `swaps` tries so many exchanges after the removals: the removed unit that saves most enters, the unit that costs
    least leaves, if that lowers the error. This is the local search of Meng et al. (2024), OSSCAR, one pair at a time.

    Needs Gram matrices. Costs K^3 for the inverse and at most K^2 b for each unit removed, K what a group of the
    consumer reads and b the part of it that is one unit (9 for a 3 x 3 convolution); with `swaps` another K^3, and
    2 K^2 b for each.

    >>> from ispasp.select import select_units
    >>> H = torch.tensor([[1.0, 1.0, 0.3], [2.0, 2.0, 0.0]])   # units 0 and 1 can stand in for each other
    >>> select_units(torch.ones(1, 3), H, 2, "obs").kept
    (0, 2)
    """

    name = "obs"
    needs: ClassVar[tuple[str, ...]] = ("gram",)

    ridge: float = ridge_option()
    swaps: int = option(0, whole(0), "an integer >= 0, the exchanges to try after the removals")

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """One sequence of removals passes all widths; each has its own exchanges."""
        dense, n = float(evidence.energy(self.name).diagonal().sum()), evidence.statistics.units
        with positive_definite("OBS", self.ridge):
            removals = [_Removals(each) for each in regressions(evidence.statistics, self.ridge)]
            gone = _eliminate(removals, n, min(widths), dense)
            found = prefixes([*sorted(set(range(n)) - set(gone)), *reversed(gone)], widths)
            if not self.swaps:
                return found
            problems = list(regressions(evidence.statistics, self.ridge))
            return [Found([_exchanged(problems, each.sets[-1], n, self.swaps, dense)]) for each in found]


@register
@dataclass(frozen=True)
class FisherOBS(OBS):
    """`OBS`, where the squared error of each output counts by the Fisher information of the model's predictions.

    Singh, Alistarh (2020), WoodFisher, for the Fisher information in optimal brain surgeon; Martens, Grosse (2015),
    K-FAC, for its factors, inputs and gradients of a layer, of which we take the Gram matrix of the inputs and the
    diagonal of the gradients. A step removes the unit with the least increase of

        sum over outputs o of f_o ||((W - W') X)_o||^2,   f_o = mean over the data of (dL/dy_o)^2,

    y the consumer's outputs and L = -log p(c) with c drawn from the model's own prediction p. To second order this is
    the divergence of the predictions, if outputs and positions are independent. The least squares of an output do not
    depend on f_o: W' is that of `OBS`, and so is compensation. Only the choice of units changes.

    An output of the model without classes is taken for the mean of a normal distribution. Where f is zero everywhere,
    all outputs count as in `OBS`. f is taken in the dense network, once for all layers.

    Needs Gram matrices, and one pass forward and back over the data. Costs what `OBS` does; `ridge` and `swaps` are its
    options.

    >>> from ispasp.select import LinearConsumer, measure
    >>> A = LinearConsumer(torch.eye(2))                        # unit 0 is larger, but only output 1 matters
    >>> reading = measure(A, torch.tensor([[3.0, 1.0], [3.0, -1.0]]), ["gram"])
    >>> felt = Reading(A, *reading.statistics.values(), Fisher(torch.tensor([0.01, 1.0]), examples=2))
    >>> OBS().select(Statistics(2, (felt,)), 1).kept, FisherOBS().select(Statistics(2, (felt,)), 1).kept
    ((0,), (1,))
    """

    name, needs = "obs-fisher", ("gram", "fisher")

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """The search of `OBS` for consumers whose outputs are scaled by the roots of f."""
        statistics = evidence.statistics
        rows = enumerate(statistics.readings)
        f = [required(row, Fisher, number, (row.consumer.outputs,)).total.double() for number, row in rows]
        largest = max(float(each.max()) for each in f)
        if largest > 0:
            pairs = zip(statistics.readings, f, strict=True)
            readings = tuple(_weighed(reading, each / largest) for reading, each in pairs)
            evidence = Evidence(replace(statistics, readings=readings))
        return super().search(evidence, widths)


def _weighed(reading: Reading, f: Tensor) -> Reading:
    """Gradients are those before a BatchNorm, so they replace its factors; an output of factor 0 is gone."""
    scale = f.sqrt() if reading.consumer.scale is None else f.sqrt() * (reading.consumer.scale != 0)
    return Reading(replace(reading.consumer, scale=scale), *reading.statistics.values())


def _eliminate(removals: Sequence[_Removals], n: int, s: int, dense: float) -> list[int]:
    """The units that go, in order, until s of n are left; increases below rounding of `dense` are equal."""
    read_by: list[list[int]] = [[] for _ in range(n)]
    for number, regression in enumerate(removals):
        for unit in regression.units.tolist():
            read_by[unit].append(number)
    increase = torch.stack([regression.increase(n) for regression in removals])  # (regressions, n)
    stays = torch.ones(n, dtype=torch.bool, device=increase.device)
    gone: list[int] = []
    for _ in range(n - s):
        u = smallest(increase.sum(0), stays, dense)
        stays[u] = False
        gone.append(u)
        for number in read_by[u]:
            removals[number].remove(u)
            increase[number] = removals[number].increase(n)
    return gone


def _exchanged(problems: Sequence[Regression], kept: Sequence[int], n: int, swaps: int, dense: float) -> list[int]:
    """The kept units after at most `swaps` tries to exchange one of them for another."""
    inside = torch.zeros(n, dtype=torch.bool, device=problems[0].G.device)
    inside[list(kept)] = True
    fits = [Fit(problem, inside) for problem in problems]

    def move(unit: int) -> None:
        inside[unit] = ~inside[unit]
        for fit in fits:
            if bool((fit.units == unit).any()):
                fit.move(unit)

    tried: set[int] = set()
    for _ in range(swaps):
        saved = total_scores(fits, n)
        j = next((i for i in descending(saved, dense).tolist() if not inside[i] and i not in tried), None)
        if j is None:
            break
        move(j)
        costs = total_scores(fits, n)
        u = smallest(costs, inside, dense)
        move(u)
        if float(costs[u]) < _WORTH * float(saved[j]):
            tried.clear()  # another set: what was no use before may be now
            continue
        if u != j:
            move(u)
            move(j)
        tried.add(j)
    return [int(unit) for unit in torch.nonzero(inside)]


class _Removals:
    """A regression from which units are removed one after the other.

    W is kept transposed. Removing unit u makes

        G^-1 <- G^-1 - F^T F,  W <- W - F^T Z,  F = L^-1 (G^-1)_u,:,  Z = L^-1 W_u,  L L^T = (G^-1)_uu.

    Scores need only the diagonal blocks of G^-1 and of W W^T, which are kept up to date; the rest is computed when its
    unit goes, from the F and Z since the last `catch_up`. So a step reads W once and writes no matrix.
    """

    def __init__(self, regression: Regression) -> None:
        self.units, self.W, n, b = regression.units, regression.W, len(regression.units), regression.b
        self._inverse = torch.cholesky_inverse(torch.linalg.cholesky(regression.G))
        blocks = self._inverse.reshape(n, b, n, b).diagonal(dim1=0, dim2=2)  # (b, b, n)
        self._blocks = blocks.permute(2, 0, 1).contiguous()
        each = self.W.reshape(n, b, -1)
        self._squares = each @ each.mT  # W_u W_u^T of every unit, (n, b, b)
        self._F = self.W.new_empty(_PENDING + b, n * b)  # of removals that W and G^-1 do not contain yet
        self._Z = self.W.new_empty(_PENDING + b, self.W.shape[1])
        self._pending = 0
        self._alive = torch.ones(n, dtype=torch.bool, device=self.W.device)

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
        """Bring W and G^-1 up to date: few large products instead of many small ones."""
        F, Z = self._F[: self._pending], self._Z[: self._pending]
        self.W.addmm_(F.T, Z, alpha=-1)
        self._inverse.addmm_(F.T, F, alpha=-1)
        self._pending = 0
        alive, b = self._alive, self._blocks.shape[1]
        if int(alive.sum()) > _FULL * len(alive):
            return
        # drop removed units from all matrices: what follows works on smaller ones
        columns = torch.nonzero(alive.repeat_interleave(b)).flatten()
        self.units, self._blocks, self._squares = self.units[alive], self._blocks[alive], self._squares[alive]
        self.W, self._inverse = self.W[columns], self._inverse[columns].index_select(1, columns)
        self._F = self._F[:, columns].contiguous()
        self._alive = alive[alive]


def _by_unit(x: Tensor, b: int) -> Tensor:
    """(m, K) -> (n, b, m)"""
    return x.reshape(len(x), -1, b).permute(1, 2, 0)
