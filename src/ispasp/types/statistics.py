"""Statistics, the input of a selector for one hidden dimension, and the selection it returns.

A statistic is a small sum over the data, taken at the input of a consumer. It merges with `+` and never holds the
activations. A new one is one class with `@register_statistic`; most are one tensor and extend `Total`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types.consumer import Consumer, ConvConsumer, Producer, output_size, patches, products_of_rows
from ispasp.types.dimension import checked_tensor

Size = tuple[int, ...]


class Statistic(ABC):
    """A sum over data. Selectors ask for it by putting its `name` into their `needs`.

    `tensors` and `from_tensors` take it apart and put it together again, so that ranks can add theirs.
    """

    name: ClassVar[str]
    needs_loss: ClassVar[bool] = False  # True: it takes a backward pass, and `measure` cannot take it
    samples: ClassVar[bool] = False  # True: `measure` takes a third argument, the positions to look at or None
    examples: int

    @classmethod
    @abstractmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        """Measure one batch. H is the input of the consumer, floating-point and detached.

        (batch, ..., channels) for a linear consumer, (batch, channels, *size) for a convolution. Sum in float64.
        """

    def __add__(self, other: Self) -> Self:
        """Merge two parts of the data: tensors of one key are added."""
        merged = dict(self.tensors())
        for key, total in other.tensors().items():
            merged[key] = _sum(f"{self.name}s", merged[key], total) if key in merged else total
        return self.from_tensors(merged, self.examples + other.examples)

    @abstractmethod
    def tensors(self) -> Mapping[Size, Tensor]:
        """Its tensors by key. A key is a tuple of integers, () where there is only one tensor."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[Size, Tensor], examples: int) -> Self:
        """The inverse of `tensors`, for a class whose fields are just these two."""
        return cls(tensors, examples)  # type: ignore[call-arg]


S = TypeVar("S", bound=Statistic)
Class = TypeVar("Class", bound=type[Statistic])
STATISTICS: dict[str, type[Statistic]] = {}


def register_statistic(kind: Class) -> Class:
    """Make a statistic known by its `name`: a class decorator.

    A selector whose `needs` has that name then finds it in `reading.statistics[name]`.

    >>> @register_statistic
    ... class Energy(Total):
    ...     name = "energy"
    ...     @classmethod
    ...     def measure(cls, consumer, H):
    ...         return cls(by_channel(consumer, H).double().square().sum(1), examples=len(H))
    >>> from ispasp.engine import measure
    >>> from ispasp.types import LinearConsumer
    >>> measure(LinearConsumer(torch.eye(2)), torch.tensor([[1.0, 2.0], [3.0, 0.0]]), ["energy"]).statistics["energy"]
    Energy(total=tensor([10.,  4.], dtype=torch.float64), examples=2)
    >>> _ = STATISTICS.pop("energy")
    """
    if not (isinstance(kind, type) and issubclass(kind, Statistic)):
        raise InputError(f"register_statistic got {kind!r}: pass a class that extends ispasp.select.Statistic")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name or name in ("task", "producers"):
        raise InputError(f"{kind.__name__}.name is {name!r}: give the class a name of its own, such as name = 'energy'")
    known = STATISTICS.get(name, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):  # a notebook runs a cell again
        raise InputError(f"{kind.__name__}: there is a statistic {name!r} already ({known.__name__}): rename it")
    STATISTICS[name] = kind
    return kind


def measurable() -> list[str]:
    """Names of the statistics that `measure` can take."""
    return [name for name, kind in STATISTICS.items() if not kind.needs_loss]


def by_channel(consumer: Consumer, H: Tensor) -> Tensor:
    """Rearrange the input of a consumer as (channels, examples x positions)."""
    return H.movedim(1 if isinstance(consumer, ConvConsumer) else -1, 0).flatten(1)


