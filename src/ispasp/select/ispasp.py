"""i-SpaSP (Wolfe & Kyrillidis, L4DC 2022) from first moments.

The paper sums importance over a data matrix in every iteration. Importance is linear in the data, so the sum can be
taken first (Lemma on mu: mu(A B) = A mu(B)): the sets are the same, and the cost does not depend on the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.coupling import activation, couplings
from ispasp.select.evidence import Evidence
from ispasp.select.ordering import descending
from ispasp.select.registry import register
from ispasp.types import Selection, Statistics, units_to_keep
from ispasp.types.checks import is_integer

Rank = Literal["value", "magnitude"]


@register
@dataclass(frozen=True)
class ISpaSP(Selector):
    """Algorithm 1: units that matter for the residual and are strongly active, refined over a few iterations.

    Wolfe, Kyrillidis (2022), i-SpaSP: Structured Neural Pruning via Sparse Signal Recovery. Needs first moments; costs
    `iterations` products with the consumers' weights.

    `rank` says what "largest" means for importance and activations: "value" as the paper prints it, right for
    non-negative activations (ReLU); "magnitude" as CoSaMP does, for signed ones (GELU, attention heads, whose channels
    would cancel each other).
    `minibatches`: every iteration looks at another mini-batch, in turn, as in the paper's experiments; then all
    iterations are run. Without, every iteration looks at all data.

    >>> import torch
    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer, Statistics
    >>> H = torch.tensor([[3.0, 0.0, 1.0, 0.5]]); W = torch.eye(4)
    >>> ISpaSP().select(Statistics(4, (measure(LinearConsumer(W), H),)), keep=2).kept
    (0, 2)
    """

    name: ClassVar[str] = "ispasp"
    needs: ClassVar[tuple[str, ...]] = ("moment",)

    iterations: int = 20
    rank: Rank = "value"
    minibatches: bool = False

    @property
    def parts(self) -> int:
        """A mini-batch for every iteration."""
        return self.iterations if self.minibatches else 0

    def __post_init__(self) -> None:
        """Refuse options that mean nothing."""
        _check_options(self.iterations, self.rank)
        if not isinstance(self.minibatches, bool):
            raise InputError(f"minibatches={self.minibatches!r}: pass True (a new one per iteration) or False")

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose `keep` units; stops early once the set is stable.

        >>> import torch
        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> reading = measure(LinearConsumer(torch.eye(3)), torch.tensor([[0.1, -3.0, 0.2]]))
        >>> ISpaSP(rank="magnitude").select(Statistics(3, (reading,)), keep=1).kept
        (1,)
        """
        return i_spasp(self._data(statistics), keep, iterations=self.iterations, rank=self.rank)

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """Every width is a search of its own; they share P and Q."""
        search = _Search(_parts(self._data(statistics)), self.rank)
        return [tuple(search.sets(width, self.iterations)[-1]) for width in widths]

    def _data(self, statistics: Statistics) -> Statistics | Sequence[Statistics]:
        if self.minibatches and not (isinstance(statistics, Statistics) and statistics.parts):
            raise InputError(
                "minibatches=True needs the statistics of each mini-batch: use it in ispasp.prune, or pass "
                "Statistics(..., parts=...)"
            )
        return statistics.parts if self.minibatches else statistics


def i_spasp(
    statistics: Statistics | Sequence[Statistics],
    keep: float | int,
    *,
    iterations: int = 20,
    rank: Rank = "value",
) -> Selection:
    """Algorithm 1 on first moments.

    In each iteration, with S the current set, h = mu(H) and s units to keep:

        y = A^T A (h - h|_S);  Omega = the 2s largest of y;  S = the s largest of h within Omega and S.

    `statistics`: of the whole data, or a sequence of which iteration t takes the t-th (cyclically), the paper's new
    mini-batch per iteration. With one statistic the search ends when the set is stable, which no later iteration
    could change; with mini-batches all iterations are run. Residuals refer to the first statistic.

    >>> import torch
    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer, Statistics
    >>> A = LinearConsumer(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
    >>> i_spasp(Statistics(3, (measure(A, torch.tensor([[1.0, 2.0, 3.0]])),)), keep=1)
    Selection(kept 1 units [2], iterations=2, converged=True, moment residual 5.831 -> 3.606)
    """
    _check_options(iterations, rank)
    parts = _parts(statistics)
    s = units_to_keep(keep, parts[0].units)
    sets = _Search(parts, rank).sets(s, iterations)
    stable = len(parts) == 1 and (2 * s >= parts[0].units or sets[-1:] == sets[-2:-1])
    return Evidence(parts[0]).selection(sets, converged=stable)


class _Search:
    """Activations and couplings of all parts, from which sets of any size are found."""

    def __init__(self, parts: Sequence[Statistics], rank: Rank) -> None:
        self._magnitude = rank == "magnitude"
        self._hs = [activation(part, magnitude=self._magnitude) for part in parts]
        self._couplings = [couplings(part) for part in parts]

    def sets(self, s: int, iterations: int) -> list[list[int]]:
        """The set of s units after each iteration."""
        masks = _iterate(self._hs, self._importance, s, iterations)
        return [torch.nonzero(S).flatten().tolist() for S in masks]

    def _importance(self, t: int, S: Tensor) -> Tensor:
        each = self._couplings[t % len(self._couplings)]
        return torch.stack([c.importance((~S).double(), magnitude=self._magnitude) for c in each]).sum(0)


def _parts(statistics: Statistics | Sequence[Statistics]) -> list[Statistics]:
    parts = [statistics] if isinstance(statistics, Statistics) else statistics
    if not isinstance(parts, Sequence) or not all(isinstance(part, Statistics) for part in parts):
        raise InputError(
            f"statistics is a {type(statistics).__name__}: pass a Statistics, made of the Reading of every consumer, "
            "or a list of them"
        )
    if not parts:
        raise InputError("no statistics given: pass the Statistics of at least one batch")
    if len({part.units for part in parts}) > 1:
        raise InputError(
            f"statistics of hidden dimensions with {[part.units for part in parts]} units: pass those of one dimension"
        )
    return list(parts)


def _check_options(iterations: int, rank: Rank) -> None:
    if not is_integer(iterations) or iterations < 1:
        raise InputError(f"iterations={iterations!r}: pass an integer >= 1; the paper uses 20")
    if rank not in get_args(Rank):
        raise InputError(f"rank={rank!r}: choose 'value' (the paper) or 'magnitude' (signed activations)")


def _iterate(hs: Sequence[Tensor], importance: Callable[[int, Tensor], Tensor], s: int, T: int) -> list[Tensor]:
    """The set after each iteration, as masks (n,); ends early when a lone h has led to a fixed point."""
    n = hs[0].shape[0]
    S = torch.zeros(n, dtype=torch.bool, device=hs[0].device)
    orders = [descending(h) for h in hs]
    sets: list[Tensor] = []
    floor = 0.0
    for t in range(T):
        y = importance(t, S)
        floor = floor or float(y.abs().max())  # residual importance below 2^-40 of the dense one is rounding noise
        if not math.isfinite(floor):
            raise InputError("importance overflows float64: weights and activations are too large, rescale them")
        Omega = descending(y, floor)[: 2 * s]
        merged = S.clone()
        merged[Omega] = True
        order = orders[t % len(orders)]
        before, S = S, torch.zeros_like(S)
        S[order[merged[order]][:s]] = True
        sets.append(S)
        if len(hs) == 1 and bool((before == S).all()):
            break
    return sets
