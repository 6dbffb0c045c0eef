"""Selectors: statistics and weights in, units to keep out. They see tensors, never modules."""

from ispasp.select.base import Selector
from ispasp.select.cosamp import CoSaMP
from ispasp.select.data import select_units
from ispasp.select.energy import energy
from ispasp.select.evidence import Evidence
from ispasp.select.fpgm import FPGM
from ispasp.select.gfs import GFS
from ispasp.select.gfs_local import GFSLocal
from ispasp.select.ispasp import ISpaSP, i_spasp
from ispasp.select.lasso import Lasso
from ispasp.select.norm import L1, L2
from ispasp.select.obs import OBS
from ispasp.select.random import Random
from ispasp.select.registry import methods, selector
from ispasp.select.slimming import Slimming
from ispasp.select.taylor import Taylor
from ispasp.select.thinet import ThiNet
from ispasp.select.topk import TopK

__all__ = [
    "FPGM",
    "GFS",
    "L1",
    "L2",
    "OBS",
    "CoSaMP",
    "Evidence",
    "GFSLocal",
    "ISpaSP",
    "Lasso",
    "Random",
    "Selector",
    "Slimming",
    "Taylor",
    "ThiNet",
    "TopK",
    "energy",
    "i_spasp",
    "methods",
    "select_units",
    "selector",
]
