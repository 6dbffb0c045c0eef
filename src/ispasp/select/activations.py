"""Scores of activations: Top-K (their magnitude), Wanda and FLAP (norm and variance, times the weights), Taylor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.select.base import Scored, register, sum_over_layers
from ispasp.select.evidence import by_channel_sums, columns, required
from ispasp.types import Consumer, Magnitude, Sensitivity, Statistics, Total, by_channel, register_statistic


@register
@dataclass(frozen=True)
class TopK(Scored):
    """Score = sum over data and positions of |H|, the naive baseline of the i-SpaSP paper.

    Wolfe, Kyrillidis (2022), i-SpaSP: Structured Neural Pruning via Sparse Signal Recovery, Appendix A.2. Needs
    magnitudes; costs n log n. The paper takes one mini-batch, here it is all calibration data.

    >>> from ispasp.select import LinearConsumer, select_units
    >>> heads = LinearConsumer(torch.ones(1, 4), units=torch.tensor([0, 0, 1, 1]))
    >>> select_units(heads, torch.tensor([[3.0, 0.0, -2.0, 2.0]]), 1, "topk").kept   # 4 > 3
    (1,)
    """

    name, needs = "topk", ("magnitude",)

    def score(self, statistics: Statistics) -> Tensor:
        return sum_over_layers(by_channel_sums(statistics, Magnitude), statistics.units)


@register_statistic
class Spread(Total):
    """For each channel the number of values, their sum and the sum of their squares. (3, channels)

    >>> from ispasp.types import LinearConsumer
    >>> Spread.measure(LinearConsumer(torch.eye(1)), torch.tensor([[1.0], [3.0]])).total.flatten()
    tensor([ 2.,  4., 10.], dtype=torch.float64)
    """

    name = "spread"

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Spread:
        X = by_channel(consumer, H).double()
        return cls(torch.stack([torch.ones_like(X).sum(1), X.sum(1), X.square().sum(1)]), len(H))


@register
@dataclass(frozen=True)
class Wanda(Scored):
    """Score = sum of |w| ||H_c||_2 over the weights w that read the unit's channels c.

    Sun, Liu, Bair, Kolter (2024), A Simple and Effective Pruning Approach for Large Language Models. Needs the spread
    of every channel; costs one pass over the consumers' weights.

    Where we leave the paper: it removes single weights, those with the smallest |w| ||H_c||_2 of each output. A unit
    counts by the sum of this over all weights that read it, as structured variants do.

    >>> from ispasp.select import select_units
    >>> H = torch.tensor([[3.0, 1.0, 0.0], [4.0, 1.0, 1.0]])   # norms 5, 1.4, 1
    >>> select_units(torch.tensor([[0.1, 1.0, -2.0]]), H, 1, "wanda").kept   # 0.5, 1.4, 2
    (2,)
    """

    name, needs = "wanda", ("spread",)

    def score(self, statistics: Statistics) -> Tensor:
        sums = by_channel_sums(statistics, Spread, 3)
        return sum_over_layers(((A, _weights(A).abs().sum(1) * t[2].sqrt()) for A, t in sums), statistics.units)


@register
@dataclass(frozen=True)
class FLAP(Scored):
    """Score = variance of the channel times the squared norm of the weights that read it, summed over a unit.

    An, Zhao, Yu, Tang, Wang (2024), Fluctuation-based Adaptive Structured Pruning for Large Language Models. Needs the
    spread of every channel; costs one pass over the consumers' weights.

    The paper adds the mean of what is removed to the consumer's bias; compensation does that and refits the weights
    as well. So pair it with compensation: a unit that is constant and large scores zero.

    Where we leave the paper: it standardises the scores of each layer to compare layers, `order="global"` in
    `ispasp.prune` divides them by their l2 norm. Convolutions, which it does not treat, sum over taps and positions.

    >>> from ispasp.select import select_units
    >>> H = torch.tensor([[5.0, 1.0, 0.0], [5.0, 0.0, 1.5]])   # unit 0 is constant
    >>> select_units(torch.ones(1, 3), H, 1, "flap").kept
    (2,)
    """

    name, needs = "flap", ("spread",)

    def score(self, statistics: Statistics) -> Tensor:
        scores = []
        for A, (count, total, squares) in by_channel_sums(statistics, Spread, 3):
            variance = (squares - total.square() / count).clamp(min=0.0) / (count - 1).clamp(min=1.0)
            scores.append((A, variance * _weights(A).square().sum(1)))
        return sum_over_layers(scores, statistics.units)


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

    name, needs = "taylor", ("sensitivity",)

    def score(self, statistics: Statistics) -> Tensor:
        rows = enumerate(statistics.readings)
        taken = [required(reading, Sensitivity, number, (statistics.units,)).total for number, reading in rows]
        return torch.stack(taken).double().sum(0)


def _weights(consumer: Consumer) -> Tensor:
    """The weights that read each channel, over outputs and taps. (channels, outputs / groups x taps)"""
    return columns(consumer)[0].mT.reshape(consumer.channels, -1)
