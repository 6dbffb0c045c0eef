"""Values that the parts of the library hand to each other: consumers, statistics, selections, plans."""

from ispasp.types.consumer import Consumer as Consumer
from ispasp.types.consumer import ConvConsumer as ConvConsumer
from ispasp.types.consumer import LinearConsumer as LinearConsumer
from ispasp.types.consumer import Producer as Producer
from ispasp.types.dimension import units_to_keep as units_to_keep
from ispasp.types.statistics import Fisher as Fisher
from ispasp.types.statistics import Gram as Gram
from ispasp.types.statistics import Magnitude as Magnitude
from ispasp.types.statistics import Moment as Moment
from ispasp.types.statistics import Reading as Reading
from ispasp.types.statistics import Selection as Selection
from ispasp.types.statistics import Sensitivity as Sensitivity
from ispasp.types.statistics import Statistic as Statistic
from ispasp.types.statistics import Statistics as Statistics
from ispasp.types.statistics import Step as Step
from ispasp.types.statistics import Total as Total
from ispasp.types.statistics import by_channel as by_channel
from ispasp.types.statistics import register_statistic as register_statistic
