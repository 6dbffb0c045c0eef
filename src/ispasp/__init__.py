"""ispasp: make trained PyTorch networks smaller by removing whole neurons, filters and attention heads."""

from ispasp.api.apply import apply_
from ispasp.api.survey import Survey, survey
from ispasp.errors import (
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
    "ISpaSP",
    "InputError",
    "IspaspError",
    "LinearConsumer",
    "MissingExtraError",
    "NothingToPruneError",
    "Plan",
    "PlanError",
    "SaveError",
    "SurgeryError",
    "Survey",
    "TraceError",
    "apply_",
    "survey",
    "Moment",
    "Random",
    "Reading",
    "Selection",
    "Selector",
    "Statistics",
    "TopK",
    "i_spasp",
    "methods",
    "select_units",
    "units_to_keep",
]
