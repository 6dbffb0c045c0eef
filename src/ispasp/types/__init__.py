"""What the parts of the library hand to each other: consumers, statistics, selections."""

from ispasp.types.consumer import Consumer, ConvConsumer, LinearConsumer
from ispasp.types.keep import units_to_keep
from ispasp.types.selection import Selection, Step
from ispasp.types.statistics import Gram, Magnitude, Moment, Reading, Statistics

__all__ = [
    "Consumer",
    "ConvConsumer",
    "Gram",
    "LinearConsumer",
    "Magnitude",
    "Moment",
    "Reading",
    "Selection",
    "Statistics",
    "Step",
    "units_to_keep",
]
