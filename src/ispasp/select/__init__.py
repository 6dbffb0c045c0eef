"""Selectors: statistics and weights in, units to keep out. They see tensors, never modules.

The consumers and statistics that they look at are here as well. Every module of this folder is imported, so that a file
with a class under `@register` is a new method; the names below are those that type checkers know.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ispasp.calibrate import measure
from ispasp.select.base import Selector
from ispasp.select.cosamp import CoSaMP
from ispasp.select.data import select_units
from ispasp.select.energy import energy
from ispasp.select.evidence import Evidence
from ispasp.select.fpgm import FPGM
from ispasp.select.function import ByScore, Score
from ispasp.select.gfs import GFS
from ispasp.select.gfs_local import GFSLocal
from ispasp.select.ispasp import ISpaSP, i_spasp
from ispasp.select.lasso import Lasso
from ispasp.select.norm import L1, L2
from ispasp.select.obs import OBS
from ispasp.select.random import Random
from ispasp.select.registry import METHODS, methods, register, selector
from ispasp.select.scores import Scored, sum_by_unit
from ispasp.select.slimming import Slimming
from ispasp.select.taylor import Taylor
from ispasp.select.thinet import ThiNet
from ispasp.select.topk import TopK
from ispasp.types import (
    Consumer,
    ConvConsumer,
    Gram,
    LinearConsumer,
    Magnitude,
    Moment,
    Producer,
    Reading,
    Selection,
    Sensitivity,
    Statistic,
    Statistics,
    Step,
    Total,
    by_channel,
    register_statistic,
    units_to_keep,
)

__all__ = [
    "FPGM",
    "GFS",
    "L1",
    "L2",
    "OBS",
    "ByScore",
    "CoSaMP",
    "Consumer",
    "ConvConsumer",
    "Evidence",
    "GFSLocal",
    "Gram",
    "ISpaSP",
    "Lasso",
    "LinearConsumer",
    "Magnitude",
    "Moment",
    "Producer",
    "Random",
    "Reading",
    "Score",
    "Scored",
    "Selection",
    "Selector",
    "Sensitivity",
    "Slimming",
    "Statistic",
    "Statistics",
    "Step",
    "Taylor",
    "ThiNet",
    "TopK",
    "Total",
    "by_channel",
    "energy",
    "i_spasp",
    "measure",
    "methods",
    "register",
    "register_statistic",
    "select_units",
    "selector",
    "sum_by_unit",
    "units_to_keep",
]


def _import_all() -> None:
    """Import every module of the folder."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


if not TYPE_CHECKING:  # to a type checker a misspelt name stays an error

    def __getattr__(name: str) -> Any:
        """The class of a method that is not in the list above, such as one registered elsewhere."""
        found = next((kind for kind in METHODS.values() if kind.__name__ == name), None)
        if found is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return found


_import_all()
