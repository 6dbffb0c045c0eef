"""Values that the parts of the library hand to each other: consumers, statistics, selections, plans."""

from ispasp.types.consumer import (
    Consumer as Consumer,
    ConvConsumer as ConvConsumer,
    LinearConsumer as LinearConsumer,
    Producer as Producer,
)
from ispasp.types.dimension import units_to_keep as units_to_keep
from ispasp.types.statistics import (
    Fisher as Fisher,
    Gram as Gram,
    Magnitude as Magnitude,
    Moment as Moment,
    Reading as Reading,
    Selection as Selection,
    Sensitivity as Sensitivity,
    Statistic as Statistic,
    Statistics as Statistics,
    Step as Step,
    Total as Total,
    by_channel as by_channel,
    register_statistic as register_statistic,
)
