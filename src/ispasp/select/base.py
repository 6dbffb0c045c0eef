"""Selectors: their base classes, the registry of names, and plain functions as selectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from ispasp.errors import InputError, failing_as
from ispasp.select.evidence import Evidence, descending
from ispasp.types import Consumer, Producer, Selection, Statistics, units_to_keep
from ispasp.types.dimension import check_finite, is_integer
from ispasp.types.statistics import STATISTICS


class Selector(ABC):
    """Decides which units stay.

    Subclasses are frozen dataclasses: their fields are the options. `needs` names what they look at:

    - "moment", "magnitude", "gram" or a name of `register_statistic`: statistics of what each consumer reads;
    - "sensitivity", "fisher": statistics that take a backward pass, see `types.Sensitivity` and `types.Fisher`;
    - "task": the task loss of any choice of units, see `types.Statistics`;
    - "producers": weights of the layers that make the units, see `types.Producer`.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # this is called for dataclasses only
            value, valid = getattr(self, each.name), each.metadata.get("valid")
            if valid and value is not each.default and not valid(value):
                raise InputError(f"{each.name}={value!r}: pass {each.metadata['remedy']}")

    @property
    def parts(self) -> int:
        """Number of mini-batches to keep apart in `Statistics.parts`; 0 if the sum of all is enough."""
        return 0

    @abstractmethod
    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose `keep` (a fraction or a number) of the units of one hidden dimension.

        >>> from ispasp.select import LinearConsumer, TopK, measure
        >>> reading = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, 3.0, 2.0]]), TopK.needs)
        >>> TopK().select(Statistics(3, (reading,)), keep=1).kept
        (1,)
        """

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """The units that `select` keeps at each width. Override it where widths can share work."""
        return [self.select(statistics, width).kept for width in widths]

    def factors(self, statistics: Statistics, kept: Sequence[int]) -> tuple[float, ...]:
        """Factors on the kept units, used without compensation; () for none."""
        return ()


def option(default: Any, valid: Callable[[Any], bool], remedy: str) -> Any:
    """A field of a selector; a value that is not valid raises "name=value: pass {remedy}"."""
    return field(default=default, metadata={"valid": valid, "remedy": remedy})


def whole(least: int, most: int | None = None) -> Callable[[Any], bool]:
    """The check of an option that is an integer within bounds."""
    return lambda value: is_integer(value) and least <= value <= (value if most is None else most)


def flag(default: bool, meaning: str) -> Any:
    """An option that is True or False."""
    return option(default, lambda value: isinstance(value, bool), meaning)


def seed_option() -> Any:
    """The seed of a method's own random numbers."""
    return option(0, whole(0, 2**63 - 1), "an integer from 0 to 2^63 - 1")


class Found(NamedTuple):
    """The sets that a search went through, of which the last one is kept."""

    sets: Sequence[Sequence[int]]
    converged: bool = True
    scores: tuple[float, ...] = ()


class Search(Selector):
    """Finds the sets of several widths at once, which may share work."""

    @abstractmethod
    def search(self, evidence: Evidence, widths: Sequence[int]) -> Sequence[Found]:
        """The search of each width; `evidence` has the statistics and the energy matrix."""

    @final
    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        evidence = Evidence(statistics)
        (found,) = self.search(evidence, [units_to_keep(keep, statistics.units)])
        return replace(evidence.selection(found.sets, converged=found.converged), scores=found.scores)

    @final
    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(found.sets[-1]) for found in self.search(Evidence(statistics), widths)]


class Scored(Search):
    """Keeps the units with the largest scores, the lowest index first among equals."""

    @abstractmethod
    def score(self, statistics: Statistics) -> Tensor:
        """One number per unit, in float64. (units,)"""

    def order(self, score: Tensor) -> Tensor:
        """All units, those that stay first: one order serves all widths. (units,)"""
        return descending(score)

    @final
    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        score = self.score(evidence.statistics)
        scores = tuple(score.tolist())
        return [found._replace(scores=scores) for found in prefixes(self.order(score).tolist(), widths)]


def prefixes(order: Sequence[int], widths: Sequence[int]) -> list[Found]:
    """The first units of an order, as a sorted set for each width."""
    return [Found([sorted(order[:width])]) for width in widths]


def sum_by_unit(values: Tensor, unit_of: Tensor, units: int) -> Tensor:
    """Sum over the channels of each unit, in float64; channels outside (-1) do not count. (channels,) -> (units,)

    >>> sum_by_unit(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 1, 1, -1]), units=2)
    tensor([1., 6.], dtype=torch.float64)
    """
    values = values.double()
    return values.new_zeros(units).index_add(0, unit_of[unit_of >= 0], values[unit_of >= 0])


def sum_over_layers(layers: Iterable[tuple[Consumer | Producer, Tensor]], units: int) -> Tensor:
    """Sum the values of all layers' channels by unit. (channels,) for each layer -> (units,)"""
    return torch.stack([sum_by_unit(values, layer.unit_of(), units) for layer, values in layers]).sum(0)


