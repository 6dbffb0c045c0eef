"""Scores: one number per unit, and the selectors that keep the largest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from ispasp.select.base import Selector
from ispasp.select.evidence import Evidence
from ispasp.select.ordering import descending
from ispasp.types import Selection, Statistics, units_to_keep


class Scored(Selector):
    """A selector that keeps the units with the largest scores, the lowest index first among equals."""

    @abstractmethod
    def score(self, statistics: Statistics) -> Tensor:
        """One number per unit, in float64. (units,)"""

    @final
    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose the `keep` units with the largest score."""
        return keep_largest(statistics, keep, self.score(statistics))

    @final
    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """One ordering serves all widths."""
        return prefixes(descending(self.score(statistics)).tolist(), widths)


def prefixes(order: Sequence[int], widths: Sequence[int]) -> list[tuple[int, ...]]:
    """The first units of an order, as a sorted set for each width.

    >>> prefixes([4, 1, 3], [1, 2])
    [(4,), (1, 4)]
    """
    return [tuple(sorted(order[:width])) for width in widths]


def sum_by_unit(values: Tensor, unit_of: Tensor, units: int) -> Tensor:
    """Sum over the channels of each unit, in float64; channels outside (-1) fall away. (channels,) -> (units,)

    >>> import torch
    >>> sum_by_unit(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 1, 1, -1]), units=2)
    tensor([1., 6.], dtype=torch.float64)
    """
    values = values.double()
    return values.new_zeros(units).index_add(0, unit_of[unit_of >= 0], values[unit_of >= 0])


def keep_largest(statistics: Statistics, keep: float | int, score: Tensor) -> Selection:
    """The `keep` units with the largest score (units,), the lowest index first among equals.

    >>> import torch
    >>> from ispasp.types import LinearConsumer, Reading
    >>> statistics = Statistics(3, (Reading(LinearConsumer(torch.eye(3))),))
    >>> keep_largest(statistics, 2, torch.tensor([1.0, 2.0, 1.0]).double()).kept
    (0, 1)
    """
    s = units_to_keep(keep, statistics.units)
    selection = Evidence(statistics).selection([sorted(descending(score)[:s].tolist())], converged=True)
    return replace(selection, scores=tuple(score.tolist()))
