"""One statistic: a small sum over the data that is taken at the input of a consumer and merges with `+`.

A new statistic is one class with `@register_statistic`. Most are one tensor and extend `Total`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types.checks import checked_tensor
from ispasp.types.consumer import Consumer, ConvConsumer
from ispasp.types.patches import patches

if TYPE_CHECKING:
    from typing_extensions import Self

Size = tuple[int, ...]


class Statistic(ABC):
    """A sum over data. Selectors ask for it by putting its `name` into their `needs`.

    `tensors` and `from_tensors` take it apart and put it together again, so that several machines can add theirs.
    """

    name: ClassVar[str]
    needs_loss: ClassVar[bool] = False  # True: it takes a backward pass, and `measure` cannot take it
    examples: int

    @classmethod
    @abstractmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        """Take it of one batch. H is what the consumer gets, floating-point and detached.

        (..., channels) for a linear consumer, (batch, channels, *size) for a convolution. Sum in float64.
        """

    @abstractmethod
    def __add__(self, other: Self) -> Self:
        """Merge two parts of the data."""

    @abstractmethod
    def tensors(self) -> Mapping[Size, Tensor]:
        """Its tensors. Each has a tuple of whole numbers as its key, () where there is only one."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[Size, Tensor], examples: int) -> Self:
        """Put it together from what `tensors` gives."""


S = TypeVar("S", bound=type[Statistic])
STATISTICS: dict[str, type[Statistic]] = {}


def register_statistic(kind: S) -> S:
    """Make a statistic known by its `name`: a class decorator.

    A selector whose `needs` has that name then finds it in `reading.statistics[name]`.

    >>> @register_statistic
    ... class Energy(Total):
    ...     name = "energy"
    ...     @classmethod
    ...     def measure(cls, consumer, H):
    ...         return cls(by_channel(consumer, H).double().square().sum(1), examples=len(H))
    >>> from ispasp.calibrate import measure
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
    """Names of the statistics that `measure` can take.

    >>> measurable()[:3]
    ['moment', 'magnitude', 'gram']
    """
    return [name for name, kind in STATISTICS.items() if not kind.needs_loss]


def by_channel(consumer: Consumer, H: Tensor) -> Tensor:
    """What the consumer gets as (channels, examples x positions).

    >>> from ispasp.types.consumer import LinearConsumer
    >>> by_channel(LinearConsumer(torch.eye(2)), torch.zeros(5, 7, 2)).shape
    torch.Size([2, 35])
    """
    return (H.movedim(1, 0) if isinstance(consumer, ConvConsumer) else H.movedim(-1, 0)).flatten(1)


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
        """Refuse a bare tensor."""
        if not isinstance(self.maps, Mapping):
            raise InputError(
                f"the maps of a Moment are a {type(self.maps).__name__}: pass {{size: sum}}, for a linear consumer "
                "{(): vector}"
            )

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        """Sum H over the batch, and over positions where the consumer treats them alike."""
        over = (0,) if isinstance(consumer, ConvConsumer) else tuple(range(H.ndim - 1))
        total = H.sum(over, dtype=torch.float64) if over else H.double()
        return cls({tuple(total.shape[1:]): total}, _count(H))

    def __add__(self, other: Self) -> Self:
        """Merge two parts of the data."""
        maps = dict(self.maps)
        for size, total in other.maps.items():
            maps[size] = _sum("moments", maps[size], total) if size in maps else total
        return type(self)(maps, self.examples + other.examples)

    def tensors(self) -> Mapping[Size, Tensor]:
        """The map of each size."""
        return self.maps

    @classmethod
    def from_tensors(cls, tensors: Mapping[Size, Tensor], examples: int) -> Self:
        """The maps of all sizes."""
        return cls(tensors, examples)


@dataclass(frozen=True, eq=False)
class Total(Statistic):
    """A statistic of one tensor. Subclasses have a `name` and `measure`."""

    total: Tensor
    examples: int

    def __add__(self, other: Self) -> Self:
        """Merge two parts of the data."""
        what = f"{type(self).__name__}.total"
        return type(self)(_sum(what, self.total, other.total), self.examples + other.examples)

    def tensors(self) -> Mapping[Size, Tensor]:
        """The only tensor."""
        return {(): self.total}

    @classmethod
    def from_tensors(cls, tensors: Mapping[Size, Tensor], examples: int) -> Self:
        """The only tensor."""
        return cls(tensors[()], examples)


@register_statistic
class Magnitude(Total):
    """Summed activation magnitudes: `total[c]` is the sum of |H| over data and positions of channel c. (channels,)

    >>> (Magnitude(torch.tensor([1.0]), examples=3) + Magnitude(torch.tensor([2.0]), examples=4))
    Magnitude(total=tensor([3.]), examples=7)
    """

    name: ClassVar[str] = "magnitude"

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        """Sum |H| over the batch and all positions."""
        conv = isinstance(consumer, ConvConsumer)
        over = (0, *range(2, H.ndim)) if conv else tuple(range(H.ndim - 1))
        return cls(H.abs().sum(over, dtype=torch.float64) if over else H.abs().double(), _count(H))


@register_statistic
class Gram(Total):
    """Second moments of what the weight multiplies: `total[g] = X X^T`, X the patches of group g.

    (groups, K, K) with K = channels / groups x taps, channel-major as in `weight.flatten(1)`; one group and one tap
    for a linear consumer, where it is H H^T.

    >>> (Gram(torch.tensor([[[1.0]]]), examples=3) + Gram(torch.tensor([[[2.0]]]), examples=4))
    Gram(total=tensor([[[3.]]]), examples=7)
    """

    name: ClassVar[str] = "gram"

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        """Sum X X^T over the patches X that meet the weight."""
        X = patches(consumer, H).double()  # (groups, K, N)
        return cls(X @ X.mT, _count(H))


@register_statistic
class Sensitivity(Total):
    """First-order effect of masking each unit: sum over examples of |sum over its channels and positions of H dL/dH|.

    (units,): the derivative of the loss by a factor on the unit, in absolute value (Michel et al. 2019).

    >>> (Sensitivity(torch.tensor([1.0]), examples=3) + Sensitivity(torch.tensor([2.0]), examples=4))
    Sensitivity(total=tensor([3.]), examples=7)
    """

    name: ClassVar[str] = "sensitivity"
    needs_loss: ClassVar[bool] = True

    @classmethod
    def measure(cls, consumer: Consumer, H: Tensor) -> Self:
        """Raise: it takes a loss and a backward pass."""
        raise InputError("activations alone give no sensitivity: pass loss= to ispasp.prune")


def _count(H: Tensor) -> int:
    return H.shape[0] if H.ndim > 1 else 1


def _sum(what: str, a: Tensor, b: Tensor) -> Tensor:
    a, b = checked_tensor(what, a), checked_tensor(what, b)
    if a.shape != b.shape:  # torch would broadcast some of these
        raise InputError(
            f"{what} of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be added: take both at the same consumer"
        )
    return a + b
