"""From `keep` to the number of units that stay in each hidden dimension. Whoever takes a `keep` resolves it here."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, SupportsFloat, TypeAlias

from ispasp.api.recipes import Recipe, recipes
from ispasp.budget import Budget
from ispasp.errors import InputError
from ispasp.types.checks import is_integer
from ispasp.types.dimension import HiddenDimension
from ispasp.types.keep import units_to_keep
from ispasp.types.plan import Plan

Amount: TypeAlias = float | SupportsFloat | Collection[int]  # a fraction, a number (numpy's too), or the units
Keep: TypeAlias = float | SupportsFloat | Mapping[str, Amount] | Budget | Recipe | Plan


@dataclass(frozen=True)
class Inside:
    """All hidden dimensions that the module at this path, or one inside it, makes."""

    path: str

    def __str__(self) -> str:
        """The path."""
        return self.path


@dataclass(frozen=True)
class Widths:
    """How many units stay in each hidden dimension, and which ones where the user has said so."""

    counts: Mapping[str, int]
    given: Mapping[str, tuple[int, ...]]


def check_keep(keep: Any) -> None:
    """Refuse what no model can be pruned by, before a model is looked at.

    >>> check_keep(1)
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: keep=1 would leave one unit in every hidden dimension: pass keep=1.0 to keep all units, or
    keep={'*': 1} to keep one
    """
    if isinstance(keep, Budget):
        return
    if isinstance(keep, str) and keep in recipes:
        raise InputError(f"keep={keep!r} is the name of a recipe: pass keep=ispasp.recipes[{keep!r}]")
    plain = _plain(keep)
    if is_integer(plain) and plain == 1:
        raise InputError(
            "keep=1 would leave one unit in every hidden dimension: pass keep=1.0 to keep all units, or keep={'*': 1} "
            "to keep one"
        )
    for pattern, wanted in _rules(keep).items():
        _check_pattern(pattern)
        if not _names_units(amount := _plain(wanted)):
            units_to_keep(amount, sys.maxsize, "every hidden dimension")


def widths(
    dimensions: Sequence[HiddenDimension],
    keep: Any,
    skip: Collection[str | Inside] = (),
    round_to: int | None = None,
) -> Widths:
    """Resolve `keep`: one value for all, a mapping of globs (the first that fits counts), a recipe, or a plan.

    Dimensions that lose nothing are left out.

    >>> import torch, ispasp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> widths(ispasp.survey(net, torch.ones(1, 4)).dimensions, 0.4, round_to=4).counts
    {'0': 4}
    """
    check_keep(keep)
    check_round(round_to)
    if isinstance(keep, Budget):
        raise InputError(f"{keep} takes calibration: pass it to ispasp.prune, and take the plan of its result")
    _check_plan(keep, dimensions)
    rules = _rules(keep)
    for pattern in rules:
        _check_fits(dimensions, pattern)
    counts: dict[str, int] = {}
    given: dict[str, tuple[int, ...]] = {}
    for dimension in prunable(dimensions, skip):
        first = _first(rules, dimension.name)
        if first is None:
            continue
        wanted = _plain(rules[first])
        if _names_units(wanted):
            given[dimension.name] = units = _checked_units(wanted, dimension)
            count = len(units)
        else:
            count = units_to_keep(wanted, dimension.units, f"hidden dimension {dimension.name!r}")
            count = rounded(count, dimension.units, round_to)
        if count < dimension.units:
            counts[dimension.name] = count
    return Widths(counts, given)


def prunable(dimensions: Sequence[HiddenDimension], skip: Collection[str | Inside]) -> list[HiddenDimension]:
    """The hidden dimensions that nothing in `skip` names; what names none is an error."""
    for pattern in skip:
        _check_fits(dimensions, pattern)
    return [d for d in dimensions if not any(_fits(d, pattern) for pattern in skip)]


def names_units(keep: Any, name: str) -> bool:
    """Whether `keep` says which units of a hidden dimension stay, rather than how many."""
    rules = {} if isinstance(keep, Budget) else _rules(keep)
    pattern = _first(rules, name)
    return pattern is not None and _names_units(_plain(rules[pattern]))


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


def _rules(keep: Any) -> Mapping[str, Any]:
    if isinstance(keep, (Recipe, Plan)):
        return keep.keep if isinstance(keep, Recipe) else keep.kept
    return keep if isinstance(keep, Mapping) else {"*": keep}


def _plain(wanted: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python has them."""
    return wanted.tolist() if hasattr(wanted, "tolist") else wanted


def _names_units(wanted: Any) -> bool:
    return isinstance(wanted, Collection) and not isinstance(wanted, (str, bytes, Mapping))


def _checked_units(wanted: Collection[int], dimension: HiddenDimension) -> tuple[int, ...]:
    units = tuple(sorted(int(unit) for unit in wanted if is_integer(unit)))
    if not units or len(set(units)) < len(wanted) or units[0] < 0 or units[-1] >= dimension.units:
        raise InputError(
            f"hidden dimension {dimension.name!r} has units 0..{dimension.units - 1}; keep={list(wanted)[:8]} does not "
            "name different ones of them: pass at least one unit, each once"
        )
    return units


def _check_plan(keep: Any, dimensions: Sequence[HiddenDimension]) -> None:
    """A plan names units by their number, so it must be of a model with as many."""
    units = keep.structure.units if isinstance(keep, Plan) else {}
    for dimension in dimensions:
        planned = units.get(dimension.name, dimension.units)
        if planned != dimension.units:
            raise InputError(
                f"the plan is of a model with {planned} units in {dimension.name!r}, this one has {dimension.units}: "
                "pass the model that the plan was made for"
            )


def _first(rules: Mapping[str, Any], name: str) -> str | None:
    return next((pattern for pattern in rules if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _fits(dimension: HiddenDimension, pattern: str | Inside) -> bool:
    if isinstance(pattern, Inside):
        return any(f"{path}.".startswith(f"{pattern.path}.") for path in (dimension.name, *dimension.producers))
    _check_pattern(pattern)
    return _matches(dimension.name, pattern)


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, str):
        raise InputError(f"{pattern!r} is no name of a hidden dimension: pass a name or glob, such as {str(pattern)!r}")


def _check_fits(dimensions: Sequence[HiddenDimension], pattern: str | Inside) -> None:
    if any(_fits(dimension, pattern) for dimension in dimensions):
        return
    known = ", ".join(d.name for d in dimensions[:5])
    raise InputError(
        f"no hidden dimension fits {str(pattern)!r}: the model has {known}, ...; print(ispasp.survey(model, batch))"
    )
