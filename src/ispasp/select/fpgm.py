"""FPGM: the units whose filters the others can stand in for go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.select.producers import checked_producers
from ispasp.select.registry import register
from ispasp.select.scores import Scored
from ispasp.types import Producer, Statistics

_ROWS = 1024  # distances are summed this many units at a time: all of them would be (units, units)
_NEAR = 1e-12  # squared distances below this part of the squared norms are rounding: the filters are equal


@register
@dataclass(frozen=True)
class FPGM(Scored):
    """Score = sum of the distances from a unit's filter to all others: what lies near their geometric median goes.

    He, Liu, Wang, Hu, Yang (2019), Filter Pruning via Geometric Median for Deep Convolutional Neural Networks
    Acceleration. Needs producers and no data; costs n^2 products of filters.

    Where we leave the paper: the filter of a unit with several rows or several producers is all of them end to end;
    where a producer does not make the unit (a concatenation) it counts as zero. The paper's mix with a norm
    criterion and its pruning while training are left out.

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> made = Producer(torch.tensor([[0.0], [5.0], [5.5], [10.0]]))   # sums of distances 20.5, 10.5, 10.5, 19.5
    >>> FPGM().select(Statistics(4, (Reading(LinearConsumer(torch.eye(4))),), (made,)), keep=2).kept
    (0, 3)
    """

    name: ClassVar[str] = "fpgm"
    needs: ClassVar[tuple[str, ...]] = ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        """Sum of the distances to all other units.

        >>> from ispasp.types import LinearConsumer, Producer, Reading
        >>> made = Producer(torch.tensor([[3.0, 0.0], [0.0, 3.0], [1.0, 1.0]]))
        >>> FPGM().select(Statistics(3, (Reading(LinearConsumer(torch.eye(3))),), (made,)), keep=2).kept
        (0, 1)
        """
        n = statistics.units
        filters = [_filters(producer, n) for producer in checked_producers(statistics, self.name)]
        return _summed_distances(torch.cat(filters, dim=1))


def _filters(producer: Producer, units: int) -> Tensor:
    """All rows of each unit end to end, zeros where it has fewer than others. (units, rows x fan-in)"""
    unit_of = producer.unit_of()
    mine = torch.nonzero(unit_of >= 0).flatten()
    channels = mine[torch.sort(unit_of[mine], stable=True).indices]  # unit by unit
    unit = unit_of[channels]
    counts = torch.bincount(unit, minlength=units)
    place = torch.arange(len(unit), device=unit.device) - (counts.cumsum(0) - counts)[unit]  # which row of its unit
    W = producer.weight.double()
    F = W.new_zeros(units, int(counts.max()), W.shape[1])
    F[unit, place] = W[channels]
    return F.flatten(1)


def _summed_distances(F: Tensor) -> Tensor:
    """Sum over j of ||F_i - F_j||. (units, D) -> (units,)"""
    F = F - F.mean(0)  # what all share would cost digits
    squares = F.square().sum(1)
    parts = []
    for at in range(0, len(F), _ROWS):
        norms = squares[at : at + _ROWS, None] + squares
        d2 = norms - 2 * F[at : at + _ROWS] @ F.T  # (rows, units)
        parts.append(torch.where(d2 > _NEAR * norms, d2, 0.0).sqrt().sum(1))
    return torch.cat(parts)