@register_statistic
@dataclass(frozen=True, eq=False)
class Moment(Statistic):
    """First moments mu(H): the input of a consumer summed over the data.

    A linear consumer needs one vector (channels,) under the empty size; a convolution one batch-summed map
    (channels, *size) for every spatial size it was called with.

    >>> a = Moment({(): torch.tensor([1.0, 2.0])}, examples=3)
    >>> (a + a).maps[()], (a + a).examples
    (tensor([2., 4.]), 6)
    """

    name: ClassVar[str] = "moment"
    maps: Mapping[Size, Tensor]
    examples: int

    def __post_init__(self) -> None:
        if not isinstance(self.maps, Mapping):
            raise InputError(
                f"a Moment's maps are a {type(self.maps).__name__}: pass {{size: sum}}, {{(): sum}} if linear"
            )

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        """Sum H over the batch, and over positions where the consumer treats them alike."""
        over = (0,) if isinstance(consumer, ConvConsumer) else tuple(range(H.ndim - 1))
        total = H.sum(over, dtype=torch.float64)
        return cls({tuple(total.shape[1:]): total}, len(H))

    def tensors(self) -> Mapping[Size, Tensor]:
        return self.maps


@dataclass(frozen=True, eq=False)
class Total(Statistic):
    """A statistic of one tensor. Subclasses define `name` and `measure`."""

    total: Tensor
    examples: int

    def tensors(self) -> Mapping[Size, Tensor]:
        return {(): self.total}

    @classmethod
    def from_tensors(cls, tensors: Mapping[Size, Tensor], examples: int) -> Self:
        return cls(tensors[()], examples)


@register_statistic
class Magnitude(Total):
    """Activation magnitudes: `total[c]` is the sum of |H| over the data and positions of channel c. (channels,)"""

    name: ClassVar[str] = "magnitude"

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        over = (0, *range(2, H.ndim)) if isinstance(consumer, ConvConsumer) else tuple(range(H.ndim - 1))
        return cls(H.abs().sum(over, dtype=torch.float64), len(H))


@register_statistic
class Gram(Total):
    """Second moments of what the weight multiplies: `total[g] = X X^T`, X the patches of group g.

    (groups, K, K) with K = channels / groups x taps, channel-major as in `weight.flatten(1)`. For a linear consumer
    it is H H^T, with one group and one tap. From some positions only it is estimated: scaled up to all of them.
    """

    name: ClassVar[str] = "gram"
    samples: ClassVar[bool] = True

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor, at: Tensor | None = None) -> Self:
        if at is None:
            return cls(products_of_rows(patches(consumer, H.double())), len(H))
        share = math.prod(output_size(consumer, H)) / len(at)
        return cls(products_of_rows(patches(consumer, H, at).double()) * share, len(H))


class _Backward(Total):
    """A statistic of gradients."""

    needs_loss: ClassVar[bool] = True

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        raise InputError(f"activations alone give no {cls.name}: ispasp.prune takes it, by a backward pass")


@register_statistic
class Sensitivity(_Backward):
    """First-order effect of masking each unit: sum over examples of |sum over its channels and positions of H dL/dH|.

    (units,): the derivative of the loss by a factor on the unit, in absolute value (Michel et al. 2019).
    """

    name: ClassVar[str] = "sensitivity"


@register_statistic
class Fisher(_Backward):
    """Squared gradients at the consumer's outputs, before a BatchNorm that follows: summed over the data. (outputs,)

    The loss is the negative log-likelihood of labels that are drawn from the model's own predictions. A small change d
    of output o at one position then moves the predictions by d^2 times the mean square, as a Kullback-Leibler
    divergence and up to a factor.
    """

    name: ClassVar[str] = "fisher"


def _sum(what: str, a: Tensor, b: Tensor) -> Tensor:
    a, b = checked_tensor(what, a), checked_tensor(what, b)
    if a.shape != b.shape:  # torch would broadcast some of these
        raise InputError(f"{what} of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be added: take one consumer's")
    return a + b


