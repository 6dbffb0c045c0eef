"""Names of methods. A new selector is one file and one line here."""

from __future__ import annotations

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.cosamp import CoSaMP
from ispasp.select.fpgm import FPGM
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


def selector(method: str | Selector) -> Selector:
    """The selector of that name with its default options, or the selector itself.

    >>> selector("ispasp")
    ISpaSP(iterations=20, rank='value', minibatches=False)
    >>> selector("magic")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: unknown method 'magic': choose from ispasp, topk, ...
    """
    if isinstance(method, Selector):
        return method
    if not isinstance(method, str) or method not in _METHODS:
        raise InputError(f"unknown method {method!r}: choose from {', '.join(_METHODS)}, or pass a Selector object")
    return _METHODS[method]()
