"""Names of methods. A new selector is one file and one line here."""

from __future__ import annotations

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.ispasp import ISpaSP
from ispasp.select.random import Random
from ispasp.select.topk import TopK

_METHODS: dict[str, type[Selector]] = {cls.name: cls for cls in (ISpaSP, TopK, Random)}


def methods() -> list[str]:
    """Names of all selectors.

    >>> methods()
    ['ispasp', 'topk', 'random']
    """
    return list(_METHODS)


def selector(method: str | Selector) -> Selector:
    """The selector of that name with its default options, or the selector itself.

    >>> selector("ispasp")
    ISpaSP(iterations=20, rank='value')
    >>> selector("magic")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: unknown method 'magic': choose from ispasp, topk, random, or pass a Selector object
    """
    if isinstance(method, Selector):
        return method
    if not isinstance(method, str) or method not in _METHODS:
        raise InputError(f"unknown method {method!r}: choose from {', '.join(_METHODS)}, or pass a Selector object")
    return _METHODS[method]()
