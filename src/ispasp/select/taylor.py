"""Taylor: the units whose removal changes the loss most, to first order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.select.base import Scored, register
from ispasp.select.evidence import required
from ispasp.types import Sensitivity, Statistics


@register
@dataclass(frozen=True)
class Taylor(Scored):
    """Score = sum over examples of |sum over the unit's channels and positions of H dL/dH|.

    Molchanov, Tyree, Karras, Aila, Kautz (2017), Pruning Convolutional Neural Networks for Resource Efficient
    Inference; for attention heads Michel, Levy, Neubig (2019), Are Sixteen Heads Really Better than One? Needs
    sensitivities, that is a loss and a backward pass at calibration; costs n after it.

    Where we leave the papers: several consumers add the absolute values measured at each. Scores are divided by
    their l2 norm in each layer, as in both papers, only where it matters: with `order="global"` in `ispasp.prune`.

    >>> from ispasp.types import LinearConsumer, Reading
    >>> reading = Reading(LinearConsumer(torch.eye(3)), Sensitivity(torch.tensor([0.2, 0.0, 0.7]), 10))
    >>> Taylor().select(Statistics(3, (reading,)), keep=1).kept
    (2,)
    """

    name = "taylor"
    needs = ("sensitivity",)

    def score(self, statistics: Statistics) -> Tensor:
        rows = enumerate(statistics.readings)
        taken = [required(reading, Sensitivity, number, (statistics.units,)).total for number, reading in rows]
        return torch.stack(taken).double().sum(0)
