"""Names of methods. A new selector is one file and one line here."""

from __future__ import annotations

from difflib import get_close_matches

from ispasp.errors import InputError
from ispasp.select.base import NEEDS, Selector
from ispasp.select.cosamp import CoSaMP
from ispasp.select.fpgm import FPGM
from ispasp.select.function import ByScore, Score
from ispasp.select.gfs import GFS
from ispasp.select.gfs_local import GFSLocal
from ispasp.select.ispasp import ISpaSP
from ispasp.select.lasso import Lasso
from ispasp.select.norm import L1, L2
from ispasp.select.obs import OBS
from ispasp.select.random import Random
from ispasp.select.slimming import Slimming
from ispasp.select.taylor import Taylor
from ispasp.select.thinet import ThiNet
from ispasp.select.topk import TopK

_SELECTORS: tuple[type[Selector], ...] = (
    ISpaSP,
    TopK,
    Random,
    L1,
    L2,
    FPGM,
    Slimming,
    Taylor,
    ThiNet,
    GFS,
    GFSLocal,
    Lasso,
    CoSaMP,
    OBS,
)
_METHODS: dict[str, type[Selector]] = {cls.name: cls for cls in _SELECTORS}


def methods() -> list[str]:
    """Names of all selectors.

    >>> methods()
    ['ispasp', 'topk', 'random', 'l1', 'l2', 'fpgm', 'slimming', 'taylor', 'thinet', 'gfs', 'gfs-local', 'lasso',
     'cosamp', 'obs']
    """
    return list(_METHODS)


def selector(method: str | Selector | type[Selector] | Score) -> Selector:
    """The selector of that name with its default options, of that class, of a function that scores, or itself.

    >>> selector("ispasp")
    ISpaSP(iterations=20, rank='value', minibatches=False)
    >>> selector("magic")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: unknown method 'magic': choose from ispasp, topk, ...
    """
    if isinstance(method, str) and method in _METHODS:
        return _METHODS[method]()
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
    nearest = get_close_matches(str(method), _METHODS, 1)
    hint = f"did you mean {nearest[0]!r}? Or " if nearest else ""
    raise InputError(
        f"unknown method {method!r}: {hint}choose from {', '.join(_METHODS)}, or pass a Selector or a function that "
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
    kind = type(chosen).__name__
    missing = [name for name in ("name", "needs") if not hasattr(chosen, name)]
    if missing:
        raise InputError(
            f"{kind} has no `{missing[0]}`: give the class name = {kind.lower()!r} and, say, needs = ('magnitude',); "
            f"there are {', '.join(NEEDS)}"
        )
    needs = (chosen.needs,) if isinstance(chosen.needs, str) else chosen.needs
    unknown = [need for need in needs if need not in NEEDS]
    if unknown or isinstance(chosen.needs, str):
        raise InputError(f"{kind}.needs is {chosen.needs!r}: pass a tuple of some of {', '.join(NEEDS)}")
    return chosen
