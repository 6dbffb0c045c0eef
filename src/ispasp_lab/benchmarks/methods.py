"""`ispasp bench methods`: how long each method takes to choose, once the statistics are there.

Sizes of real layers, generated weights and activations. Every method gets the statistics that it asks for and no
others, as in `ispasp.prune`. `gfs` is left out: it runs the network, see `ispasp reproduce runtime`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.report import Column, render
from ispasp.select import Selector, methods, selector
from ispasp.types import Consumer, ConvConsumer, Fisher, LinearConsumer, Producer, Reading, Sensitivity, Statistics
from ispasp.types.consumer import Geometry
from ispasp_lab.benchmarks.timing import interleaved


@dataclass(frozen=True)
class Layer:
    """A hidden dimension of `units`, each of `channels` channels, that a layer with `outputs` outputs reads."""

    name: str
    units: int
    channels: int
    outputs: int
    kernel: int = 1
    size: int = 1  # height and width of the maps
    fan_in: int = 768

    def consumer(self, generator: torch.Generator) -> Consumer:
        """The layer that reads it, with random weights."""
        units = torch.arange(self.units).repeat_interleave(self.channels)
        taps = (self.kernel, self.kernel) if self.kernel > 1 else ()
        weight = torch.randn(self.outputs, len(units), *taps, generator=generator)
        if not taps:
            return LinearConsumer(weight, units=units)
        return ConvConsumer(weight, units=units, geometry=Geometry(padding=(self.kernel // 2,) * 2))


LAYERS = (
    Layer("512 filters, 3 x 3, 512 outputs", 512, 1, 512, kernel=3, size=7, fan_in=4608),
    Layer("3,072 neurons, 768 outputs", 3072, 1, 768),
    Layer("12 heads of 64, 768 outputs", 12, 64, 768),
)


@dataclass(frozen=True)
class Row:
    """Median seconds of one method on one layer, also as a multiple of i-SpaSP's."""

    layer: str
    method: str
    seconds: float
    ratio: float


def run(
    names: Sequence[str] = (),
    keep: float = 0.4,
    repeats: int = 3,
    seed: int = 0,
    *,
    layers: Sequence[Layer] = LAYERS,
    examples: int = 4096,
    progress: bool = True,
) -> list[Row]:
    """Rounds of all methods on each layer."""
    unknown = [name for name in names if name not in default_methods()]
    if unknown:
        raise InputError(f"methods {unknown}: choose from {', '.join(default_methods())}")
    chosen = {name: selector(name) for name in dict.fromkeys(["ispasp", *(names or default_methods())])}
    rows = []
    for layer in layers:
        whole = statistics(layer, examples, seed)
        jobs = {name: partial(method.select, wanted(method, whole), keep) for name, method in chosen.items()}
        found = interleaved(jobs, repeats, layer.name, progress=progress)
        unit = found["ispasp"].median
        rows += [Row(layer.name, name, timing.median, timing.median / unit) for name, timing in found.items()]
    return rows


def default_methods() -> list[str]:
    """All methods that choose from statistics alone.

    >>> "obs" in default_methods(), "gfs" in default_methods()
    (True, False)
    """
    return [name for name in methods() if "task" not in selector(name).needs]


def statistics(
    layer: Layer,
    examples: int,
    seed: int,
    needs: Collection[str] = ("moment", "magnitude", "spread", "gram", "contribution"),
) -> Statistics:
    """All statistics of a layer with random weights and non-negative random activations.

    >>> statistics(Layer("small", units=3, channels=2, outputs=4, fan_in=5), examples=8, seed=0).units
    3
    """
    g = torch.Generator().manual_seed(seed)
    consumer = layer.consumer(g)
    width = layer.units * layer.channels
    maps = (layer.size, layer.size) if layer.kernel > 1 else ()
    H = torch.randn(max(1, examples // layer.size**2), width, *maps, generator=g).relu()
    reading = measure(consumer, H, needs)
    felt = Sensitivity(torch.rand(layer.units, generator=g), len(H))
    made = Producer(torch.randn(width, layer.fan_in, generator=g), consumer.units, torch.rand(width, generator=g))
    reading = Reading(
        consumer, *reading.statistics.values(), felt, Fisher(torch.rand(consumer.outputs, generator=g), 1)
    )
    return Statistics(layer.units, (reading,), (made,))


def wanted(method: Selector, whole: Statistics) -> Statistics:
    """Only the statistics that the method needs: with Gram matrices it would also compute residuals."""
    rows = [(r.consumer, [s for name, s in r.statistics.items() if name in method.needs]) for r in whole.readings]
    return replace(whole, readings=tuple(Reading(consumer, *asked) for consumer, asked in rows))


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries.

    >>> as_json([Row("heads", "obs", 0.1, 10.0)])[0]["method"]
    'obs'
    """
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row], keep: float = 0.4, repeats: int = 3) -> str:
    """One line for each method, two columns for each layer.

    >>> "2.5x" in as_table([Row("heads", "obs", 0.25, 2.5)])
    True
    """
    layers = list(dict.fromkeys(row.layer for row in rows))
    columns = [Column("method", "method")]
    for layer in layers:
        columns += [Column(layer, f"{layer}, s", "{:.4f}".format), Column(f"{layer}:", "ispasp = 1", _times)]
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(row.method, {"method": row.method})
        line |= {row.layer: row.seconds, f"{row.layer}:": row.ratio}
    note = (
        f"keep {keep:g}, statistics at hand (float64), {torch.get_num_threads()} thread(s); medians of {repeats} "
        "interleaved runs."
    )
    return render("Seconds to choose", columns, list(lines.values()), note)


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"
