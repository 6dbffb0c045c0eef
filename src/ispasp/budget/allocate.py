"""Widths for every hidden dimension, so that the whole network meets a limit with the least error.

The search shrinks the dense network where a saved count costs the least error (`descend`), uses up what is left of the
limit (`fill`), and lets dimensions swap widths while that lowers the error (`exchange`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ispasp.budget.curve import Curve
from ispasp.errors import InputError
from ispasp.types.dimension import is_integer

Place = tuple[int, ...]  # for every hidden dimension, the index of its choice

_TRIES = 8  # counts spent on exchanges that do not turn out as predicted
_GAIN = 1e-4  # an exchange that lowers the error by a smaller fraction is not worth its counts
_ROUNDS = 100  # exchanges; far more than networks were seen to need
_COUNTS = 5000  # counts spent on coming closer to the limit
_NEAR = 0.01  # how close below the limit the count should come


def allocate(
    curves: Mapping[str, Curve],
    count: Callable[[Mapping[str, int]], int],
    limit: int,
    *,
    round_to: int | None = None,
    least: Mapping[str, int] | None = None,
    allowed: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, int]:
    """Widths with count(widths) <= limit and the least sum of predicted errors, found by search.

    `curves`: name of a hidden dimension -> its error at every width. `count`: parameters or MACs of the network with
    these widths, one for every name; any function that does not fall when a width rises. The count comes within 1 % of
    the limit wherever the search finds such widths. With `round_to`, widths are its multiples or all units. `least`
    gives the fewest units of some dimensions. None becomes narrower than the first point of its curve. `allowed` lists
    the widths that some dimensions may have, besides all units.

    >>> curves = {"a": Curve((1, 8), (1.0, 0.0)), "b": Curve((1, 4, 8), (1.0, 0.1, 0.0))}
    >>> allocate(curves, lambda widths: 10 * widths["a"] + 10 * widths["b"], limit=125)
    {'a': 8, 'b': 4}
    """
    _check(curves, limit, round_to, least or {})
    given, wide = least or {}, allowed or {}
    options = {name: choices(curve, round_to, given.get(name, 0), wide.get(name)) for name, curve in curves.items()}
    problem = Problem(options, count, int(limit))
    smallest = (0,) * len(options)
    if problem.slack(smallest) < 0:
        counted = f"the network still counts {problem.count(smallest):,}"
        why = f"with every hidden dimension as narrow as allowed {counted}"
        raise InputError(
            f"a limit of {limit:,} cannot be met: {why}; raise the limit to that, or prune more dimensions"
        )
    place = descend(problem)
    if place != problem.dense:
        place = _polish(problem, place)
    return problem.widths(place)


def _check(curves: Mapping[str, Curve], limit: int, round_to: int | None, least: Mapping[str, int]) -> None:
    if not curves:
        raise InputError("no curves given: pass the curve of at least one hidden dimension")
    if not is_integer(limit):
        raise InputError(f"limit={limit!r} is a {type(limit).__name__}: pass an int, e.g. Macs(0.5).limit(cost)")
    if round_to is not None and (not is_integer(round_to) or round_to < 1):
        raise InputError(f"round_to={round_to!r}: pass an integer >= 1, e.g. 8, or None")
    for name, width in least.items():
        if name not in curves:
            raise InputError(f"least names {name!r}, which has no curve: choose from {', '.join([*curves][:5])}, ...")
        units = curves[name].units
        if not is_integer(width) or not 0 <= width <= units:
            raise InputError(f"least[{name!r}]={width!r}: the hidden dimension has {units} units, pass 0 to {units}")


@dataclass(frozen=True, eq=False)
class Choices:
    """The widths one hidden dimension may have, ascending to all units, and the error at each. (m,)

    The error is linear between the choices at `bends`, which include the first and the last.
    """

    widths: NDArray[np.int64]
    errors: NDArray[np.float64]
    bends: tuple[int, ...]

    @property
    def last(self) -> int:
        """Index of the widest choice."""
        return len(self.widths) - 1

    @cached_property
    def corners(self) -> list[int]:
        """Indices of the corners of the errors' lower convex hull, ascending.

        >>> Choices(np.array([1, 2, 3, 4]), np.array([4.0, 3.9, 1.0, 0.0]), bends=(0, 1, 2, 3)).corners
        [0, 2, 3]
        """
        w, e = self.widths, self.errors

        def above(a: int, b: int, c: int) -> bool:  # point b lies on or above the line from a to c
            return bool((e[b] - e[a]) * (w[c] - w[a]) >= (e[c] - e[a]) * (w[b] - w[a]))

        hull: list[int] = []
        for k in self.bends:
            while len(hull) > 1 and above(hull[-2], hull[-1], k):
                hull.pop()
            hull.append(k)
        return hull


def choices(curve: Curve, round_to: int | None = None, least: int = 0, allowed: Sequence[int] | None = None) -> Choices:
    """Widths of at least `least`: all of them, multiples of `round_to`, or those `allowed`, and the full width.

    >>> choices(Curve((1, 20), (1.0, 0.0)), round_to=8).widths.tolist()
    [8, 16, 20]
    """
    step = round_to or 1
    widths = np.arange(0, curve.units, step)
    widths = widths if allowed is None else np.intersect1d(widths, np.asarray(allowed))
    widths = np.union1d(widths[widths >= max(least, curve.kept[0])], [curve.units])
    last = len(widths) - 1
    after = np.searchsorted(widths, curve.kept)  # a point of the curve may lie between two choices: both are bends
    before = np.searchsorted(widths, curve.kept, side="right") - 1
    bends = {0, last, *after.clip(0, last).tolist(), *before.clip(0, last).tolist()}
    return Choices(widths, curve.at(widths), tuple(sorted(bends)))


class Problem:
    """The choices of all hidden dimensions and the count of a place. Counts are expensive, so they are remembered."""

    def __init__(self, options: Mapping[str, Choices], count: Callable[[Mapping[str, int]], int], limit: int) -> None:
        """`count` returns the cost of a network of these widths; `limit` is the most it may cost."""
        self.names = tuple(options)
        self.options = tuple(options.values())
        self.dense: Place = tuple(option.last for option in self.options)
        self.limit = limit
        self._count = count
        self.known: dict[Place, int] = {}

    def widths(self, place: Place) -> dict[str, int]:
        chosen = zip(self.names, self.options, place, strict=True)
        return {name: int(option.widths[k]) for name, option, k in chosen}

    def count(self, place: Place) -> int:
        if place not in self.known:
            self.known[place] = self._count(self.widths(place))
        return self.known[place]

    def error(self, place: Place) -> float:
        return float(sum(option.errors[k] for option, k in zip(self.options, place, strict=True)))

    def slack(self, place: Place) -> int:
        """The rest of the limit; negative above it."""
        return self.limit - self.count(place)

    def slopes(self, place: Place) -> NDArray[np.float64]:
        """The cost of one unit of each dimension while the others stay. (dimensions,)

        >>> all20 = choices(Curve((1, 20), (1.0, 0.0)))
        >>> Problem({"a": all20, "b": all20}, lambda w: w["a"] * w["b"], limit=50).slopes((4, 6))   # 5 and 7 units
        array([7., 5.])
        """
        slopes = np.zeros(len(place))
        for d, (option, k) in enumerate(zip(self.options, place, strict=True)):
            if option.last > 0:
                other = k - 1 if k > 0 else k + 1
                change = self.count(place) - self.count(_at(place, {d: other}))
                slopes[d] = change / int(option.widths[k] - option.widths[other])
        return slopes


def _at(place: Place, changes: Mapping[int, int]) -> Place:
    return tuple(changes.get(d, k) for d, k in enumerate(place))


def descend(problem: Problem) -> Place:
    """Shrink along the convex hulls of the curves, cheapest segment first, until the limit is met.

    A segment's rate is the error it adds per count it saves. As others shrink a dimension saves less, so rates only
    rise: an old rate is a lower bound, and only the one at the top is computed again.
    """
    place = problem.dense
    rates = [(0.0, d) for d, last in enumerate(place) if last > 0]
    remaining = {d: problem.options[d].corners[:-1] for _, d in rates}
    while problem.slack(place) < 0 and rates:
        _, d = heapq.heappop(rates)
        target, errors = remaining[d][-1], problem.options[d].errors
        saved = problem.count(place) - problem.count(_at(place, {d: target}))
        if saved <= 0:  # nothing counted depends on it, nor will it when others are smaller
            continue
        rate = float(errors[target] - errors[place[d]]) / saved
        if rates and rate > rates[0][0]:
            heapq.heappush(rates, (rate, d))
            continue
        remaining[d] = remaining[d][:-1]
        if remaining[d]:
            heapq.heappush(rates, (rate, d))
        place = _at(place, {d: _widest(problem, place, d, target)})
    return place


def _widest(problem: Problem, place: Place, d: int, least: int) -> int:
    """The widest choice of dimension d, from `least` up to the present one, that meets the limit; else `least`."""
    wider = range(least + 1, place[d])
    return least + bisect_left(wider, True, key=lambda k: problem.slack(_at(place, {d: k})) < 0)


def fill(problem: Problem, place: Place) -> Place:
    """Widen where it lowers the error most for its count, until no further step fits."""
    candidates = [*range(len(place))]
    while True:
        wider = {d: _at(place, {d: place[d] + 1}) for d in candidates if place[d] < problem.dense[d]}
        costs = {d: problem.count(new) - problem.count(place) for d, new in wider.items()}
        candidates = [d for d, cost in costs.items() if cost <= problem.slack(place)]  # others never fit again
        if not candidates:
            return place
        rates = {}
        for d in candidates:
            errors, k = problem.options[d].errors, place[d]
            rates[d] = (float(errors[k] - errors[k + 1]) / max(costs[d], 1), costs[d])
        d = max(candidates, key=rates.__getitem__)
        corners = problem.options[d].corners
        corner = _at(place, {d: corners[bisect_right(corners, place[d])]})
        place = corner if problem.slack(corner) >= 0 else _at(place, {d: _widest(problem, corner, d, place[d] + 1)})


def exchange(problem: Problem, place: Place) -> Place | None:
    """The most promising exchange that lowers the error and meets the limit, or None.

    One dimension becomes wider, another pays for it.
    """
    moves, gain = _exchanges(problem, place)
    best = np.argsort(-gain, kind="stable")[:_TRIES]
    for up, up_to, down, down_to in moves[best[gain[best] > _GAIN * problem.error(place)]].tolist():
        new = _at(place, {up: up_to, down: down_to})
        if problem.slack(new) >= 0:
            return new
    return None


def _exchanges(problem: Problem, place: Place) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Rows (up, its choice, down, its choice) for every pair of dimensions, and the error each row wins.

    One becomes wider by 1, 2, 4, ... choices, the other narrower by as much as that takes. Counts are taken to be
    linear. They are products of widths, so a pair costs a little less: what is predicted to fit does.
    """
    slopes, slack = problem.slopes(place), problem.slack(place)
    ups = [(d, to) for d, option in enumerate(problem.options) for to in _wider(place[d], option.last)]
    up, up_to = np.array(ups, dtype=np.int64).reshape(-1, 2).T
    won = np.array([problem.options[d].errors[place[d]] - problem.options[d].errors[to] for d, to in ups])
    more = np.array([problem.options[d].widths[to] - problem.options[d].widths[place[d]] for d, to in ups])
    needed = np.maximum(more * slopes[up] - slack, 0.0)
    moves, gains = [np.zeros((0, 4), dtype=np.int64)], [np.zeros(0)]
    for d, (option, k) in enumerate(zip(problem.options, place, strict=True)):
        if k == 0 or slopes[d] <= 0.0:
            continue
        down_to = np.searchsorted(option.widths, option.widths[k] - needed / slopes[d] + 1e-9, side="right") - 1
        ok = (down_to >= 0) & (up != d)
        moves.append(np.stack([up, up_to, np.full_like(up, d), down_to], axis=1)[ok])
        gains.append((won - (option.errors[down_to] - option.errors[k]))[ok])
    return np.concatenate(moves), np.concatenate(gains)