def checked_producers(statistics: Statistics, method: str) -> tuple[Producer, ...]:
    """The producers, checked to make every unit; `method` names who asks."""
    n = statistics.units
    if not statistics.producers:
        raise InputError(f"{method} needs producers: pass Statistics(units, readings, producers=(Producer(weight),))")
    made = {unit for producer in statistics.producers for unit in producer.unit_of().tolist()} - {-1}
    if max(made) >= n:
        raise InputError(f"a producer makes unit {max(made)} of {n}: its `units` must be from -1 to {n - 1}")
    missing = sorted(set(range(n)) - made)
    if missing:
        wrong = f"{len(missing)} of {n} units are made by no producer (the first is {missing[0]})"
        remedy = "pass all producers, or choose a method that looks at activations"
        raise InputError(f"{wrong}, so {method} cannot score them: {remedy}")
    return statistics.producers


Score = Callable[[Statistics], Tensor]  # one number per unit; the largest stay


@dataclass(frozen=True)
class ByScore(Scored):
    """Keeps the units to which a function of the statistics gives the largest scores.

    `function(statistics)` returns one number per unit, a tensor (units,). `method=function` is the same as
    `method=ByScore(function)`. Gram matrices cost more than the other statistics, so they are taken only if `needs`
    names them. `sum_by_unit` adds up the channels of a head.

    >>> from ispasp.types import LinearConsumer, Reading
    >>> statistics = Statistics(2, (Reading(LinearConsumer(torch.eye(2))),), (Producer(torch.tensor([[1.0], [-3.0]])),))
    >>> ByScore(lambda statistics: statistics.producers[0].weight.abs().sum(1)).select(statistics, keep=1).kept
    (1,)
    """

    name: ClassVar[str] = "a function"
    function: Score
    needs: tuple[str, ...] = ("moment", "magnitude", "producers")  # type: ignore[misc]  # elsewhere it is the class's

    def score(self, statistics: Statistics) -> Tensor:
        found = self.function(statistics)
        remedy = "return a tensor of scores, one per unit"
        with failing_as(InputError, f"{self} returned a {type(found).__name__}", remedy):
            scores = torch.as_tensor(found).detach().double()
        if tuple(scores.shape) != (statistics.units,):
            wrong = f"{self} returned a tensor of shape {tuple(scores.shape)}"
            remedy = "return one score per unit; ispasp.select.sum_by_unit adds up channels"
            raise InputError(f"{wrong}, the hidden dimension has {statistics.units} units: {remedy}")
        check_finite(f"the scores of {self}", scores, "return a finite score for every unit")
        return scores

    def __str__(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))


K = TypeVar("K", bound=type[Selector])
METHODS: dict[str, type[Selector]] = {}


def register(kind: K) -> K:
    """Class decorator that makes a selector known by its `name`.

    `method="name"` then means the class with its default options, in `ispasp.prune` and on the command line.

    >>> @register
    ... class Last(Scored):
    ...     name, needs = "last", ()
    ...     def score(self, statistics):
    ...         return torch.arange(statistics.units)
    >>> "last" in methods(), type(selector("last"))
    (True, <class 'ispasp.select.base.Last'>)
    >>> _ = METHODS.pop("last")
    """
    if not (isinstance(kind, type) and issubclass(kind, Selector)):
        raise InputError(f"register got {kind!r}: pass a class that extends ispasp.select.Selector")
    _check_named(kind, kind.__name__)
    known = METHODS.get(kind.name, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):  # a notebook runs a cell again
        raise InputError(f"{kind.__name__}: there is a method {kind.name!r} already ({known.__name__}): rename it")
    METHODS[kind.name] = kind
    return kind


def methods() -> list[str]:
    """Names of all selectors, the paper's first.

    >>> methods()
    ['ispasp', ..., 'l1', ..., 'topk'...]
    """
    return sorted(METHODS, key=lambda name: (name != "ispasp", name))


def selector(method: str | Selector | type[Selector] | Score) -> Selector:
    """The selector for a name, a class, a function that scores units, or a selector itself.

    >>> selector("ispasp")
    ISpaSP(iterations=20, rank='value', minibatches=False)
    """
    if isinstance(method, str) and method in (*METHODS, "auto"):
        method = METHODS["obs" if method == "auto" else method]  # docs/methods.md says why
    if isinstance(method, type) and issubclass(method, Selector):
        kind = method
        try:
            method = kind()
        except TypeError as error:
            raise InputError(f"the class {kind.__name__} needs options ({error}): pass an object") from None
    if isinstance(method, Selector):
        _check_named(method, type(method).__name__)
        return method
    if hasattr(method, "select"):
        raise InputError(f"method is a {type(method).__name__} with `select`: derive it from ispasp.select.Selector")
    if callable(method) and not isinstance(method, type):
        return ByScore(method)
    nearest = get_close_matches(str(method), METHODS, 1)
    hint = f"did you mean {nearest[0]!r}? Or " if nearest else ""
    known = ", ".join(methods())
    raise InputError(f"unknown method {method!r}: {hint}choose from {known}, a Selector or a scoring function")


def _check_named(given: Selector | type[Selector], kind: str) -> None:
    """Raise unless the method has a name, and its needs exist (checked on use)."""
    known = [*STATISTICS, "task", "producers"]
    for missing in ("name", "needs"):
        if not hasattr(given, missing):
            remedy = f"give the class name = {kind.lower()!r} and, say, needs = ('magnitude',)"
            raise InputError(f"{kind} has no `{missing}`: {remedy}; there are {', '.join(known)}")
    if isinstance(given, Selector) and (isinstance(given.needs, str) or not set(given.needs) <= set(known)):
        raise InputError(f"{kind}.needs is {given.needs!r}: pass a tuple of some of {', '.join(known)}")
