"""Scores of the weights that make a unit: L1, L2, Slimming (the BatchNorm's), FPGM (their distances)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Scored, checked_producers, register, sum_over_layers
from ispasp.select.evidence import places
from ispasp.types import Producer, Statistics

_ROWS = 1024  # units per block of distances: all at once would be (units, units)
_NEAR = 1e-12  # squared distances below this fraction of the squared norms are rounding


@register
@dataclass(frozen=True)
class L1(Scored):
    """Score = sum of |w| over all weights that make the unit.

    Li, Kadav, Durdanovic, Samet, Graf (2017), Pruning Filters for Efficient ConvNets. Needs producers and no data;
    costs one pass over their weights.

    Where we leave the paper: a unit may have several rows (a head) and several producers (gate and value of a gated
    MLP, the summands of a residual stream), and the score adds them all. As in the paper, a BatchNorm after the
    producer does not count.

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> gate, value = Producer(torch.tensor([[1.0], [2.0]])), Producer(torch.tensor([[5.0], [2.0]]))
    >>> L1().select(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),), (gate, value)), keep=1).kept   # 6 > 4
    (0,)
    """

    name, needs = "l1", ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        made = checked_producers(statistics, self.name)
        return sum_over_layers(((P, torch.abs(P.weight.double()).sum(1)) for P in made), statistics.units)


@register
@dataclass(frozen=True)
class L2(Scored):
    """Score = l2 norm of all weights that make the unit.

    Li et al. (2017), Pruning Filters for Efficient ConvNets, who compare it with the l1 norm they propose. Needs
    producers and no data; costs one pass over their weights. Units with several rows or producers as in `L1`.

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> heads = Producer(torch.tensor([[2.0], [2.0], [3.0], [0.0]]), units=torch.tensor([0, 0, 1, 1]))
    >>> L2().select(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),), (heads,)), keep=1).kept   # 9 > 8
    (1,)
    """

    name, needs = "l2", ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        """Sum of w^2, which orders units as its root does."""
        made = checked_producers(statistics, self.name)
        return sum_over_layers(((P, torch.square(P.weight.double()).sum(1)) for P in made), statistics.units)


@register
@dataclass(frozen=True)
class Slimming(Scored):
    """Score = |gamma| of the BatchNorm right after the producer, summed over channels and producers of a unit.

    Liu, Li, Shen, Huang, Yan, Zhang (2017), Learning Efficient Convolutional Networks through Network Slimming. Needs
    producers that are followed by a BatchNorm, and no data; costs n.

    Where we leave the paper: it first trains with an l1 penalty on gamma, so that small values mean something, and
    takes one threshold for the whole network. We take the network as it is, one hidden dimension at a time; with
    `order="global"` in `ispasp.prune` all together, by scores divided by their l2 norm in each layer.

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> made = Producer(torch.ones(3, 2), scale=torch.tensor([0.5, -2.0, 0.1]))
    >>> Slimming().select(Statistics(3, (Reading(LinearConsumer(torch.eye(3))),), (made,)), keep=2).kept
    (0, 1)
    """

    name, needs = "slimming", ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        scores = []
        for number, producer in enumerate(checked_producers(statistics, self.name)):
            if producer.scale is None:
                wrong = f"producer {number} has no BatchNorm after it, and slimming scores its weight"
                remedy = "skip this hidden dimension, or pass Producer(weight, scale=gamma)"
                raise InputError(f"{wrong}: choose another method such as 'l1', {remedy}")
            scores.append((producer, producer.scale.abs()))
        return sum_over_layers(scores, statistics.units)


@register
@dataclass(frozen=True)
class FPGM(Scored):
    """Score = sum of the distances from a unit's filter to all others; filters near the geometric median go.

    He, Liu, Wang, Hu, Yang (2019), Filter Pruning via Geometric Median for Deep Convolutional Neural Networks
    Acceleration. Needs producers and no data; costs n^2 products of filters.

    Where we leave the paper: the filter of a unit with several rows or producers is their concatenation, with zeros
    where a producer does not make the unit. The paper's mix with a norm and its pruning while training are left out.

    >>> from ispasp.types import LinearConsumer, Reading
    >>> made = Producer(torch.tensor([[0.0], [5.0], [5.5], [10.0]]))   # sums of distances 20.5, 10.5, 10.5, 19.5
    >>> FPGM().select(Statistics(4, (Reading(LinearConsumer(torch.eye(4))),), (made,)), keep=2).kept
    (0, 3)
    """

    name, needs = "fpgm", ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        filters = [_filters(producer, statistics.units) for producer in checked_producers(statistics, self.name)]
        return _summed_distances(torch.cat(filters, dim=1))


def _filters(producer: Producer, units: int) -> Tensor:
    """The rows of each unit concatenated, with zeros where it has fewer than others. (units, rows x fan-in)"""
    W, unit_of = producer.weight.double(), producer.unit_of()
    mine = torch.nonzero(unit_of >= 0).flatten()
    place = places(unit_of[mine], units)  # which row of its unit
    F = W.new_zeros(units, int(place.max()) + 1, W.shape[1])
    F[unit_of[mine], place] = W[mine]
    return F.flatten(1)


def _summed_distances(F: Tensor) -> Tensor:
    """Sum over j of ||F_i - F_j||. (units, D) -> (units,)"""
    F = F - F.mean(0)  # a shared offset would cost digits
    squares = F.square().sum(1)
    parts = []
    for at in range(0, len(F), _ROWS):
        norms = squares[at : at + _ROWS, None] + squares
        d2 = norms - 2 * F[at : at + _ROWS] @ F.T  # (rows, units)
        parts.append(torch.where(d2 > _NEAR * norms, d2, 0.0).sqrt().sum(1))
    return torch.cat(parts)
