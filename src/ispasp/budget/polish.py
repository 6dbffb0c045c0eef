"""From a place below the limit to a better one."""

from __future__ import annotations

import itertools
import math

from ispasp.budget.exchange import counted, exchange
from ispasp.budget.fill import fill
from ispasp.budget.problem import Place, Problem

_ROUNDS = 100  # exchanges; far more than networks were seen to need
_COUNTS = 5000  # counts spent on coming closer to the limit
_NEAR = 0.01  # how close below the limit the count should come


def polish(problem: Problem, place: Place) -> Place:
    """Fill what is left, exchange as long as that lowers the error, and come within 1 % of the limit if possible.

    >>> from ispasp.budget.curve import Curve
    >>> from ispasp.budget.problem import choices
    >>> steep, flat = choices(Curve((1, 4), (1.0, 0.0))), choices(Curve((1, 4), (0.1, 0.0)))
    >>> p = Problem({"a": steep, "b": flat}, lambda widths: widths["a"] + widths["b"], limit=6)
    >>> p.widths(polish(p, (0, 3)))
    {'a': 4, 'b': 2}
    """
    place = fill(problem, place)
    for _ in range(_ROUNDS):
        better = exchange(problem, place)
        if better is None:
            break
        place = fill(problem, better)
    if _is_near(problem, place):
        return place
    closer = _close_in(problem, place)
    return closer if _is_near(problem, closer) else place  # no error is paid for a count that misses as well


def _is_near(problem: Problem, place: Place) -> bool:
    return problem.slack(place) <= _NEAR * problem.limit


def _close_in(problem: Problem, place: Place) -> Place:
    """Come within 1 % of the limit where steps are coarse, with the least error.

    All places are tried if they are few, else all pairs again and again. Only small networks come to this: where steps
    are fine, filling has come close already.
    """
    end = problem.counted + _COUNTS
    sizes = [len(option.widths) for option in problem.options]

    def key(candidate: Place) -> tuple[float, float]:
        return max(problem.slack(candidate), _NEAR * problem.limit), problem.error(candidate)

    if math.prod(sizes) <= _COUNTS:
        everything = itertools.product(*map(range, sizes))
        return min((candidate for candidate in everything if problem.slack(candidate) >= 0), key=key)
    while problem.counted < end:
        pairs = itertools.takewhile(lambda _: problem.counted < end, counted(problem, place))
        best = min(pairs, key=key, default=place)
        if key(best) >= key(place):
            break
        place = fill(problem, best)
    return place
