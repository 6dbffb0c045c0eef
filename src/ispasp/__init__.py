"""ispasp: make trained PyTorch networks smaller by removing whole neurons, filters and attention heads."""

from ispasp.api.apply import apply_
from ispasp.api.finetune import FinetuneResult, finetune
from ispasp.api.load import load
from ispasp.api.onnx import export_onnx
from ispasp.api.prune import prune, prune_
from ispasp.api.recipes import Recipe, recipes
from ispasp.api.result import Layer, Result
from ispasp.api.save import save
from ispasp.api.survey import Survey, survey
from ispasp.budget import Macs, Params
from ispasp.errors import (
    DistributedError,
    ExportError,
    InputError,
    IspaspError,
    MissingExtraError,
    NothingToPruneError,
    PlanError,
    SaveError,
    SurgeryError,
    TraceError,
)
from ispasp.select import (
    FPGM,
    GFS,
    L1,
    L2,
    OBS,
    CoSaMP,
    GFSLocal,
    ISpaSP,
    Lasso,
    Random,
    Selector,
    Slimming,
    Taylor,
    ThiNet,
    TopK,
    i_spasp,
    methods,
    select_units,
)
from ispasp.train import AdamW, Sgd, Teacher
from ispasp.types import (
    ConvConsumer,
    LinearConsumer,
    Moment,
    Reading,
    Selection,
    Statistics,
    units_to_keep,
)
from ispasp.types.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "FPGM",
    "GFS",
    "L1",
    "L2",
    "OBS",
    "AdamW",
    "CoSaMP",
    "ConvConsumer",
    "DistributedError",
    "ExportError",
    "FinetuneResult",
    "GFSLocal",
    "ISpaSP",
    "InputError",
    "IspaspError",
    "Lasso",
    "Layer",
    "LinearConsumer",
    "Macs",
    "MissingExtraError",
    "Moment",
    "NothingToPruneError",
    "Params",
    "Plan",
    "PlanError",
    "Random",
    "Reading",
    "Recipe",
    "Result",
    "SaveError",
    "Selection",
    "Selector",
    "Sgd",
    "Slimming",
    "Statistics",
    "SurgeryError",
    "Survey",
    "Taylor",
    "Teacher",
    "ThiNet",
    "TopK",
    "TraceError",
    "apply_",
    "export_onnx",
    "finetune",
    "i_spasp",
    "load",
    "methods",
    "prune",
    "prune_",
    "recipes",
    "save",
    "select_units",
    "survey",
    "units_to_keep",
]
