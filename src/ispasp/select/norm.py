"""L1 and L2: the units that the largest weights make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.select.producers import checked_producers
from ispasp.select.registry import register
from ispasp.select.scores import Scored, sum_by_unit
from ispasp.types import Statistics


@register
@dataclass(frozen=True)
class L1(Scored):
    """Score = sum of |w| over all weights that make the unit.

    Li, Kadav, Durdanovic, Samet, Graf (2017), Pruning Filters for Efficient ConvNets. Needs producers and no data;
    costs one pass over their weights.

    Where we leave the paper: a unit may have several rows (a head) and several producers (gate and value of a gated
    MLP, the summands of a residual stream), and the score adds them all. A BatchNorm after the producer does not
    enter, as in the paper.

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> made = Producer(torch.tensor([[1.0, -1.0], [0.0, 1.9], [0.0, 0.0]]))
    >>> L1().select(Statistics(3, (Reading(LinearConsumer(torch.eye(3))),), (made,)), keep=1).kept   # 2 > 1.9
    (0,)
    """

    name: ClassVar[str] = "l1"
    needs: ClassVar[tuple[str, ...]] = ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        """Sum of |w|.

        >>> from ispasp.types import LinearConsumer, Producer, Reading
        >>> gate, value = Producer(torch.tensor([[1.0], [2.0]])), Producer(torch.tensor([[5.0], [2.0]]))
        >>> L1().select(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),), (gate, value)), keep=1).kept   # 6 > 4
        (0,)
        """
        return _power_sums(statistics, self.name, 1)


@register
@dataclass(frozen=True)
class L2(Scored):
    """Score = l2 norm of all weights that make the unit.

    Li et al. (2017), Pruning Filters for Efficient ConvNets, who propose the l1 norm and compare it with this one.
    Needs producers and no data; costs one pass over their weights. Units with several rows or producers as in `L1`.

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> made = Producer(torch.tensor([[1.0, -1.0], [0.0, 1.9], [0.0, 0.0]]))
    >>> L2().select(Statistics(3, (Reading(LinearConsumer(torch.eye(3))),), (made,)), keep=1).kept   # 1.9 > 1.41
    (1,)
    """

    name: ClassVar[str] = "l2"
    needs: ClassVar[tuple[str, ...]] = ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        """Sum of w^2: a root would not change the order.

        >>> from ispasp.types import LinearConsumer, Producer, Reading
        >>> heads = Producer(torch.tensor([[2.0], [2.0], [3.0], [0.0]]), units=torch.tensor([0, 0, 1, 1]))
        >>> L2().select(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),), (heads,)), keep=1).kept   # 9 > 8
        (1,)
        """
        return _power_sums(statistics, self.name, 2)


def _power_sums(statistics: Statistics, method: str, power: int) -> Tensor:
    """Sum of |w|^power over all weights of each unit. (units,)"""
    sums = [
        sum_by_unit(producer.weight.double().abs().pow(power).sum(1), producer.unit_of(), statistics.units)
        for producer in checked_producers(statistics, method)
    ]
    return torch.stack(sums).sum(0)
