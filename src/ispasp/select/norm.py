"""L1, L2 and Slimming: the units with the largest weights, or the largest BatchNorm weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Scored, checked_producers, register, sum_over_layers
from ispasp.types import Statistics


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

    name = "l1"
    needs = ("producers",)

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

    name = "l2"
    needs = ("producers",)

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

    name = "slimming"
    needs = ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        scores = []
        for number, producer in enumerate(checked_producers(statistics, self.name)):
            if producer.scale is None:
                raise InputError(
                    f"producer {number} has no BatchNorm after it, and slimming scores its weight: choose another "
                    "method such as 'l1', skip this hidden dimension, or pass Producer(weight, scale=gamma)"
                )
            scores.append((producer, producer.scale.abs()))
        return sum_over_layers(scores, statistics.units)