def _wider(k: int, last: int) -> list[int]:
    """Choices above k: all where they are few, else the next, then at doubling distance, and the last."""
    if last - k <= 16:
        return list(range(k + 1, last + 1))
    return [*(k + 2**n for n in range((last - k).bit_length()) if k + 2**n < last), last]


def _polish(problem: Problem, place: Place) -> Place:
    """Fill what is left, exchange while that lowers the error, and come within 1 % of the limit if possible."""
    place = fill(problem, place)
    for _ in range(_ROUNDS):
        better = exchange(problem, place)
        if better is None:
            break
        place = fill(problem, better)
    near = _NEAR * problem.limit
    if problem.slack(place) <= near:
        return place
    closer = _close_in(problem, place, near)
    return closer if problem.slack(closer) <= near else place  # no extra error for a count that misses as well


def _close_in(problem: Problem, place: Place, near: float) -> Place:
    """Come as close to the limit as `near` where steps are coarse, with the least error.

    Tries all places if they are few, else all pairs again and again. Only small networks come to this: where steps are
    fine, filling has come close already.
    """
    end = len(problem.known) + _COUNTS
    sizes = [len(option.widths) for option in problem.options]

    def key(candidate: Place) -> tuple[float, float]:
        return max(problem.slack(candidate), near), problem.error(candidate)

    if math.prod(sizes) <= _COUNTS:
        everything = itertools.product(*map(range, sizes))
        return min((candidate for candidate in everything if problem.slack(candidate) >= 0), key=key)
    while len(problem.known) < end:
        pairs = itertools.takewhile(lambda _: len(problem.known) < end, _all_pairs(problem, place))
        best = min(pairs, key=key, default=place)
        if key(best) >= key(place):
            break
        place = fill(problem, best)
    return place


def _all_pairs(problem: Problem, place: Place) -> Iterator[Place]:
    """Every exchange that meets the limit, small steps first. `place` must be full: not one step more fits."""
    furthest = max(last - k for last, k in zip(problem.dense, place, strict=True))
    for step in range(1, furthest + 1):
        for up, down in itertools.permutations(range(len(place)), 2):
            if place[up] + step <= problem.dense[up]:
                raised = _at(place, {up: place[up] + step})
                new = _at(raised, {down: _widest(problem, raised, down, 0)})
                if problem.slack(new) >= 0:
                    yield new
