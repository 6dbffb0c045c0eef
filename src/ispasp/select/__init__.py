"""Selectors: statistics and weights in, units to keep out. They see tensors, never modules."""

from ispasp.select.base import Selector
from ispasp.select.data import select_units
from ispasp.select.energy import energy
from ispasp.select.evidence import Evidence
from ispasp.select.ispasp import ISpaSP, i_spasp
from ispasp.select.random import Random
from ispasp.select.registry import methods, selector
from ispasp.select.topk import TopK

__all__ = [
    "Evidence",
    "ISpaSP",
    "Random",
    "Selector",
    "TopK",
    "energy",
    "i_spasp",
    "methods",
    "select_units",
    "selector",
]
