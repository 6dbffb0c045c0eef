"""Taylor: the units whose removal changes the loss most, to first order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.registry import register
from ispasp.select.scores import Scored
from ispasp.types import Statistics
from ispasp.types.checks import check_sum


@register
@dataclass(frozen=True)
class Taylor(Scored):
    """Score = sum over examples of |sum over the unit's channels and positions of H dL/dH|.

    Molchanov, Tyree, Karras, Aila, Kautz (2017), Pruning Convolutional Neural Networks for Resource Efficient
    Inference; for attention heads Michel, Levy, Neubig (2019), Are Sixteen Heads Really Better than One? Needs
    sensitivities, so a loss and a backward pass at calibration; costs n after it.

    Where we leave the papers: several consumers add the absolute values each of them measured. Scores are divided by
    their l2 norm in each layer, as both papers do, where that matters: with `order="global"` in `ispasp.prune`.

    >>> from ispasp.types import LinearConsumer, Reading, Sensitivity
    >>> reading = Reading(LinearConsumer(torch.eye(3)), Sensitivity(torch.tensor([0.2, 0.0, 0.7]), 10))
    >>> Taylor().select(Statistics(3, (reading,)), keep=1).kept
    (2,)
    """

    name: ClassVar[str] = "taylor"
    needs: ClassVar[tuple[str, ...]] = ("sensitivity",)

    def score(self, statistics: Statistics) -> Tensor:
        """Sum of what removing a unit changes of the loss, to first order.

        >>> from ispasp.types import LinearConsumer, Reading
        >>> Taylor().select(Statistics(3, (Reading(LinearConsumer(torch.eye(3))),)), keep=1)
        Traceback (most recent call last):
        ...
        ispasp.errors.InputError: consumer 0 has no sensitivities: calibrate with a loss, or choose ...
        """
        scores = []
        for number, reading in enumerate(statistics.readings):
            taken = reading.sensitivity
            if taken is None:
                raise InputError(
                    f"consumer {number} has no sensitivities: calibrate with a loss, or choose a method that needs "
                    "none, such as 'ispasp'"
                )
            check_sum(f"the sensitivity of consumer {number}", taken.total, taken.examples, (statistics.units,))
            scores.append(taken.total.double())
        return torch.stack(scores).sum(0)
