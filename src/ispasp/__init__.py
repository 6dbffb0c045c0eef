"""ispasp: make trained PyTorch networks smaller by removing whole neurons, filters and attention heads."""

from ispasp.errors import InputError, IspaspError, MissingExtraError
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

__version__ = "0.1.0"

__all__ = [
    "ConvConsumer",
    "ISpaSP",
    "InputError",
    "IspaspError",
    "LinearConsumer",
    "MissingExtraError",
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
