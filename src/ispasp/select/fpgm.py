"""FPGM: filters that others can replace go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.select.base import Scored, checked_producers, register
from ispasp.select.evidence import places
from ispasp.types import Producer, Statistics

_ROWS = 1024  # units per block of distances: all at once would be (units, units)
_NEAR = 1e-12  # squared distances below this fraction of the squared norms are rounding


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

    name = "fpgm"
    needs = ("producers",)

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
