"""What the parts of the library hand to each other: consumers, statistics, selections."""

from ispasp.types.consumer import Consumer, ConvConsumer, LinearConsumer
from ispasp.types.keep import units_to_keep
from ispasp.types.producer import Producer
from ispasp.types.selection import Selection, Step
from ispasp.types.statistics import Gram, Magnitude, Moment, Reading, Sensitivity, Statistics

__all__ = [
    "Consumer",
    "ConvConsumer",
    "Gram",
    "LinearConsumer",
    "Magnitude",
    "Moment",
    "Producer",
    "Reading",
    "Selection",
    "Sensitivity",
    "Statistics",
    "Step",
    "units_to_keep",
]
