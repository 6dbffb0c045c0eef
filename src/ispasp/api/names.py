"""Options with a wrong name: an error that tells the right one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from ispasp.calibrate.team import joined_team
from ispasp.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")

_REMOVED = ("sparsity", "ratio", "pruning_ratio", "amount")  # what others call the part that goes
_ELSEWHERE = {"importance": "method", "criterion": "method", "ignored_layers": "skip", "exclude": "skip"}


def suggest_names(verb: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse unknown options with the nearest name; type checkers and `help` see it as it is.

    On several machines the others hear of it, as of every wrong option.

    >>> suggest_names(lambda *, method: method)(methd="l1")
    Traceback (most recent call last):
    ...
    ispasp.errors.OptionError: <lambda> has no option 'methd': did you mean 'method'?
    """
    known = inspect.signature(verb).parameters

    @wraps(verb)
    def called(*args: P.args, **options: P.kwargs) -> R:
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            with joined_team() as ranks, ranks.together("the check of the arguments"):
                raise OptionError(f"{verb.__name__} has no option {unknown!r}: {_remedy(unknown, options, known)}")
        return verb(*args, **options)

    return called


def _remedy(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    value = options[name]
    if name == "optimizer":
        return "a copy is pruned, which no optimizer knows; use prune_(model, ..., optimizer=optimizer)"
    if name in _REMOVED and "keep" in known:
        part = 1 - float(value) if isinstance(value, Real) and 0 < float(value) < 1 else 0.5
        return f"keep= says what stays; pass keep={part:g}"
    nearest = [_ELSEWHERE[name]] if _ELSEWHERE.get(name) in known else get_close_matches(name, known, 1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"choose from {', '.join(known)}"
