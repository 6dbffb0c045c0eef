"""Statistics of a hidden dimension: all that a selector sees. Small sums that merge with `+`, never the activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types.consumer import Consumer
from ispasp.types.producer import Producer
from ispasp.types.statistic import Gram, Magnitude, Moment, Sensitivity, Statistic

S = TypeVar("S", bound=Statistic)


@dataclass(frozen=True, eq=False, init=False)
class Reading:
    """One consumer of a hidden dimension and the statistics taken at its input, by name.

    >>> from ispasp.types.consumer import LinearConsumer
    >>> reading = Reading(LinearConsumer(torch.eye(2)), Moment({(): torch.tensor([1.0, 2.0])}, examples=3))
    >>> (reading + reading).moment
    Moment(maps={(): tensor([2., 4.])}, examples=6)
    >>> list(reading.statistics), reading.gram
    (['moment'], None)
    """

    consumer: Consumer
    statistics: Mapping[str, Statistic]

    def __init__(self, consumer: Consumer, *statistics: Statistic) -> None:
        """Keep the statistics under their names."""
        other = [each for each in statistics if not isinstance(each, Statistic)]
        if other:
            raise InputError(f"a Reading got a {type(other[0]).__name__}: pass statistics such as Moment or Gram")
        found = {each.name: each for each in statistics}
        if len(found) < len(statistics):
            raise InputError("a Reading got two statistics of one name: add them first")
        object.__setattr__(self, "consumer", consumer)
        object.__setattr__(self, "statistics", MappingProxyType(found))

    def get(self, kind: type[S]) -> S | None:
        """The statistic of this class, None where it was not taken."""
        found = self.statistics.get(kind.name)
        return found if isinstance(found, kind) else None

    @property
    def moment(self) -> Moment | None:
        """Sums of H."""
        return self.get(Moment)

    @property
    def magnitude(self) -> Magnitude | None:
        """Sums of |H|."""
        return self.get(Magnitude)

    @property
    def gram(self) -> Gram | None:
        """Sums of X X^T."""
        return self.get(Gram)

    @property
    def sensitivity(self) -> Sensitivity | None:
        """Effects on the loss."""
        return self.get(Sensitivity)

    def __add__(self, other: Reading) -> Reading:
        """Merge the statistics of two parts of the data for the same consumer."""
        if self.statistics.keys() != other.statistics.keys():
            raise InputError(
                "a statistic was taken on one part of the data only: take the same statistics on every part"
            )
        return Reading(self.consumer, *(each + other.statistics[name] for name, each in self.statistics.items()))


@dataclass(frozen=True, eq=False)
class Statistics:
    """All a selector sees of one hidden dimension of `units` units: one reading per consumer, and its producers.

    Producers carry weights only, no data; they are empty where no method asks for them. `task(masks, step)` gives the
    task loss of networks in which only the units of each mask (m, units) stay, on the mini-batch of that step. (m,)
    `parts` are the same statistics of single mini-batches, for a selector that takes a new one at every step.

    >>> from ispasp.types.consumer import LinearConsumer
    >>> statistics = Statistics(2, (Reading(LinearConsumer(torch.eye(2)), Magnitude(torch.ones(2), 3)),))
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
