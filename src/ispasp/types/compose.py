"""Two cuts of an axis as one: which positions of the dense axis are left after a first and a second plan.

The first extent describes the dense axis, the second what the first plan leaves of it. Both are walked side by side.
Factors that meet are one hidden dimension of the composed plan. Where they do not meet, because the second survey saw a
finer or a coarser dimension, the positions of the group are the units.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ispasp.errors import PlanError
from ispasp.types.layout import Extent, Factor, Kept, full_length, kept_length, kept_mask, names_in, without

Segment = tuple[Factor, ...]
Pair = tuple[Extent, Extent]  # a part of the dense axis, and what the second plan sees in its place
T = TypeVar("T")


@dataclass
class Composition:
    """Collects the hidden dimensions of a composed plan while the axes of its tensors are composed."""

    first: Kept
    second: Kept
    _met: dict[Pair, None] = field(default_factory=dict)  # in the order of the tensors

    def pairs(self, what: str, dense: Extent, pruned: Extent) -> list[list[Pair]]:
        """The composed extent of one axis: segments of pairs."""
        left, found = kept_length(dense, self.first), full_length(pruned)
        if left != found:
            raise PlanError(
                f"the plans do not follow each other: the first leaves {left} of {what}, the second was made for "
                f"{found}: compose plans of one model that was not changed in between"
            )
        ones = without(dense, names_in(dense) - set(self.first))
        twos = without(pruned, names_in(pruned) - set(self.second))
        segments = []
        for a, b in _groups(ones, twos, (self._left, _full), operator.add, 0, _divided_segment):
            segments.append(self._product(a[0], b[0]) if len(a) == len(b) == 1 else [_pair(tuple(a), tuple(b))])
        self._met |= dict.fromkeys(pair for pairs in segments for pair in pairs if _named(pair))
        return segments

    def _product(self, dense: Segment, pruned: Segment) -> list[Pair]:
        sizes = (lambda factor: self._left((factor,)), lambda factor: _full((factor,)))
        groups = _groups(dense, pruned, sizes, operator.mul, 1, _divided_factor)
        return [_pair((tuple(a),), (tuple(b),)) for a, b in groups]

    def _left(self, segment: Segment) -> int:
        return kept_length((segment,), self.first)

    def names(self) -> dict[Pair, str]:
        """A name for each pair: the dense one; where it is taken, with a number. The plainest pairs come first."""
        given: dict[str, Pair] = {}
        for pair in sorted(self._met, key=_strangeness):
            name = wish = min(names_in(pair[0]) or names_in(pair[1]))
            number = 1
            while name in given:
                number += 1
                name = f"{wish}~{number}"
            given[name] = pair
        return {pair: name for name, pair in given.items()}

    def kept(self, pair: Pair) -> tuple[int, ...]:
        """Positions of the dense part that both plans keep.

        >>> fc, rest = ((("fc", 4),),), ((("fc", 3),),)
        >>> Composition({"fc": [0, 2, 3]}, {"fc": [1, 2]}).kept((fc, rest))
        (2, 3)
        """
        dense, pruned = pair
        positions = torch.nonzero(kept_mask(dense, self.first)).flatten()
        return tuple(positions[kept_mask(pruned, self.second)].tolist())


def _pair(dense: Extent, pruned: Extent) -> Pair:
    """Parts without names in one way only."""
    return _plain(dense), _plain(pruned)


def _plain(extent: Extent) -> Extent:
    return extent if names_in(extent) else (((None, full_length(extent)),),)


def _strangeness(pair: Pair) -> tuple[int, bool]:
    """Pairs of single factors before groups, pairs of one name before others."""
    return sum(len(segment) for part in pair for segment in part), names_in(pair[0]) != names_in(pair[1])


def _named(pair: Pair) -> bool:
    return any(names_in(part) for part in pair)


def _full(segment: Segment) -> int:
    return full_length((segment,))


def _groups(
    ones: Sequence[T],
    twos: Sequence[T],
    sizes: tuple[Callable[[T], int], Callable[[T], int]],
    combine: Callable[[int, int], int],
    start: int,
    divided: Callable[[T, int, int, int], list[T]],
) -> Iterator[tuple[list[T], list[T]]]:
    """Walk two sequences of the same total, and yield the shortest groups that end at the same place.

    An item that reaches beyond the place where the other side stands is divided there, if that can be done.
    """
    left, at = (list(ones), list(twos)), [start, start]
    group: tuple[list[T], list[T]] = ([], [])
    while left[0] or left[1]:
        sides = [(at[k], sizes[k](left[k][0]), k) for k in (0, 1) if left[k]]
        _, size, side = min(sides)  # the one that is behind; the smaller one where both stand at the same place
        item, *more = divided(left[side].pop(0), size, at[side], at[1 - side])
        left[side][:0] = more
        group[side].append(item)
        at[side] = combine(at[side], sizes[side](item))
        if at[0] == at[1]:
            yield group
            group = ([], [])


def _divided_segment(segment: Segment, size: int, at: int, goal: int) -> list[Segment]:
    (name, times), *rest = segment if names_in((segment,)) else ((None, size),)
    if name is not None:
        return [segment]
    part, over = divmod(goal - at, size // times)
    if over or not 0 < part < times:
        return [segment]
    return [((None, part), *rest), ((None, times - part), *rest)]


def _divided_factor(factor: Factor, size: int, at: int, goal: int) -> list[Factor]:
    times, over = divmod(goal, at)
    if factor[0] is not None or over or not 1 < times < size or size % times:
        return [factor]
    return [(None, times), (None, size // times)]
