"""Use up what is left of the limit."""

from __future__ import annotations

from bisect import bisect_right

from ispasp.budget.descend import largest
from ispasp.budget.problem import Place, Problem, at


def fill(problem: Problem, place: Place) -> Place:
    """Widen, where it lowers the error most for its count, until not one more step fits.

    >>> from ispasp.budget.curve import Curve
    >>> from ispasp.budget.problem import choices
    >>> p = Problem({"fc": choices(Curve((1, 9), (1.0, 0.0)))}, lambda widths: 10 * widths["fc"], limit=75)
    >>> p.widths(fill(p, (0,)))
    {'fc': 7}
    """
    candidates = list(range(len(place)))
    while True:
        now = place
        costs = {
            d: problem.count(at(now, {d: now[d] + 1})) - problem.count(now)
            for d in candidates
            if now[d] < problem.options[d].last
        }
        candidates = [d for d, cost in costs.items() if cost <= problem.slack(now)]  # later it will not fit either
        if not candidates:
            return place
        rates = {d: (_fall(problem, now, d) / max(costs[d], 1), costs[d]) for d in candidates}
        d = max(candidates, key=rates.__getitem__)
        place = at(now, {d: _furthest(problem, now, d)})


def _fall(problem: Problem, place: Place, d: int) -> float:
    errors = problem.options[d].errors
    return float(errors[place[d]] - errors[place[d] + 1])


def _furthest(problem: Problem, place: Place, d: int) -> int:
    """The next corner of the curve, or as far towards it as fits; one step does."""
    corners = problem.options[d].corners
    corner = corners[bisect_right(corners, place[d])]
    there = at(place, {d: corner})
    return corner if problem.slack(there) >= 0 else largest(problem, there, d, place[d] + 1)
