"""From the dense network down to the limit, always where a saved count costs the least error."""

from __future__ import annotations

import heapq

from ispasp.budget.problem import Place, Problem, at


def descend(problem: Problem) -> Place:
    """Shrink along the convex hulls of the curves, cheapest segment first, until the limit is met.

    A segment's rate is the error it adds per count it saves. As others shrink a dimension saves less, so rates only
    rise: an old one is a lower bound, and only the one at the top is counted anew.

    >>> from ispasp.budget.curve import Curve
    >>> from ispasp.budget.problem import choices
    >>> steep, flat = choices(Curve((1, 4), (1.0, 0.0))), choices(Curve((1, 4), (0.1, 0.0)))
    >>> p = Problem({"a": steep, "b": flat}, lambda widths: widths["a"] + widths["b"], limit=6)
    >>> p.widths(descend(p))
    {'a': 4, 'b': 2}
    """
    place: Place = tuple(option.last for option in problem.options)
    rates = [(0.0, d) for d, option in enumerate(problem.options) if option.last > 0]
    remaining = {d: problem.options[d].corners[:-1] for _, d in rates}
    while problem.slack(place) < 0 and rates:
        _, d = heapq.heappop(rates)
        target = remaining[d][-1]
        errors = problem.options[d].errors
        saved = problem.count(place) - problem.count(at(place, {d: target}))
        if saved <= 0:  # nothing counted depends on it, nor will when others are smaller
            continue
        rate = float(errors[target] - errors[place[d]]) / saved
        if rates and rate > rates[0][0]:
            heapq.heappush(rates, (rate, d))
            continue
        remaining[d].pop()
        if remaining[d]:
            heapq.heappush(rates, (rate, d))
        place = at(place, {d: largest(problem, place, d, target)})
    return place


def largest(problem: Problem, place: Place, d: int, target: int) -> int:
    """The widest choice from `target` up to the present one that meets the limit, or `target` if none does."""
    low, high = target, place[d]
    while high - low > 1:
        middle = (low + high) // 2
        if problem.slack(at(place, {d: middle})) >= 0:
            low = middle
        else:
            high = middle
    return low
