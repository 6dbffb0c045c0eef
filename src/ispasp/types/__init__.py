"""What the parts of the library hand to each other: consumers, statistics, selections."""

from ispasp.types.consumer import Consumer, ConvConsumer, LinearConsumer
from ispasp.types.keep import units_to_keep
from ispasp.types.producer import Producer
from ispasp.types.selection import Selection, Step
from ispasp.types.statistic import (
    Gram,
    Magnitude,
    Moment,
    Sensitivity,
    Statistic,
    Total,
    by_channel,
    register_statistic,
)
from ispasp.types.statistics import Reading, Statistics

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
    "Statistic",
    "Statistics",
    "Step",
    "Total",
    "by_channel",
    "register_statistic",
    "units_to_keep",
]
