"""ispasp: make trained PyTorch networks smaller by removing whole neurons, filters and attention heads.

Selectors, consumers and statistics are in `ispasp.select`, optimizers in `ispasp.train`, errors in `ispasp.errors`.
"""

from ispasp import errors, select, train
from ispasp.api.apply import apply_
from ispasp.api.compare_methods import compare_methods
from ispasp.api.finetune import finetune
from ispasp.api.load import load
from ispasp.api.mask import mask
from ispasp.api.onnx import export_onnx
from ispasp.api.prune import prune, prune_
from ispasp.api.recipes import recipes
from ispasp.api.result import Layer, Result
from ispasp.api.save import save
from ispasp.api.survey import Survey, survey
from ispasp.budget import Macs, Params
from ispasp.errors import IspaspError
from ispasp.select import methods
from ispasp.types.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "IspaspError",
    "Layer",
    "Macs",
    "Params",
    "Plan",
    "Result",
    "Survey",
    "apply_",
    "compare_methods",
    "errors",
    "export_onnx",
    "finetune",
    "load",
    "mask",
    "methods",
    "prune",
    "prune_",
    "recipes",
    "save",
    "select",
    "survey",
    "train",
]
