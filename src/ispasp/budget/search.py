"""Searches of widths under a budget: what they may look at, and the registry of their names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ispasp.errors import InputError

Counts = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class WidthProblem:
    """Find `widths`, a number of units for every hidden dimension, with count(widths) <= limit and the least error.

    `error(widths)` prunes and refits that network on a sample and returns the divergence of its output from the dense
    one, on held-out examples where there are some: no labels. `network(widths)` is that network as a module, for an
    `evaluate` of your own. `fit(name, width)` is the nearest width that the options allow. `start` is the allocation
    that `search=0` returns. `survey`, `model` and `batches` are those of the call.
    """

    units: Counts
    least: Counts
    limit: int
    count: Callable[[Counts], int]
    fit: Callable[[str, int], int]
    error: Callable[[Counts], float]
    network: Callable[[Counts], nn.Module]
    start: Counts
    survey: Any
    model: nn.Module
    batches: Sequence[Any]

    def widest(self, name: str, others: Counts) -> int:
        """The widest allowed width of one hidden dimension that meets the limit, with the other widths given."""
        wider = range(self.least[name] + 1, self.units[name] + 1)
        low = self.least[name] + bisect_right(wider, self.limit, key=lambda width: self.count({**others, name: width}))
        fitted = self.fit(name, low)
        while fitted > low and self.count({**others, name: fitted}) > self.limit:
            fitted = self.fit(name, low := low - 1)
        return max(fitted, self.least[name])


WidthSearch = Callable[[WidthProblem], Counts]
SEARCHES: dict[str, Callable[[], WidthSearch]] = {}
S = TypeVar("S", bound=Callable[[], WidthSearch])


def register_search(name: str) -> Callable[[S], S]:
    """Class decorator that makes a search of widths known: `prune(..., search=name)` then means kind()(problem).

    >>> @register_search("own")
    ... class Own:
    ...     def __call__(self, problem):
    ...         return problem.start
    >>> type(width_search("own")).__name__, SEARCHES.pop("own") is Own
    ('Own', True)
    """

    def add(kind: S) -> S:
        SEARCHES[name] = kind
        return kind

    return add


def width_search(given: object) -> WidthSearch | None:
    """The search for a name, or a search itself; None for a number of candidates."""
    if isinstance(given, str):
        if given not in SEARCHES:
            known = f"choose from {', '.join(SEARCHES)}" if SEARCHES else "no search is registered under a name"
            own = "a function of a WidthProblem; those of a checkout come with `import ispasp_lab.search`"
            raise InputError(f"search={given!r}: {known}; pass a number of candidates, or {own}")
        return SEARCHES[given]()
    return given if callable(given) else None


def checked(problem: WidthProblem, found: object) -> dict[str, int]:
    """The widths that a search returned, if they are within the limit."""
    if not isinstance(found, Mapping) or found.keys() != problem.units.keys():
        raise InputError(f"the search returned {found!r:.80}: return a width for each of {', '.join(problem.units)}")
    widths = {name: int(width) for name, width in found.items()}
    for name, width in widths.items():
        least, units = problem.least[name], problem.units[name]
        if not least <= width <= units:
            raise InputError(f"the search gave {name}={width}: return {least} to {units} units")
    if problem.count(widths) > problem.limit:
        raise InputError(f"the search's widths count {problem.count(widths):,}, above the limit of {problem.limit:,}")
    return widths