@dataclass(frozen=True, eq=False, init=False)
class Reading:
    """One consumer of a hidden dimension and the statistics taken at its input, by name.

    >>> from ispasp.types import LinearConsumer
    >>> reading = Reading(LinearConsumer(torch.eye(2)), Moment({(): torch.tensor([1.0, 2.0])}, examples=3))
    >>> (reading + reading).moment
    Moment(maps={(): tensor([2., 4.])}, examples=6)
    >>> list(reading.statistics), reading.gram
    (['moment'], None)
    """

    consumer: Consumer
    statistics: Mapping[str, Statistic]

    def __init__(self, consumer: Consumer, *statistics: Statistic) -> None:
        other = [each for each in statistics if not isinstance(each, Statistic)]
        if other:
            raise InputError(f"a Reading got a {type(other[0]).__name__}: pass statistics such as Moment or Gram")
        found = {each.name: each for each in statistics}
        if len(found) < len(statistics):
            raise InputError("a Reading got two statistics of one name: add them first")
        object.__setattr__(self, "consumer", consumer)
        object.__setattr__(self, "statistics", MappingProxyType(found))

    def get(self, kind: type[S]) -> S | None:
        found = self.statistics.get(kind.name)
        return found if isinstance(found, kind) else None

    @property
    def moment(self) -> Moment | None:
        return self.get(Moment)

    @property
    def magnitude(self) -> Magnitude | None:
        return self.get(Magnitude)

    @property
    def gram(self) -> Gram | None:
        return self.get(Gram)

    def __add__(self, other: Reading) -> Reading:
        if self.statistics.keys() != other.statistics.keys():
            raise InputError("a statistic was taken on one part of the data only: take the same on every part")
        return Reading(self.consumer, *(each + other.statistics[name] for name, each in self.statistics.items()))


@dataclass(frozen=True, eq=False)
class Statistics:
    """The input of a selector for one hidden dimension of `units` units: a reading per consumer, and producers.

    Producers hold weights, no data; they are there if the method needs them. `task(masks, step)` returns the
    task loss of networks in which only the units of each mask (m, units) stay, on the mini-batch of that step. (m,)
    `parts` are the same statistics of single mini-batches, for a selector that takes a new one at every step.
    """

    units: int
    readings: tuple[Reading, ...]
    producers: tuple[Producer, ...] = ()
    task: Callable[[Tensor, int], Tensor] | None = None
    parts: tuple[Statistics, ...] = ()

    def __post_init__(self) -> None:
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
        if (self.units, len(self.readings)) != (other.units, len(other.readings)):
            raise InputError(
                f"statistics of {self.units} units and {len(self.readings)} consumers cannot be added to those of "
                f"{other.units} units and {len(other.readings)} consumers: they are of different hidden dimensions"
            )
        readings = tuple(a + b for a, b in zip(self.readings, other.readings, strict=True))
        return Statistics(self.units, readings, self.producers, self.task, self.parts + other.parts)


@dataclass(frozen=True)
class Step:
    """The kept units after one iteration and their residuals.

    V is the dense minus the pruned output of the consumers. `moment_residual` is ||mu(V)||_2, mu the sum over the data.
    `residual` is ||V||_F if data or a Gram matrix were available, else None: first moments cannot give it.
    """

    kept: tuple[int, ...]
    moment_residual: float | None = None
    residual: float | None = None


@dataclass(frozen=True)
class Selection:
    """The units to keep (sorted), with one `Step` per iteration.

    `start` is the state before the first iteration, when nothing is kept. Its residuals are the norms of the dense
    output, so `step.residual / start.residual` is a relative error. `converged` says that a further iteration would
    return the same set. `scores` has a number for every unit, where the method gives one.

    >>> Selection(kept=(0, 2), start=Step((), 2.0), steps=(Step((0, 2), 0.5),), converged=True)
    Selection(kept 2 units [0, 2], iterations=1, converged=True, moment residual 2 -> 0.5)
    """

    kept: tuple[int, ...]
    start: Step = Step(())
    steps: tuple[Step, ...] = ()
    converged: bool = True
    scores: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()  # the method's factor on each kept unit

    @property
    def iterations(self) -> int:
        return len(self.steps)

    @property
    def residuals(self) -> tuple[float | None, ...]:
        """||V||_F after each iteration, None where it is not known."""
        return tuple(step.residual for step in self.steps)

    @property
    def moment_residuals(self) -> tuple[float | None, ...]:
        """||mu(V)||_2 after each iteration."""
        return tuple(step.moment_residual for step in self.steps)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.kept[:8])) + (", ..." if len(self.kept) > 8 else "")
        text = f"kept {len(self.kept)} units [{shown}], iterations={self.iterations}, converged={self.converged}"
        last = self.steps[-1] if self.steps else self.start
        for name in ("moment_residual", "residual"):
            first, final = getattr(self.start, name), getattr(last, name)
            if first is not None and final is not None:
                text += f", {name.replace('_', ' ')} {first:.4g} -> {final:.4g}"
        return f"Selection({text})"
