"""`keep`, resolved to a number of units for each hidden dimension, and the paper's recipes."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, SupportsFloat, TypeAlias

from torch import nn

from ispasp.budget import Budget
from ispasp.budget.curve import Curves
from ispasp.budget.latency import LatencyModel
from ispasp.errors import InputError
from ispasp.types.dimension import HiddenDimension, is_integer, units_to_keep
from ispasp.types.plan import Plan


@dataclass(frozen=True)
class Recipe:
    """One of the paper's networks: hidden dimension -> kept fraction. All others stay whole.

    `paper_macs` is the count in its Table 1, `kernel` the kernel size of the named convolutions. The text of the paper
    is ambiguous: docs/results/recipes.md says how it was read.

    >>> recipes["resnet34-2.69G"].keep["layer2.1.conv1"]
    0.4
    """

    name: str
    model: str
    keep: Mapping[str, float]
    paper_macs: int
    kernel: tuple[int, int]

    def check(self, model: nn.Module) -> None:
        """Raise if the model is not the one the recipe is for."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in self.keep:
            layer = modules.get(name)
            if not isinstance(layer, nn.Conv2d) or layer.kernel_size != self.kernel:
                wrong = f"this {type(model).__name__} has no {'x'.join(map(str, self.kernel))} convolution {name!r}"
                remedy = "pass that model, or a fraction such as keep=0.5"
                raise InputError(f"the recipe {self.name!r} is for {self.model}: {wrong}; {remedy}")


_SENSITIVE, _ROBUST = "3 5 8 15 16", "6 9 10 12 13"  # blocks of MobileNetV2
_BLOCKS = {  # numbers of blocks, and the fraction that stays of their first convolution
    "resnet34-2.69G": {"1.1 2.1 2.2 3.1 3.2 3.3 3.4": 0.4},
    "resnet34-2.13G": {"1.0 1.1": 0.2, "2.1 2.2 3.1 3.2 3.3 3.4": 0.3},
    "mobilenet_v2-260M": {_ROBUST: 0.4},
    "mobilenet_v2-242M": {_SENSITIVE: 0.8, _ROBUST: 0.4},
    "mobilenet_v2-220M": {_SENSITIVE: 0.7, _ROBUST: 0.3, "2 11 17": 0.9},
}


def _recipe(name: str, blocks: Mapping[str, float]) -> Recipe:
    model, _, size = name.rpartition("-")
    layer, kernel = ("layer{}.conv1", (3, 3)) if model == "resnet34" else ("features.{}.conv.0.0", (1, 1))
    keep = {layer.format(block): fraction for group, fraction in blocks.items() for block in group.split()}
    macs = round(float(size[:-1]) * (10**9 if size.endswith("G") else 10**6))
    return Recipe(name, f"torchvision:{model}", MappingProxyType(keep), macs, kernel)


recipes: Mapping[str, Recipe] = MappingProxyType({n: _recipe(n, blocks) for n, blocks in _BLOCKS.items()})
"""Name -> recipe: `ispasp.prune(model, batches, keep=ispasp.recipes["resnet34-2.69G"])`."""

Amount: TypeAlias = float | SupportsFloat | Collection[int]  # a fraction, a number (numpy's too), or the units
Keep: TypeAlias = float | SupportsFloat | Mapping[str, Amount] | Budget | Recipe | Plan


