"""The choices of widths, and what each costs and loses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ispasp.budget.curve import Curve

Place = tuple[int, ...]  # for every hidden dimension the number of its choice


@dataclass(frozen=True, eq=False)
class Choices:
    """The widths one hidden dimension may have, ascending to all units, and the error at each. (m,)

    `bends` are the numbers of those choices between which the error is linear, the first and the last among them.
    """

    widths: NDArray[np.int64]
    errors: NDArray[np.float64]
    bends: tuple[int, ...]

    @property
    def last(self) -> int:
        """The number of the widest choice."""
        return len(self.widths) - 1

    @cached_property
    def corners(self) -> list[int]:
        """Numbers of the choices at the corners of the errors' lower convex hull, ascending.

        >>> Choices(np.array([1, 2, 3, 4]), np.array([4.0, 3.9, 1.0, 0.0]), bends=(0, 1, 2, 3)).corners
        [0, 2, 3]
        """
        w, e = self.widths, self.errors
        hull: list[int] = []
        for k in self.bends:
            while len(hull) > 1 and _above(w, e, hull[-2], hull[-1], k):
                hull.pop()
            hull.append(k)
        return hull


def _above(w: NDArray[np.int64], e: NDArray[np.float64], a: int, b: int, c: int) -> bool:
    """Whether point b lies on or above the line from a to c."""
    return bool((e[b] - e[a]) * (w[c] - w[a]) >= (e[c] - e[a]) * (w[b] - w[a]))


def choices(curve: Curve, round_to: int | None = None, least: int = 1) -> Choices:
    """Widths of at least `least`: all of them, or multiples of `round_to` and the full width.

    >>> choices(Curve((1, 20), (1.0, 0.0)), round_to=8).widths.tolist()
    [8, 16, 20]
    """
    widths = np.arange(1, curve.units + 1) if round_to is None else np.arange(round_to, curve.units, round_to)
    widths = np.union1d(widths[widths >= max(least, curve.kept[0])], [curve.units])
    last = len(widths) - 1
    after = np.searchsorted(widths, curve.kept)  # a point of the curve may lie between two choices: both are bends
    before = np.searchsorted(widths, curve.kept, side="right") - 1
    bends = {0, last, *after.clip(0, last).tolist(), *before.clip(0, last).tolist()}
    return Choices(widths, curve.at(widths), tuple(sorted(bends)))


class Problem:
    """Hidden dimensions, their choices, and the count of what is chosen. Counts are remembered: they are dear."""

    def __init__(self, options: Mapping[str, Choices], count: Callable[[Mapping[str, int]], int], limit: int) -> None:
        """`count` gives what a network of these widths costs; `limit` is the most it may cost."""
        self.names = tuple(options)
        self.options = tuple(options.values())
        self.limit = limit
        self._count = count
        self._known: dict[Place, int] = {}

    def widths(self, place: Place) -> dict[str, int]:
        """Name to width.

        >>> curve = Curve((1, 20), (1.0, 0.0))
        >>> Problem({"fc": choices(curve, round_to=8)}, lambda widths: 3 * widths["fc"], limit=50).widths((1,))
        {'fc': 16}
        """
        chosen = zip(self.names, self.options, place, strict=True)
        return {name: int(option.widths[k]) for name, option, k in chosen}

    def count(self, place: Place) -> int:
        """What the network costs with these choices."""
        if place not in self._known:
            self._known[place] = self._count(self.widths(place))
        return self._known[place]

    @property
    def counted(self) -> int:
        """Calls of `count` so far."""
        return len(self._known)

    def error(self, place: Place) -> float:
        """Sum of the predicted errors."""
        return float(sum(option.errors[k] for option, k in zip(self.options, place, strict=True)))

    def slack(self, place: Place) -> int:
        """What is left of the limit."""
        return self.limit - self.count(place)

    def slopes(self, place: Place) -> NDArray[np.float64]:
        """What one unit of each dimension costs while the others stay. (dimensions,)

        >>> curve = Curve((1, 20), (1.0, 0.0))
        >>> p = Problem({"a": choices(curve), "b": choices(curve)}, lambda widths: widths["a"] * widths["b"], limit=50)
        >>> p.slopes((4, 6))   # 5 and 7 units
        array([7., 5.])
        """
        slopes = np.zeros(len(place))
        for d, (option, k) in enumerate(zip(self.options, place, strict=True)):
            if option.last > 0:
                other = k - 1 if k > 0 else k + 1
                change = self.count(place) - self.count(at(place, {d: other}))
                slopes[d] = change / int(option.widths[k] - option.widths[other])
        return slopes


def at(place: Place, changes: Mapping[int, int] | Sequence[tuple[int, int]]) -> Place:
    """The same place with other choices in some dimensions.

    >>> at((3, 4, 5), {1: 0})
    (3, 0, 5)
    """
    new = list(place)
    for d, k in dict(changes).items():
        new[d] = k
    return tuple(new)
