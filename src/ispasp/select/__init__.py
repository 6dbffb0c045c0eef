"""Selectors: from statistics and weights to the units to keep. They see tensors, never modules.

Every module of this folder is imported, so a new file with a class under `@register` is a new method. The values that
selectors take and return are those of `ispasp.types`.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ispasp.engine import measure as measure
from ispasp.select.activations import FLAP as FLAP, Spread as Spread, Taylor as Taylor, TopK as TopK, Wanda as Wanda
from ispasp.select.base import (
    METHODS,
    ByScore as ByScore,
    Found as Found,
    Score as Score,
    Scored as Scored,
    Search as Search,
    Selector as Selector,
    methods as methods,
    option as option,
    register as register,
    selector as selector,
    sum_by_unit as sum_by_unit,
)
from ispasp.select.coreset import PFP as PFP, Coreset as Coreset
from ispasp.select.evidence import Evidence as Evidence, energy as energy
from ispasp.select.gfs import GFS as GFS, GFSConvex as GFSConvex, GFSLocal as GFSLocal
from ispasp.select.ispasp import ISpaSP as ISpaSP, i_spasp as i_spasp
from ispasp.select.lasso import Lasso as Lasso
from ispasp.select.norm import FPGM as FPGM, L1 as L1, L2 as L2, Slimming as Slimming
from ispasp.select.obs import OBS as OBS, FisherOBS as FisherOBS
from ispasp.select.pursuit import CoSaMP as CoSaMP, SubspacePursuit as SubspacePursuit
from ispasp.select.random import Random as Random
from ispasp.select.thinet import ThiNet as ThiNet
from ispasp.select.units import select_units as select_units
from ispasp.types import *  # noqa: F403


def _import_all() -> None:
    for module in iter_modules(__path__):  # noqa: F405
        import_module(f"{__name__}.{module.name}")


if not TYPE_CHECKING:  # to a type checker a misspelt name stays an error

    def __getattr__(name: str) -> Any:
        """The class of a method that is registered elsewhere."""
        found = next((kind for kind in METHODS.values() if kind.__name__ == name), None)
        if found is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return found


_import_all()
