"""Statistics: what calibration keeps of the data. Small sums that merge with `+`, never the activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types.checks import checked_tensor
from ispasp.types.consumer import Consumer
from ispasp.types.producer import Producer

Size = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Moment:
    """First moments mu(H): the input of a consumer summed over the data.

    A linear consumer needs one vector (channels,) under the empty size; a convolution one batch-summed map
    (channels, *size) for every spatial size it was called with.

    >>> a = Moment({(): torch.tensor([1.0, 2.0])}, examples=3)
    >>> (a + a).maps[()], (a + a).examples
    (tensor([2., 4.]), 6)
    """

    maps: Mapping[Size, Tensor]
    examples: int

    def __post_init__(self) -> None:
        """Refuse a bare tensor."""
        if not isinstance(self.maps, Mapping):
            raise InputError(
                f"the maps of a Moment are a {type(self.maps).__name__}: pass {{size: sum}}, for a linear consumer "
                "{(): vector}"
            )

    def __add__(self, other: Moment) -> Moment:
        """Merge two parts of the data."""
        maps = dict(self.maps)
        for size, total in other.maps.items():
            maps[size] = _sum("moments", maps[size], total) if size in maps else total
        return Moment(maps, self.examples + other.examples)


@dataclass(frozen=True, eq=False)
class Magnitude:
    """Summed activation magnitudes: `total[c]` is the sum of |H| over data and positions of channel c. (channels,)

    >>> (Magnitude(torch.tensor([1.0]), examples=3) + Magnitude(torch.tensor([2.0]), examples=4))
    Magnitude(total=tensor([3.]), examples=7)
    """

    total: Tensor
    examples: int

    def __add__(self, other: Magnitude) -> Magnitude:
        """Merge two parts of the data."""
        return Magnitude(_sum("magnitudes", self.total, other.total), self.examples + other.examples)


@dataclass(frozen=True, eq=False)
class Gram:
    """Second moments of what the weight multiplies: `total[g] = X X^T`, X the patches of group g.

    (groups, K, K) with K = channels / groups x taps, channel-major as in `weight.flatten(1)`; one group and one tap
    for a linear consumer, where it is H H^T.

    >>> (Gram(torch.tensor([[[1.0]]]), examples=3) + Gram(torch.tensor([[[2.0]]]), examples=4))
    Gram(total=tensor([[[3.]]]), examples=7)
    """

    total: Tensor
    examples: int

    def __add__(self, other: Gram) -> Gram:
        """Merge two parts of the data."""
        return Gram(_sum("Gram matrices", self.total, other.total), self.examples + other.examples)


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """First-order effect of masking each unit: sum over examples of |sum over its channels and positions of H dL/dH|.

    (units,): the derivative of the loss by a factor on the unit, in absolute value (Michel et al. 2019).

    >>> (Sensitivity(torch.tensor([1.0]), examples=3) + Sensitivity(torch.tensor([2.0]), examples=4))
    Sensitivity(total=tensor([3.]), examples=7)
    """

    total: Tensor
    examples: int

    def __add__(self, other: Sensitivity) -> Sensitivity:
        """Merge two parts of the data."""
        return Sensitivity(_sum("sensitivities", self.total, other.total), self.examples + other.examples)


S = TypeVar("S", Moment, Magnitude, Gram, Sensitivity)


@dataclass(frozen=True, eq=False)
class Reading:
    """One consumer of a hidden dimension and the statistics taken at its input.

    >>> from ispasp.types.consumer import LinearConsumer
    >>> reading = Reading(LinearConsumer(torch.eye(2)), Moment({(): torch.tensor([1.0, 2.0])}, examples=3))
    >>> (reading + reading).moment
    Moment(maps={(): tensor([2., 4.])}, examples=6)
    """

    consumer: Consumer
    moment: Moment | None = None
    magnitude: Magnitude | None = None
    gram: Gram | None = None
    sensitivity: Sensitivity | None = None

    def __add__(self, other: Reading) -> Reading:
        """Merge the statistics of two parts of the data for the same consumer."""
        return Reading(
            self.consumer,
            _merged(self.moment, other.moment),
            _merged(self.magnitude, other.magnitude),
            _merged(self.gram, other.gram),
            _merged(self.sensitivity, other.sensitivity),
        )


@dataclass(frozen=True, eq=False)
class Statistics:
    """All a selector sees of one hidden dimension of `units` units: one reading per consumer, and its producers.

    Producers carry weights only, no data; they are empty where no method asks for them. `task(masks, step)` gives the
    task loss of networks in which only the units of each mask (m, units) stay, on the mini-batch of that step. (m,)
    `parts` are the same statistics of single mini-batches, for a selector that takes a new one at every step.

    >>> from ispasp.types.consumer import LinearConsumer
    >>> statistics = Statistics(2, (Reading(LinearConsumer(torch.eye(2)), magnitude=Magnitude(torch.ones(2), 3)),))
    >>> (statistics + statistics).readings[0].magnitude
    Magnitude(total=tensor([2., 2.]), examples=6)
    """

    units: int
    readings: tuple[Reading, ...]
    producers: tuple[Producer, ...] = ()
    task: Callable[[Tensor, int], Tensor] | None = None
    parts: tuple[Statistics, ...] = ()

    def __post_init__(self) -> None:
        """Refuse statistics that cannot belong to one hidden dimension."""
        if not isinstance(self.readings, Sequence) or not all(isinstance(r, Reading) for r in self.readings):
            raise InputError(f"readings is a {type(self.readings).__name__}: pass a tuple of Reading, one per consumer")
        if not self.readings:
            raise InputError("a hidden dimension needs at least one consumer: pass one Reading per consumer")
        for number, reading in enumerate(self.readings):
            unit_of = reading.consumer.unit_of()
            seen = torch.unique(unit_of[unit_of >= 0])
            if len(seen) != self.units or int(seen[-1]) != self.units - 1:  # every consumer reads at least one unit
                raise InputError(
                    f"consumer {number} reads {len(seen)} different units, the hidden dimension has {self.units}: "
                    f"its `units` must name each of 0..{self.units - 1}"
                )

    def __add__(self, other: Statistics) -> Statistics:
        """Merge the statistics of two parts of the data."""
        if (self.units, len(self.readings)) != (other.units, len(other.readings)):
            raise InputError(
                f"statistics of {self.units} units and {len(self.readings)} consumers cannot be added to those of "
                f"{other.units} units and {len(other.readings)} consumers: they are of different hidden dimensions"
            )
        readings = tuple(a + b for a, b in zip(self.readings, other.readings, strict=True))
        return Statistics(self.units, readings, self.producers, self.task, self.parts + other.parts)


def _sum(what: str, a: Tensor, b: Tensor) -> Tensor:
    a, b = checked_tensor(what, a), checked_tensor(what, b)
    if a.shape != b.shape:  # torch would broadcast some of these
        raise InputError(
            f"{what} of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be added: take both at the same consumer"
        )
    return a + b


def _merged(a: S | None, b: S | None) -> S | None:
    if a is not None and b is not None:
        return a + b
    if a is None and b is None:
        return None
    raise InputError("a statistic was taken on one part of the data only: take the same statistics on every part")
