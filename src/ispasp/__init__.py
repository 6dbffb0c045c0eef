"""ispasp: make trained PyTorch networks smaller by removing whole neurons, filters and attention heads.

Selectors, consumers and statistics are in `ispasp.select`, optimizers in `ispasp.train`, errors in `ispasp.errors`.
"""

from ispasp import errors, select, train
from ispasp._apply import apply_, mask
from ispasp._compare import compare, compare_methods
from ispasp._finetune import finetune
from ispasp._gguf import export_gguf
from ispasp._heal import Heal, HealResult, heal
from ispasp._keep import recipes
from ispasp._latency import LatencyResult
from ispasp._onnx import export_onnx
from ispasp._prune import prune, prune_
from ispasp._reset import reset_
from ispasp._store import load, save
from ispasp._survey import Survey, survey
from ispasp.budget import Latency, Macs, Params
from ispasp.errors import IspaspError
from ispasp.result import Layer, Result
from ispasp.select import methods
from ispasp.types.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "Heal",
    "HealResult",
    "IspaspError",
    "Latency",
    "LatencyResult",
    "Layer",
    "Macs",
    "Params",
    "Plan",
    "Result",
    "Survey",
    "apply_",
    "compare",
    "compare_methods",
    "errors",
    "export_gguf",
    "export_onnx",
    "finetune",
    "heal",
    "load",
    "mask",
    "methods",
    "prune",
    "prune_",
    "recipes",
    "reset_",
    "save",
    "select",
    "survey",
    "train",
]
