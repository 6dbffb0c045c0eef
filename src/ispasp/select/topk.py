"""Top-K: the units with the largest summed activation magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.registry import register
from ispasp.select.scores import Scored, sum_by_unit
from ispasp.types import Statistics
from ispasp.types.checks import check_sum


@register
@dataclass(frozen=True)
class TopK(Scored):
    """The naive baseline of the i-SpaSP paper: score = sum over data and positions of |H|.

    Wolfe, Kyrillidis (2022), i-SpaSP: Structured Neural Pruning via Sparse Signal Recovery, Appendix A.2. Needs
    magnitudes; costs n log n. The paper takes one mini-batch, here it is all data given: give one for the same.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer, Statistics
    >>> r = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, -3.0, 2.0]]), ["magnitude"])
    >>> TopK().select(Statistics(3, (r,)), keep=2).kept
    (1, 2)
    """

    name: ClassVar[str] = "topk"
    needs: ClassVar[tuple[str, ...]] = ("magnitude",)

    def score(self, statistics: Statistics) -> Tensor:
        """Sum of |H| over data and positions.

        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> heads = LinearConsumer(torch.ones(1, 4), units=torch.tensor([0, 0, 1, 1]))
        >>> r = measure(heads, torch.tensor([[3.0, 0.0, -2.0, 2.0]]), ["magnitude"])
        >>> TopK().select(Statistics(2, (r,)), keep=1).kept   # 4 > 3
        (1,)
        """
        scores = []
        for number, reading in enumerate(statistics.readings):
            taken = reading.magnitude
            if taken is None:
                raise InputError(
                    f"consumer {number} has no magnitudes: take them with measure(consumer, H, ['magnitude'])"
                )
            shape = (reading.consumer.channels,)
            check_sum(f"the magnitude of consumer {number}", taken.total, taken.examples, shape)
            scores.append(sum_by_unit(taken.total, reading.consumer.unit_of(), statistics.units))
        return torch.stack(scores).sum(0)
