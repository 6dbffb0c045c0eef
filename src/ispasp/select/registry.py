"""Methods by name. `@register` above a selector's class is all it takes to add one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TypeVar

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.function import ByScore, Score
from ispasp.types.statistic import STATISTICS

K = TypeVar("K", bound=type[Selector])
METHODS: dict[str, type[Selector]] = {}


def register(kind: K) -> K:
    """Make a selector known by its `name`: a class decorator.

    `method="name"` then stands for the class with its default options, in `ispasp.prune` and on the command line.

    >>> from ispasp.select import Scored
    >>> import torch
    >>> @register
    ... class Last(Scored):
    ...     name, needs = "last", ()
    ...     def score(self, statistics):
    ...         return torch.arange(statistics.units)
    >>> "last" in methods(), type(selector("last"))
    (True, <class 'ispasp.select.registry.Last'>)
    >>> _ = METHODS.pop("last")
    """
    if not (isinstance(kind, type) and issubclass(kind, Selector)):
        raise InputError(f"register got {kind!r}: pass a class that extends ispasp.select.Selector")
    _check_named(kind, kind.__name__)
    known = METHODS.get(kind.name, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):  # a notebook runs a cell again
        raise InputError(f"{kind.__name__}: there is a method {kind.name!r} already ({known.__name__}): rename it")
    METHODS[kind.name] = kind
    return kind


def methods() -> list[str]:
    """Names of all selectors, the paper's first.

    >>> methods()
    ['ispasp', ..., 'l1', ..., 'topk'...]
    """
    return sorted(METHODS, key=lambda name: (name != "ispasp", name))


def selector(method: str | Selector | type[Selector] | Score) -> Selector:
    """The selector of that name with its default options, of that class, of a function that scores, or itself.

    >>> selector("ispasp")
    ISpaSP(iterations=20, rank='value', minibatches=False)
    >>> selector("magic")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: unknown method 'magic': choose from ispasp, ...
    """
    if isinstance(method, str) and method in METHODS:
        method = METHODS[method]
    if isinstance(method, type) and issubclass(method, Selector):
        return _checked(_made(method))
    if isinstance(method, Selector):
        return _checked(method)
    if hasattr(method, "select"):
        raise InputError(
            f"method is a {type(method).__name__} with `select`, but no Selector: derive its class from "
            "ispasp.select.Selector"
        )
    if callable(method) and not isinstance(method, type):
        return ByScore(method)
    nearest = get_close_matches(str(method), METHODS, 1)
    hint = f"did you mean {nearest[0]!r}? Or " if nearest else ""
    raise InputError(
        f"unknown method {method!r}: {hint}choose from {', '.join(methods())}, or pass a Selector or a function that "
        "scores units"
    )


def _made(kind: type[Selector]) -> Selector:
    try:
        return kind()
    except TypeError as error:
        raise InputError(
            f"method is the class {kind.__name__}, which does not come without options ({error}): pass an object"
        ) from None


def _checked(chosen: Selector) -> Selector:
    """A selector that says what it is called and what it looks at."""
    kind, known = type(chosen).__name__, [*STATISTICS, "task", "producers"]
    _check_named(chosen, kind)
    needs = (chosen.needs,) if isinstance(chosen.needs, str) else chosen.needs
    unknown = [need for need in needs if need not in known]
    if unknown or isinstance(chosen.needs, str):
        raise InputError(f"{kind}.needs is {chosen.needs!r}: pass a tuple of some of {', '.join(known)}")
    return chosen


def _check_named(given: Selector | type[Selector], kind: str) -> None:
    for missing in ("name", "needs"):
        if not hasattr(given, missing):
            raise InputError(
                f"{kind} has no `{missing}`: give the class name = {kind.lower()!r} and, say, needs = ('magnitude',); "
                f"there are {', '.join([*STATISTICS, 'task', 'producers'])}"
            )
