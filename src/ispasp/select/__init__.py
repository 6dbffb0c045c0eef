"""Selectors: from statistics and weights to the units to keep. They see tensors, never modules.

Every module of this folder is imported, so a new file with a class under `@register` is a new method. The values that
selectors take and return are those of `ispasp.types`.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ispasp.engine import measure as measure
from ispasp.select.activations import FLAP as FLAP
from ispasp.select.activations import Spread as Spread
from ispasp.select.activations import Taylor as Taylor
from ispasp.select.activations import TopK as TopK
from ispasp.select.activations import Wanda as Wanda
from ispasp.select.base import METHODS
from ispasp.select.base import ByScore as ByScore
from ispasp.select.base import Found as Found
from ispasp.select.base import Score as Score
from ispasp.select.base import Scored as Scored
from ispasp.select.base import Search as Search
from ispasp.select.base import Selector as Selector
from ispasp.select.base import methods as methods
from ispasp.select.base import option as option
from ispasp.select.base import register as register
from ispasp.select.base import selector as selector
from ispasp.select.base import sum_by_unit as sum_by_unit
from ispasp.select.coreset import PFP as PFP
from ispasp.select.coreset import Coreset as Coreset
from ispasp.select.evidence import Evidence as Evidence
from ispasp.select.evidence import energy as energy
from ispasp.select.gfs import GFS as GFS
from ispasp.select.gfs import GFSConvex as GFSConvex
from ispasp.select.gfs import GFSLocal as GFSLocal
from ispasp.select.ispasp import ISpaSP as ISpaSP
from ispasp.select.ispasp import i_spasp as i_spasp
from ispasp.select.lasso import Lasso as Lasso
from ispasp.select.norm import FPGM as FPGM
from ispasp.select.norm import L1 as L1
from ispasp.select.norm import L2 as L2
from ispasp.select.norm import Slimming as Slimming
from ispasp.select.obs import OBS as OBS
from ispasp.select.obs import FisherOBS as FisherOBS
from ispasp.select.pursuit import CoSaMP as CoSaMP
from ispasp.select.pursuit import SubspacePursuit as SubspacePursuit
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
