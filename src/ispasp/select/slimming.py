"""Slimming: the units that the BatchNorm after their producer scales most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.producers import checked_producers
from ispasp.select.registry import register
from ispasp.select.scores import Scored, sum_by_unit
from ispasp.types import Statistics


@register
@dataclass(frozen=True)
class Slimming(Scored):
    """Score = |gamma| of the BatchNorm right after the producer, summed over channels and producers of a unit.

    Liu, Li, Shen, Huang, Yan, Zhang (2017), Learning Efficient Convolutional Networks through Network Slimming. Needs
    producers that are followed by a BatchNorm, and no data; costs n.

    Where we leave the paper: it trains with an l1 penalty on gamma first, so that small values mean something, and
    takes one threshold for the whole network. We take the network as it is, one hidden dimension at a time (or, with
    `order="global"` in `ispasp.prune`, all together, but by scores divided by their l2 norm in each layer).

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> made = Producer(torch.ones(3, 2), scale=torch.tensor([0.5, -2.0, 0.1]))
    >>> Slimming().select(Statistics(3, (Reading(LinearConsumer(torch.eye(3))),), (made,)), keep=2).kept
    (0, 1)
    """

    name: ClassVar[str] = "slimming"
    needs: ClassVar[tuple[str, ...]] = ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        """Sum of |gamma|.

        >>> from ispasp.types import LinearConsumer, Producer, Reading
        >>> made = Producer(torch.ones(3, 2))
        >>> Slimming().select(Statistics(3, (Reading(LinearConsumer(torch.eye(3))),), (made,)), keep=2)
        Traceback (most recent call last):
        ...
        ispasp.errors.InputError: producer 0 has no BatchNorm after it, and slimming scores its weight: ...
        """
        scores = []
        for number, producer in enumerate(checked_producers(statistics, self.name)):
            if producer.scale is None:
                raise InputError(
                    f"producer {number} has no BatchNorm after it, and slimming scores its weight: choose another "
                    "method such as 'l1', skip this hidden dimension, or pass Producer(weight, scale=gamma)"
                )
            scores.append(sum_by_unit(producer.scale.abs(), producer.unit_of(), statistics.units))
        return torch.stack(scores).sum(0)
