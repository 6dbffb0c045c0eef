"""i-SpaSP (Wolfe & Kyrillidis, L4DC 2022) from first moments.

The paper sums importance over a data matrix in every iteration. Importance is linear in the data, so the sum can be
taken first (Lemma on mu: mu(A B) = A mu(B)): the sets are the same, and the cost does not depend on the data.

The importance of channel i is the sum over data and positions of (A^T A (H - H_S))_i. With M the data-sum of H this is
<P_i, sum of Q_j over channels j outside S>, where P_i = A(ones on channel i) and Q_j = A(M on channel j). Neither is
laid out over the output map. P_i depends on the output position only through the taps that fall inside the input (nine
classes for a padded 3 x 3 kernel: corners, edges, interior). So output positions are summed class by class, which
leaves vectors of outputs x classes entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Selector, flag, option, register, sum_by_unit, sum_over_layers, whole
from ispasp.select.evidence import Evidence, columns, descending, moments
from ispasp.types import Consumer, ConvConsumer, Selection, Statistics, units_to_keep
from ispasp.types.consumer import Geometry

Rank = Literal["value", "magnitude"]


@register
@dataclass(frozen=True)
class ISpaSP(Selector):
    """Algorithm 1: units that matter for the residual and are strongly active, refined over a few iterations.

    Wolfe, Kyrillidis (2022), i-SpaSP: Structured Neural Pruning via Sparse Signal Recovery. Needs first moments; costs
    `iterations` products with the consumers' weights. It stops early once the set is stable.

    `rank` says what "largest" means for importance and activations: "value" as the paper prints it, right for
    non-negative activations (ReLU); "magnitude" as in CoSaMP, for signed ones (GELU, attention heads), whose channels
    would cancel.
    `minibatches=True` takes a new mini-batch in every iteration, as in the paper's experiments, and runs all
    iterations; otherwise every iteration sees all data.

    >>> from ispasp.select import select_units
    >>> select_units(torch.eye(3), torch.tensor([[0.1, -3.0, 0.2]]), 1, ISpaSP(rank="magnitude")).kept
    (1,)
    """

    name, needs = "ispasp", ("moment",)

    iterations: int = option(20, whole(1), "an integer >= 1; the paper uses 20")
    rank: Rank = option("value", get_args(Rank).__contains__, "'value' (the paper) or 'magnitude' (signed activations)")
    minibatches: bool = flag(False, "True (a new one per iteration) or False")

    @property
    def parts(self) -> int:
        return self.iterations if self.minibatches else 0

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        return i_spasp(self._data(statistics), keep, iterations=self.iterations, rank=self.rank)

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """Every width is a search of its own; they share P and Q."""
        search = _prepared(_parts(self._data(statistics)), self.rank)
        return [tuple(_sets(search, width, self.iterations, self.rank)[-1]) for width in widths]

    def _data(self, statistics: Statistics) -> Statistics | Sequence[Statistics]:
        if self.minibatches and not (isinstance(statistics, Statistics) and statistics.parts):
            remedy = "use it in ispasp.prune, or pass Statistics(..., parts=...)"
            raise InputError(f"minibatches=True needs mini-batches: {remedy}")
        return statistics.parts if self.minibatches else statistics


def i_spasp(
    statistics: Statistics | Sequence[Statistics], keep: float | int, *, iterations: int = 20, rank: Rank = "value"
) -> Selection:
    """Algorithm 1 on first moments.

    In each iteration, with S the current set, h = mu(H) and s units to keep:

        y = A^T A (h - h|_S);  Omega = the 2s largest of y;  S = the s largest of h within Omega and S.

    `statistics`: of the whole data, or a sequence of which iteration t takes the t-th (cyclically), the paper's new
    mini-batch per iteration. With one statistic the search ends when the set is stable, which no later iteration
    could change; with mini-batches all iterations are run. Residuals refer to the first statistic.

    >>> from ispasp.select import LinearConsumer, measure
    >>> A = LinearConsumer(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
    >>> i_spasp(Statistics(3, (measure(A, torch.tensor([[1.0, 2.0, 3.0]])),)), keep=1)
    Selection(kept 1 units [2], iterations=2, converged=True, moment residual 5.831 -> 3.606)
    """
    ISpaSP(iterations, rank)  # checks them
    parts = _parts(statistics)
    s = units_to_keep(keep, parts[0].units)
    sets = _sets(_prepared(parts, rank), s, iterations, rank)
    stable = len(parts) == 1 and (2 * s >= parts[0].units or sets[-1:] == sets[-2:-1])
    return Evidence(parts[0]).selection(sets, converged=stable)


def _prepared(parts: Sequence[Statistics], rank: Rank) -> list[tuple[Tensor, list[Coupling]]]:
    """The order of the activations and the couplings of each part, from which sets of any size are found."""
    return [(descending(activation(part, magnitude=rank == "magnitude")), couplings(part)) for part in parts]


def _sets(prepared: Sequence[tuple[Tensor, list[Coupling]]], s: int, T: int, rank: Rank) -> list[list[int]]:
    """The set of s units after each iteration; ends early when a lone part has led to a fixed point."""
    S = torch.zeros_like(prepared[0][0], dtype=torch.bool)
    sets: list[list[int]] = []
    floor = 0.0
    for t in range(T):
        order, each = prepared[t % len(prepared)]
        removed = (~S).double()
        y = torch.stack([c.importance(removed, magnitude=rank == "magnitude") for c in each]).sum(0)
        floor = floor or float(y.abs().max())  # residual importance below 2^-40 of the dense one is rounding noise
        if not math.isfinite(floor):
            raise InputError("importance overflows float64: weights and activations are too large, rescale them")
        merged = S.clone()
        merged[descending(y, floor)[: 2 * s]] = True  # Omega and S
        before, S = S, torch.zeros_like(S)
        S[order[merged[order]][:s]] = True
        sets.append(torch.nonzero(S).flatten().tolist())
        if len(prepared) == 1 and bool((before == S).all()):
            break
    return sets


def _parts(statistics: Statistics | Sequence[Statistics]) -> list[Statistics]:
    parts = [statistics] if isinstance(statistics, Statistics) else statistics
    if not isinstance(parts, Sequence) or not all(isinstance(part, Statistics) for part in parts):
        raise InputError(f"statistics is a {type(statistics).__name__}: pass a Statistics, or a list of them")
    if not parts:
        raise InputError("no statistics given: pass the Statistics of at least one batch")
    if len(units := sorted({part.units for part in parts})) > 1:
        raise InputError(f"statistics of hidden dimensions with {units} units: pass those of one dimension")
    return list(parts)


class Coupling(NamedTuple):
    """A consumer at one input size: P, Q (groups, channels / groups, K), K = outputs / groups x classes of positions.

    For a linear consumer P = Q = A^T and the weights are h.
    """

    A: Consumer
    P: Tensor
    Q: Tensor
    weights: Tensor  # (channels,): factor of each channel's Q

    def importance(self, removed: Tensor, *, magnitude: bool = False) -> Tensor:
        """y_i = <P_i, sum of Q_j over removed units j>, summed over the channels of a unit. (units,) -> (units,)

        `removed` is 1.0 for units outside S and 0.0 for those in S. `magnitude` sums |y_i| over a unit's channels, so
        that they do not cancel.
        """
        r = self.A.per_channel(removed).flatten() * self.weights  # (channels,)
        g, c, _ = self.P.shape
        v = torch.bmm(r.reshape(g, 1, c), self.Q)  # (g, 1, K)
        y = torch.bmm(self.P, v.mT).reshape(-1)  # (channels,)
        return sum_by_unit(y.abs() if magnitude else y, self.A.unit_of(), len(removed))


def activation(statistics: Statistics, *, magnitude: bool = False) -> Tensor:
    """h = mu(H) of every unit, over data, positions, consumers and channels (with `magnitude` |h|). (units,)"""
    sums = [(A, M.flatten(1).sum(1) if M.ndim > 1 else M) for A, M in moments(statistics)]
    return sum_over_layers(((A, h.abs() if magnitude else h) for A, h in sums), statistics.units)


def couplings(statistics: Statistics) -> list[Coupling]:
    """One coupling for every consumer and every input size it was called with."""
    return [_coupling(A, M) for A, M in moments(statistics)]


def _coupling(consumer: Consumer, total: Tensor) -> Coupling:
    W, _ = columns(consumer)
    if not isinstance(consumer, ConvConsumer):
        return Coupling(consumer, W.mT, W.mT, total)  # P_i = A_i and Q_j = A_j h_j
    g, axes = len(W), len(consumer.kernel)
    W = W.reshape(g, W.shape[1], -1, *consumer.kernel)  # (g, O/g, C/g, *kernel)
    P, M = W, total.reshape(g, -1, *total.shape[1:])  # (g, C/g, *size)
    for axis in range(axes):  # taps give way to classes in P, positions to taps and classes in M
        inside, fold = _classes(consumer.geometry, axis, total.shape[1 + axis], consumer.kernel[axis], total.device)
        P = torch.einsum("gocu...,ua->goc...a", P, inside)
        M = torch.einsum("gcx...,uax->gc...ua", M, fold)
    M = M.permute(0, 1, *range(2, 2 + 2 * axes, 2), *range(3, 3 + 2 * axes, 2))  # (g, C/g, *kernel, *classes)
    Q = torch.einsum("goct,gctk->gcok", W.flatten(3), M.flatten(2 + axes).flatten(2, 1 + axes))
    P = P.transpose(1, 2).flatten(2)  # (g, C/g, O/g x classes)
    return Coupling(consumer, P, Q.flatten(2), total.new_ones(len(total)))


def _classes(geometry: Geometry, axis: int, size: int, kernel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Classes of output positions along one axis.

    Returns which taps lie inside the input for each class (kernel, classes), and how often tap u of class a reads
    input position x (kernel, classes, size).
    """
    source = geometry.sources(axis, size, kernel)  # (kernel, out)
    inside, class_of = torch.unique(source >= 0, dim=1, return_inverse=True)
    u, r = torch.nonzero(source >= 0, as_tuple=True)
    fold = torch.zeros(kernel, inside.shape[1], size, dtype=torch.float64, device=source.device)
    fold.index_put_((u, class_of[r], source[u, r]), fold.new_ones(len(u)), accumulate=True)
    return inside.double().to(device), fold.to(device)
