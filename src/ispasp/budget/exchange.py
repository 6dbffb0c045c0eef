"""Exchanges: one hidden dimension becomes wider, another pays for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ispasp.budget.descend import largest
from ispasp.budget.problem import Place, Problem, at

_TRIES = 8  # counts spent on exchanges that do not turn out as predicted
_GAIN = 1e-4  # an exchange that lowers the error by a smaller fraction is not worth its counts


@dataclass(frozen=True, eq=False)
class Moves:
    """Exchanges: dimension `up` goes to its choice `up_to`, dimension `down` to `down_to`, and `gain` error is won."""

    up: NDArray[np.int64]  # (moves,) as all others
    up_to: NDArray[np.int64]
    down: NDArray[np.int64]
    down_to: NDArray[np.int64]
    gain: NDArray[np.float64]

    def apply(self, place: Place, move: int) -> Place:
        """The place after one of them."""
        return at(place, {int(self.up[move]): int(self.up_to[move]), int(self.down[move]): int(self.down_to[move])})


def exchange(problem: Problem, place: Place) -> Place | None:
    """The most promising exchange that lowers the error and meets the limit, or None.

    >>> from ispasp.budget.curve import Curve
    >>> from ispasp.budget.problem import choices
    >>> steep, flat = choices(Curve((1, 4), (1.0, 0.0))), choices(Curve((1, 4), (0.1, 0.0)))
    >>> p = Problem({"a": steep, "b": flat}, lambda widths: widths["a"] + widths["b"], limit=6)
    >>> p.widths(exchange(p, (1, 3)))   # a: 2 -> 4, b: 4 -> 2
    {'a': 4, 'b': 2}
    """
    moves, least = predicted(problem, place), _GAIN * problem.error(place)
    best = np.argsort(-moves.gain, kind="stable")[:_TRIES]
    for move in best[moves.gain[best] > least]:
        new = moves.apply(place, int(move))
        if problem.slack(new) >= 0:
            return new
    return None


def predicted(problem: Problem, place: Place) -> Moves:
    """Every pair of dimensions: one wider by 1, 2, 4, ... choices, the other narrower by just as much as that takes.

    Counts are taken to be linear here. They are products of widths, so a pair costs a little less than that: what is
    predicted to fit does.

    >>> from ispasp.budget.curve import Curve
    >>> from ispasp.budget.problem import choices
    >>> curve = choices(Curve((1, 3), (1.0, 0.0)))
    >>> p = Problem({"a": curve, "b": curve}, lambda widths: 2 * widths["a"] + widths["b"], limit=7)
    >>> moves = predicted(p, (1, 2))   # a: 2 -> 3 takes b: 3 -> 1
    >>> moves.apply((1, 2), 0), float(moves.gain[0])
    ((2, 0), -0.5)
    """
    slopes, slack = problem.slopes(place), problem.slack(place)
    ups = [(d, to) for d, option in enumerate(problem.options) for to in _wider(place[d], option.last)]
    up, up_to = np.array(ups, dtype=np.int64).reshape(-1, 2).T
    won = np.array([problem.options[d].errors[place[d]] - problem.options[d].errors[to] for d, to in ups])
    more = np.array([problem.options[d].widths[to] - problem.options[d].widths[place[d]] for d, to in ups])
    needed = np.maximum(more * slopes[up] - slack, 0.0)
    found = [(np.zeros(0, dtype=np.int64),) * 4 + (np.zeros(0),)]
    for d, (option, k) in enumerate(zip(problem.options, place, strict=True)):
        if k == 0 or slopes[d] <= 0.0:
            continue
        width = option.widths[k] - needed / slopes[d]
        down_to = np.searchsorted(option.widths, width + 1e-9, side="right") - 1
        ok = (down_to >= 0) & (up != d)
        gain = won - (option.errors[down_to] - option.errors[k])
        found.append((up[ok], up_to[ok], np.full(ok.sum(), d), down_to[ok], gain[ok]))
    return Moves(*(np.concatenate(column) for column in zip(*found, strict=True)))


def counted(problem: Problem, place: Place) -> Iterator[Place]:
    """Every pair that meets the limit, small steps first. `place` must be full: not one step more fits.

    >>> from ispasp.budget.curve import Curve
    >>> from ispasp.budget.problem import choices
    >>> curve = choices(Curve((1, 3), (1.0, 0.0)))
    >>> list(counted(Problem({"a": curve, "b": curve}, lambda widths: 2 * widths["a"] + widths["b"], limit=7), (1, 2)))
    [(2, 0)]
    """
    furthest = max(option.last - k for option, k in zip(problem.options, place, strict=True))
    for step in range(1, furthest + 1):
        for up, down in itertools.permutations(range(len(place)), 2):
            if place[up] + step <= problem.options[up].last:
                raised = at(place, {up: place[up] + step})
                new = at(raised, {down: largest(problem, raised, down, 0)})
                if problem.slack(new) >= 0:
                    yield new


def _wider(k: int, last: int) -> list[int]:
    """Choices above k: all where they are few, else the next, then at doubling distance, and the last."""
    if last - k <= 16:
        return list(range(k + 1, last + 1))
    return [*(k + 2**n for n in range((last - k).bit_length()) if k + 2**n < last), last]
