"""Selectors: statistics and weights in, units to keep out. They see tensors, never modules.

The consumers and statistics that they look at are here as well.
"""

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
from ispasp.select.registry import methods, selector
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
    Statistics,
    Step,
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
    "Statistics",
    "Step",
    "Taylor",
    "ThiNet",
    "TopK",
    "energy",
    "i_spasp",
    "measure",
    "methods",
    "select_units",
    "selector",
    "sum_by_unit",
    "units_to_keep",
]
