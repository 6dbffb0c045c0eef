"""Units by their sensitivity, drawn or the largest: coresets from weights, provable filter pruning from data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Scored, checked_producers, flag, register, seed_option, sum_by_unit, sum_over_layers
from ispasp.select.evidence import columns
from ispasp.types import Consumer, Statistic, Statistics, register_statistic
from ispasp.types.consumer import patches

_POSITIONS = 256  # of a batch: outputs that count
_NUMBERS = 2**22  # that are looked at together


@dataclass(frozen=True)
class _Drawn(Scored):
    """Keeps the units of largest sensitivity, or draws them by it."""

    sample: bool = flag(False, "True (draw units, as the paper) or False (the most sensitive)")
    seed: int = seed_option()

    @final
    def order(self, score: Tensor) -> Tensor:
        """The largest first, or the first drawn: drawing longer only adds units."""
        return _first_drawn(score, self.seed).argsort(stable=True) if self.sample else super().order(score)

    @final
    def factors(self, statistics: Statistics, kept: Sequence[int]) -> tuple[float, ...]:
        """With `sample`: how often each unit was drawn, over what was to be expected."""
        return _weights(self.score(statistics), list(kept), self.seed) if self.sample else ()


def _first_drawn(s: Tensor, seed: int) -> Tensor:
    """When each unit is drawn for the first time, if draws with probabilities s / sum(s) come at random times.

    With Poisson times, units are drawn independently of each other: rate s_i, so the first time is exponential. The
    order of the draws is that of drawing with replacement. Units of sensitivity 0 never are.
    """
    generator = torch.Generator("cpu").manual_seed(int(seed))
    waiting = torch.empty(len(s), dtype=torch.float64, device="cpu").exponential_(generator=generator)
    return waiting / (s / s.sum().clamp_min(torch.finfo(torch.float64).tiny)).cpu()


def _weights(s: Tensor, kept: list[int], seed: int) -> tuple[float, ...]:
    """draws of the unit / (all draws x probability), when the last of the kept units is drawn. 1 if never drawn."""
    first = _first_drawn(s, seed)[kept]
    p = (s / s.sum().clamp_min(torch.finfo(torch.float64).tiny)).cpu()[kept]
    ever = torch.isfinite(first)
    if not bool(ever.any()):
        return (1.0,) * len(kept)
    end = first[ever].max()
    generator = torch.Generator("cpu").manual_seed(int(seed) + 1)
    again = torch.poisson(torch.where(ever, p * (end - first), 0.0), generator=generator)  # after the first time
    draws = 1 + torch.where(first == end, 0.0, again)
    total = draws[ever].sum()
    return tuple(torch.where(ever, draws / (total * p), 1.0).tolist())


@register
@dataclass(frozen=True)
class Coreset(_Drawn):
    """Sensitivity = ||p|| max over outputs o of |w_o|, p the weights that make the unit, w_o those that read it.

    Mussay, Osadchy, Braverman, Zhou, Feldman (2020), Data-Independent Neural Pruning via Coresets. Their sensitivity
    is |w| phi(beta ||p||) for inputs of norm beta; for a ReLU, beta cancels. Needs producers and no data; costs one
    pass over all weights.

    `sample=True` does as the paper: draw units with probabilities s_i / sum(s) and replacement until `keep` different
    ones are there, and multiply each by its draws / (all draws x probability), which keeps the layer's output in
    expectation. `prune` applies these factors without compensation. By default the most sensitive units stay.

    Where we leave the paper: other activations count as if they were a ReLU, a BatchNorm after the producer does not
    count, and units with several rows, taps or consumers have their squares added up.

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> A, made = LinearConsumer(torch.tensor([[1.0, 3.0, 0.1]])), Producer(torch.tensor([[4.0], [1.0], [9.0]]))
    >>> Coreset().select(Statistics(3, (Reading(A),), (made,)), keep=1).scores   # 4 x 1, 1 x 3, 9 x 0.1
    (4.0, 3.0, 0.9...)
    """

    name, needs = "coreset", ("producers",)

    def score(self, statistics: Statistics) -> Tensor:
        n = statistics.units
        made = checked_producers(statistics, self.name)
        squares = sum_over_layers(((P, P.weight.double().square().sum(1)) for P in made), n)
        read = []
        for reading in statistics.readings:
            W, unit_of = columns(reading.consumer)  # (g, O/g, K), (g, K)
            each = torch.stack([sum_by_unit(row, unit_of.flatten(), n) for row in W.square().movedim(1, 0).flatten(1)])
            read.append(each.amax(0))
        return (squares * torch.stack(read).amax(0)).sqrt()


@register_statistic
@dataclass(frozen=True, eq=False)
class Contribution(Statistic):
    """The largest part that each channel has in an output of its consumer, positive and negative parts apart.

    (2, channels) for every batch: the maximum, and how many times it was added. Statistics add up, a maximum does not:
    so batches are kept apart, under a number made from their values, and only the same batch is added to itself.

    >>> from ispasp.types import LinearConsumer
    >>> Contribution.measure(LinearConsumer(torch.tensor([[1.0, 1.0]])), torch.tensor([[3.0, 1.0]])).largest()
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    name: ClassVar[str] = "contribution"
    maxima: Mapping[tuple[int, ...], Tensor]
    examples: int

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        found = _parts(consumer, H)
        number = int.from_bytes(hashlib.blake2b(found.cpu().numpy().tobytes(), digest_size=7).digest(), "big")
        return cls({(number,): torch.stack([found, torch.ones_like(found)])}, len(H))

    def largest(self) -> Tensor:
        """The maximum over all batches. (channels,)"""
        return torch.stack([total / times for total, times in self.maxima.values()]).amax(0)

    def tensors(self) -> Mapping[tuple[int, ...], Tensor]:
        return self.maxima