@dataclass(frozen=True)
class Inside:
    """All hidden dimensions made by the module at this path or inside it."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Widths:
    """Number of kept units of each pruned hidden dimension, and the units that the user named."""

    counts: Mapping[str, int]
    given: Mapping[str, tuple[int, ...]]
    found: Curves = field(default_factory=Curves)  # curves of errors, if measured
    latency: LatencyModel | None = None  # of a `Latency` budget


def check_keep(keep: Any) -> None:
    """Check `keep` as far as possible without a model."""
    if isinstance(keep, str) and keep in recipes:
        raise InputError(f"keep={keep!r} is the name of a recipe: pass keep=ispasp.recipes[{keep!r}]")
    if is_integer(number := _plain(keep)) and number == 1:
        remedy = "pass keep=1.0 to keep all units, or keep={'*': 1} to keep one"
        raise InputError(f"keep=1 would leave one unit in every hidden dimension: {remedy}")
    for pattern, wanted in _rules(keep).items():
        _check_pattern(pattern)
        amount = _plain(wanted)
        if not _are_units(amount) and (pattern == "*" or not _removes_all(amount)):
            units_to_keep(amount, sys.maxsize, "every hidden dimension")


def widths(
    dimensions: Sequence[HiddenDimension], keep: Any, skip: Collection[str | Inside] = (), round_to: int | None = None
) -> Widths:
    """Resolve `keep`: one value for all, a mapping of globs (the first match counts), a recipe, or a plan."""
    check_keep(keep)
    if isinstance(keep, Budget):
        raise InputError(f"{keep} needs calibration: pass it to ispasp.prune, and use the plan of its result")
    if isinstance(keep, Plan):
        _check_plan(keep, dimensions)
    for pattern in _rules(keep):
        _check_fits(dimensions, pattern)
    counts: dict[str, int] = {}
    given: dict[str, tuple[int, ...]] = {}
    for d in prunable(dimensions, skip):
        wanted = _amount(keep, d.name)
        if wanted is None:
            continue
        if _removes_all(wanted) or (isinstance(keep, Plan) and not wanted):
            count, given[d.name] = 0, ()
        elif _are_units(wanted):
            given[d.name] = _checked_units(wanted, d)
            count = len(given[d.name])
        else:
            count = rounded(units_to_keep(wanted, d.units, f"hidden dimension {d.name!r}"), d.units, round_to)
        if count < d.units:
            counts[d.name] = count
    return Widths(counts, given)


def prunable(dimensions: Sequence[HiddenDimension], skip: Collection[str | Inside]) -> list[HiddenDimension]:
    """The hidden dimensions that no entry of `skip` matches; an entry that matches none is an error."""
    for pattern in skip:
        _check_fits(dimensions, pattern)
    return [d for d in dimensions if not any(_fits(d, pattern) for pattern in skip)]


def names_units(keep: Any, name: str) -> bool:
    """Whether `keep` says which units of a hidden dimension stay, rather than how many."""
    return _are_units(_amount(keep, name))


def rounded(count: int, units: int, step: int | None) -> int:
    """The nearest multiple of `step` that is not zero, or all units.

    >>> rounded(13, 64, 8), rounded(3, 64, 8), rounded(61, 63, 8), rounded(3, 5, None)
    (16, 8, 63, 3)
    """
    return count if step is None else min(max(step, int(count / step + 0.5) * step), units)


def _rules(keep: Any) -> Mapping[str, Any]:
    if isinstance(keep, Budget):
        return {}
    if isinstance(keep, (Recipe, Plan)):
        return keep.keep if isinstance(keep, Recipe) else keep.kept
    return keep if isinstance(keep, Mapping) else {"*": keep}


def _amount(keep: Any, name: str) -> Any:
    """The value of the first pattern that fits a name; None if none fits."""
    return next((_plain(wanted) for pattern, wanted in _rules(keep).items() if _matches(name, pattern)), None)


def _plain(wanted: Any) -> Any:
    """Convert numbers and arrays of NumPy and torch to Python."""
    return wanted.tolist() if hasattr(wanted, "tolist") else wanted


def _removes_all(wanted: Any) -> bool:
    """Whether the whole hidden dimension is removed."""
    return is_integer(wanted) and wanted == 0


def _are_units(wanted: Any) -> bool:
    return isinstance(wanted, Collection) and not isinstance(wanted, (str, bytes, Mapping))


def _checked_units(wanted: Collection[int], dimension: HiddenDimension) -> tuple[int, ...]:
    units = tuple(sorted(int(unit) for unit in wanted if is_integer(unit)))
    if not units or len(set(units)) < len(wanted) or units[0] < 0 or units[-1] >= dimension.units:
        wrong = f"keep={list(wanted)[:8]} does not name different ones of them"
        known = f"hidden dimension {dimension.name!r} has units 0..{dimension.units - 1}"
        raise InputError(f"{known}; {wrong}: pass at least one unit, each once")
    return units


def _check_plan(plan: Plan, dimensions: Sequence[HiddenDimension]) -> None:
    """Check that the model has as many units as the plan was made for."""
    for d in dimensions:
        planned = plan.structure.units.get(d.name, d.units)
        if planned != d.units:
            wrong = f"the plan is of a model with {planned} units in {d.name!r}, this one has {d.units}"
            raise InputError(f"{wrong}: pass the model that the plan was made for")


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _fits(dimension: HiddenDimension, pattern: str | Inside) -> bool:
    if isinstance(pattern, Inside):
        return any(f"{path}.".startswith(f"{pattern.path}.") for path in (dimension.name, *dimension.producers))
    return _matches(dimension.name, pattern)


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, (str, Inside)):
        remedy = f"pass a name or glob, such as {str(pattern)!r}"
        raise InputError(f"{pattern!r} is not the name of a hidden dimension: {remedy}")


def _check_fits(dimensions: Sequence[HiddenDimension], pattern: str | Inside) -> None:
    _check_pattern(pattern)
    if not any(_fits(dimension, pattern) for dimension in dimensions):
        known = ", ".join(d.name for d in dimensions[:5])
        remedy = "print(ispasp.survey(model, batch)) shows all"
        raise InputError(f"no hidden dimension fits {str(pattern)!r}: the model has {known}, ...; {remedy}")
