"""How much stays, and by which method: from what users type to what `ispasp.prune` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from ispasp.api.recipes import recipes
from ispasp.budget import Macs, Params
from ispasp.cli.sources import with_options
from ispasp.errors import InputError
from ispasp.select import Selector, selector

_DEFAULT = 0.5
_STATISTICS = {"moment", "magnitude", "gram", "producers"}  # what calibration takes without a loss


def amount(keep: Sequence[str], macs: str, params: str, recipe: str) -> Any:
    """What `keep=` of `ispasp.prune` is to be: a number, globs, a budget or a recipe.

    >>> amount(["0.3"], "", "", ""), amount(["layer1.*=0.5", "*=64"], "", "", ""), amount([], "0.5", "", "")
    (0.3, {'layer1.*': 0.5, '*': 64}, Macs(amount=0.5))
    """
    given = {"--keep": bool(keep), "--macs": bool(macs), "--params": bool(params), "--recipe": bool(recipe)}
    named = [name for name, there in given.items() if there]
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} together: pass one of --keep, --macs, --params and --recipe")
    if macs:
        return Macs(number("--macs", macs))
    if params:
        return Params(number("--params", params))
    if recipe:
        if recipe not in recipes:
            raise InputError(f"no recipe {recipe!r}: choose from {', '.join(recipes)}")
        return recipes[recipe]
    return _keep(keep) if keep else _DEFAULT


def number(option: str, text: str) -> float | int:
    """A fraction with a point, or a count without one.

    >>> number("--macs", "0.5"), number("--macs", "64"), number("--macs", "2.69e9")
    (0.5, 64, 2690000000)
    """
    try:
        value = float(text)
    except ValueError as error:
        raise InputError(f"{option} {text}: pass a fraction such as 0.5, or a whole number") from error
    counts = text.strip().isdecimal() or (value > 1 and value.is_integer())
    return int(value) if counts else value


def method_of(text: str) -> str | Selector:
    """A method's name, or a selector with options.

    >>> method_of("l1"), method_of("ispasp:iterations=40")
    ('l1', ISpaSP(iterations=40, rank='value'))
    """
    name, options = with_options(text)
    plain: Any = selector(name)
    if not options:
        return name
    try:
        changed: Selector = replace(plain, **options)
    except TypeError as error:
        known = ", ".join(field.name for field in fields(plain)) or "none"
        raise InputError(f"--method {text}: the options of {name} are: {known}") from error
    return changed


def looks_at_the_task(method: str | Selector) -> bool:
    """Whether a method wants a loss, and so labels.

    >>> looks_at_the_task("taylor"), looks_at_the_task("ispasp")
    (True, False)
    """
    return not set(selector(method).needs) <= _STATISTICS


def _keep(given: Sequence[str]) -> Any:
    rules: dict[str, float | int] = {}
    for text in given:
        pattern, equals, value = text.rpartition("=")
        rules[pattern if equals else "*"] = number("--keep", value)
    return rules["*"] if set(rules) == {"*"} else rules