def _parts(consumer: Consumer, H: Tensor) -> Tensor:
    """max over outputs, positions and signs of (w x)_c / sum over channels of (w x). (channels,)"""
    W, _ = columns(consumer)  # (g, O/g, K)
    X = patches(consumer, H).double()  # (g, K, N)
    at = torch.linspace(0, X.shape[2] - 1, min(_POSITIONS, X.shape[2]), device="cpu").round().long()
    X = X[..., at.to(X.device)]
    taps = X.shape[1] * len(X) // consumer.channels
    found = X.new_zeros(len(X), X.shape[1] // taps)  # (g, C/g)
    for x in torch.split(X, max(1, _NUMBERS // W[0].numel()), dim=2):
        products = W[..., None] * x[:, None]  # (g, O/g, K, some)
        for sign in (1.0, -1.0):
            mine = (sign * products).clamp_(min=0.0)
            mine = mine.reshape(*mine.shape[:2], -1, taps, mine.shape[3]).sum(3)  # (g, O/g, C/g, some)
            whole = mine.sum(2, keepdim=True).clamp_min_(torch.finfo(torch.float64).tiny)
            found = torch.maximum(found, (mine / whole).amax((1, 3)))
    return found.flatten()


@register
@dataclass(frozen=True)
class PFP(_Drawn):
    """Sensitivity = the largest part that the unit has in any output of its consumers, over the data.

        s_j = max over examples x, positions, outputs i of  w_ij a_j(x) / sum over k of w_ik a_k(x)

    Liebenwein, Baykal, Lang, Feldman, Rus (2020), Provable Filter Pruning for Efficient Neural Networks; for single
    weights Baykal et al. (2019), SiPPing Neural Networks. Positive and negative terms are compared among themselves, as
    there. Needs the largest contributions; costs 256 x outputs x K for each batch at calibration, n after it.

    `sample=True` does as the paper: draw units with probabilities s_i / sum(s), as in `Coreset`. By default the most
    sensitive units stay, which the paper does too where that has the better bound. A unit that is ever the only one
    to make an output has sensitivity 1, the largest: few examples tell units apart better than many.

    Where we leave the paper: it takes a few hundred patches, here every batch gives 256, evenly spaced. It splits
    weights by sign, since activations after a ReLU have none; here products are split. The channels of a head are
    looked at one by one and added up, which is an upper bound. The paper also divides a budget over layers by its
    bounds; here `keep` does.

    >>> from ispasp.select import select_units
    >>> H = torch.tensor([[3.0, 2.0, 0.1], [0.0, 0.0, 0.1]])   # unit 2 is small, but all there is for the second
    >>> select_units(torch.ones(1, 3), H, 1, "pfp").kept
    (2,)
    """

    name, needs = "pfp", ("contribution",)

    def score(self, statistics: Statistics) -> Tensor:
        """The largest over consumers of the sum over a unit's channels."""
        parts = []
        for k, reading in enumerate(statistics.readings):
            found = reading.get(Contribution)
            if found is None or not found.maxima:
                raise InputError(f"consumer {k} has no contribution: measure(consumer, H, ['contribution']) takes it")
            parts.append(sum_by_unit(found.largest(), reading.consumer.unit_of(), statistics.units))
        return torch.stack(parts).amax(0)
