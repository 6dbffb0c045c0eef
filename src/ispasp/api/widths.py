"""From `keep` to the number of units that stay in each hidden dimension."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ispasp.api.recipes import Recipe
from ispasp.api.survey import Survey
from ispasp.errors import InputError
from ispasp.types.checks import is_integer
from ispasp.types.dimension import HiddenDimension
from ispasp.types.keep import units_to_keep

Keep = float | int | Collection[int]


@dataclass(frozen=True)
class Widths:
    """How many units stay in each hidden dimension, and which ones where the user has said so."""

    counts: Mapping[str, int]
    given: Mapping[str, tuple[int, ...]]


def prunable(survey: Survey, skip: Collection[str]) -> list[HiddenDimension]:
    """The hidden dimensions that no glob in `skip` names; a glob that names none is an error."""
    if isinstance(skip, str) or not isinstance(skip, Collection):
        example = skip if isinstance(skip, str) else "layer1.*"
        raise InputError(f"skip={skip!r}: pass a list of names or globs, such as [{example!r}]")
    names = [d.name for d in survey.dimensions]
    for pattern in skip:
        if not any(_fits(name, pattern) for name in names):
            raise InputError(_no_fit(survey, pattern))
    return [d for d in survey.dimensions if not any(_fits(d.name, pattern) for pattern in skip)]


def widths(survey: Survey, keep: Any, skip: Collection[str] = (), round_to: int | None = None) -> Widths:
    """Resolve `keep`: one value for all, a mapping of globs (the first that fits counts), or a recipe.

    Dimensions that lose nothing are left out.

    >>> import torch, ispasp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> widths(ispasp.survey(net, torch.ones(1, 4)), 0.4, round_to=4).counts
    {'0': 4}
    """
    check_round(round_to)
    if isinstance(keep, Recipe):
        keep = keep.keep
    rules: Mapping[str, Keep] = keep if isinstance(keep, Mapping) else {"*": keep}
    chosen = prunable(survey, skip)
    for pattern in rules:
        if not any(_fits(d.name, pattern) for d in survey.dimensions):
            raise InputError(_no_fit(survey, pattern))
    counts: dict[str, int] = {}
    given: dict[str, tuple[int, ...]] = {}
    for dimension in chosen:
        fitting = [p for p in rules if _fits(dimension.name, p)]
        if not fitting:
            continue
        wanted = rules[fitting[0]]
        wanted = wanted.tolist() if hasattr(wanted, "tolist") else wanted  # numpy's and torch's arrays of units
        if isinstance(wanted, Collection) and not isinstance(wanted, str):
            given[dimension.name] = units = _checked_units(wanted, dimension)
            count = len(units)
        else:
            count = units_to_keep(wanted, dimension.units, f"hidden dimension {dimension.name!r}")
            count = rounded(count, dimension.units, round_to)
        if count < dimension.units:
            counts[dimension.name] = count
    return Widths(counts, given)


def _checked_units(wanted: Collection[int], dimension: HiddenDimension) -> tuple[int, ...]:
    units = tuple(sorted(int(unit) for unit in wanted if is_integer(unit)))
    if not units or len(set(units)) < len(wanted) or units[0] < 0 or units[-1] >= dimension.units:
        raise InputError(
            f"hidden dimension {dimension.name!r} has units 0..{dimension.units - 1}; keep={list(wanted)[:8]} does not "
            "name different ones of them: pass at least one unit, each once"
        )
    return units


def rounded(count: int, units: int, step: int | None) -> int:
    """The nearest multiple of `step` that is not zero, or all units.

    >>> rounded(13, 64, 8), rounded(3, 64, 8), rounded(61, 63, 8), rounded(3, 5, None)
    (16, 8, 63, 3)
    """
    if step is None:
        return count
    return min(max(step, int(count / step + 0.5) * step), units)


def check_round(round_to: int | None) -> None:
    """Refuse what is not a whole number of units."""
    if round_to is not None and (not is_integer(round_to) or round_to < 1):
        raise InputError(f"round_to={round_to!r}: pass a whole number such as 8, or None")


def _fits(name: str, pattern: str) -> bool:
    if not isinstance(pattern, str):
        raise InputError(f"{pattern!r} is no name of a hidden dimension: pass a name or glob, such as {str(pattern)!r}")
    return name == pattern or fnmatchcase(name, pattern)


def _no_fit(survey: Survey, pattern: str) -> str:
    known = ", ".join(d.name for d in survey.dimensions[:5])
    return f"no hidden dimension fits {pattern!r}: the model has {known}, ...; print(ispasp.survey(model, batch))"
