"""Widths for every hidden dimension, so that the whole network meets a limit with the least error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ispasp.budget.curve import Curve
from ispasp.budget.descend import descend
from ispasp.budget.polish import polish
from ispasp.budget.problem import Problem, choices
from ispasp.errors import InputError
from ispasp.types.checks import is_integer


def allocate(
    curves: Mapping[str, Curve],
    count: Callable[[Mapping[str, int]], int],
    limit: int,
    *,
    round_to: int | None = None,
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Widths with count(widths) <= limit and the least sum of predicted errors, found by search.

    `curves`: name of a hidden dimension -> its error at every width. `count`: parameters or MACs of the network with
    given widths, one for every name; it may be any function that does not fall when a width rises, such as a sum of
    products of widths. The count comes within 1 % of the limit wherever the search finds such widths. With `round_to`
    widths are its multiples or all units; `least` gives the fewest units of some dimensions. None becomes narrower than
    the first point of its curve.

    >>> curves = {"a": Curve((1, 8), (1.0, 0.0)), "b": Curve((1, 4, 8), (1.0, 0.1, 0.0))}
    >>> allocate(curves, lambda widths: 10 * widths["a"] + 10 * widths["b"], limit=125)
    {'a': 8, 'b': 4}
    """
    _check(curves, limit, round_to, least or {})
    options = {name: choices(curve, round_to, (least or {}).get(name, 1)) for name, curve in curves.items()}
    problem = Problem(options, count, int(limit))
    smallest = (0,) * len(options)
    if problem.slack(smallest) < 0:
        raise InputError(
            f"a limit of {limit:,} cannot be met: with every hidden dimension as narrow as allowed the network still "
            f"counts {problem.count(smallest):,}; raise the limit to that, or prune more dimensions"
        )
    place = descend(problem)
    dense = all(k == option.last for k, option in zip(place, problem.options, strict=True))
    return problem.widths(place if dense else polish(problem, place))


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
        if not is_integer(width) or not 1 <= width <= curves[name].units:
            units = curves[name].units
            raise InputError(f"least[{name!r}]={width!r}: the hidden dimension has {units} units, pass 1 to {units}")
