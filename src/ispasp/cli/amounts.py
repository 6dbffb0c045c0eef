"""How much stays, and by which method: from what users type to what `ispasp.prune` takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from ispasp.api.recipes import recipes
from ispasp.budget import Macs, Params
from ispasp.cli.sources import with_options
from ispasp.errors import InputError
from ispasp.select import Selector, selector

_DEFAULT = 0.5
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


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


def bytes_of(option: str, text: str) -> int:
    """A number of bytes: K, M, G, T are powers of 1,000, Ki, Mi, Gi, Ti of 1,024.

    >>> bytes_of("--memory", "2G"), bytes_of("--memory", "1.5 GiB"), bytes_of("--memory", "500MB")
    (2000000000, 1610612736, 500000000)
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([kmgt]?)(i?)b?", text.strip().lower())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ") if found else 0
    if size < 1:
        raise InputError(f"{option} {text}: pass a number of bytes such as 500M or 2G")
    return int(size)


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
    ('l1', ISpaSP(iterations=40, rank='value', minibatches=False))
    >>> method_of("ispasp:minibatches=yes").minibatches
    True
    """
    name, options = with_options(text)
    plain: Any = selector(name)
    if not options:
        return name
    kinds = get_type_hints(type(plain))
    known = [field.name for field in fields(plain)]
    for key in options:
        if key not in known:
            raise InputError(f"--method {text}: {name} has no option {key!r}: it has {', '.join(known) or 'none'}")
    changed: Selector = replace(plain, **{key: _typed(text, key, v, kinds[key]) for key, v in options.items()})
    return changed


def _typed(text: str, key: str, value: Any, kind: Any) -> Any:
    """Truth in all its spellings; what else is wrong, the selector itself says best."""
    if kind is not bool:
        return value
    spelt = str(value).lower()
    if spelt not in _TRUTH:
        raise InputError(f"--method {text}: {key} is {value!r}: pass {key}=true or {key}=false")
    return _TRUTH[spelt]


def looks_at_the_task(method: str | Selector) -> bool:
    """Whether a method wants a loss, and so labels.

    >>> looks_at_the_task("taylor"), looks_at_the_task("ispasp")
    (True, False)
    """
    return bool({"sensitivity", "task"} & set(selector(method).needs))


def _keep(given: Sequence[str]) -> Any:
    rules: dict[str, float | int] = {}
    for text in given:
        pattern, equals, value = text.rpartition("=")
        if equals and not (pattern and value):
            raise InputError(f"--keep {text}: pass GLOB=0.5, such as 'layer1.*=0.5'")
        rules[pattern if equals else "*"] = number("--keep", value)
    return rules["*"] if list(rules) == ["*"] and "=" not in given[0] else rules
