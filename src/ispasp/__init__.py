"""ispasp: make trained PyTorch networks smaller by removing whole neurons, filters and attention heads."""

from ispasp.api.apply import apply_
from ispasp.api.load import load
from ispasp.api.onnx import export_onnx
from ispasp.api.save import save
from ispasp.api.survey import Survey, survey
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
from ispasp.select import ISpaSP, Random, Selector, TopK, i_spasp, methods, select_units
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
    "ConvConsumer",
    "DistributedError",
    "ExportError",
    "ISpaSP",
    "InputError",
    "IspaspError",
    "LinearConsumer",
    "MissingExtraError",
    "Moment",
    "NothingToPruneError",
    "Plan",
    "PlanError",
    "Random",
    "Reading",
    "SaveError",
    "Selection",
    "Selector",
    "Statistics",
    "SurgeryError",
    "Survey",
    "TopK",
    "TraceError",
    "apply_",
    "export_onnx",
    "i_spasp",
    "load",
    "methods",
    "save",
    "select_units",
    "survey",
    "units_to_keep",
]
