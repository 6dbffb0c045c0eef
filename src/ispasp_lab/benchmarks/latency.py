"""`ispasp bench latency`: speed-up of networks of half the MACs, half the time and half the units, by runtime.

Weights are random unless they are pretrained ones at hand, data are noise: neither changes the time of a width. Dense
and pruned networks run in turn, in one process.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ispasp._compare import compare
from ispasp._latency import LatencyResult, timed_pair
from ispasp._prune import prune
from ispasp.budget import Latency, Macs
from ispasp.budget.latency import RUNTIMES
from ispasp.engine.batches import first_of
from ispasp.errors import InputError, IspaspError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.report import Column, render
from ispasp_lab.benchmarks import surgery
from ispasp_lab.data.folder import available
from ispasp_lab.experiments.records import append_row, read_rows

NAME, PAGE = "latency.csv", "latency.md"
TORCH_PRUNING = "torch-pruning 0.5"
WAYS: dict[str, Any] = {
    "Macs(0.5)": Macs(0.5),
    "Latency(0.5)": Latency(0.5),
    "keep 0.5": 0.5,
    "torch-pruning 0.5": None,
}
COLUMNS = [
    Column("network", "network"),
    Column("runtime", "runtime"),
    Column("way", "way"),
    Column("macs", "MACs left", "{:.1%}".format),
    Column("predicted", "predicted", "{:.2f}x".format),
    Column("measured", "measured", "{:.2f}x".format),
    Column("dense_ms", "dense, ms", "{:.1f}".format),
    Column("spread", "spread", "{:.0%}".format),
    Column("failure", "", shorten=True),
]


@dataclass(frozen=True)
class Row:
    """One network, pruned one way, in one runtime. Speed-ups are dense / pruned times of one run.

    `predicted` is what the budget counts: MACs, for `Latency` its table. `spread` is the middle half of the runs.
    """

    network: str
    runtime: str
    way: str
    threads: int
    machine: str
    macs: float | None = None
    predicted: float | None = None
    measured: float | None = None
    dense_ms: float | None = None
    spread: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Network:
    """A network and noise for it; `weights` is what the data folder must hold."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    weights: str = ""


def _vit() -> nn.Module:
    import_torchvision()
    import timm

    model: nn.Module = timm.create_model("vit_small_patch16_224")
    return model


def _images() -> Any:
    return torch.randn(8, 3, 224, 224)


def _tokens(length: int, most: int, examples: int = 8) -> Callable[[], Any]:
    return lambda: {"input_ids": torch.randint(0, most, (examples, length))}


_SMOLLM2 = surgery.NETWORKS["smollm2"]
NETWORKS = {
    "resnet50": Network(surgery.NETWORKS["resnet50"].build, _images),
    "mobilenet_v2": Network(surgery.NETWORKS["mobilenet_v2"].build, _images),
    "vit_small": Network(_vit, _images),
    "bert_base": Network(surgery.NETWORKS["bert_base"].build, _tokens(128, 30_000)),
    "smollm2-prefill": Network(_SMOLLM2.build, _tokens(128, 49_000), _SMOLLM2.weights),
    "smollm2-token": Network(_SMOLLM2.build, _tokens(1, 49_000, 64), _SMOLLM2.weights),
}


def run(networks: Sequence[str], runtimes: Sequence[str], ways: Sequence[str], folder: Path) -> Iterator[Row]:
    """Yield every row that the folder has not yet, and add it there."""
    known = (("network", networks, NETWORKS), ("runtime", runtimes, RUNTIMES), ("way", ways, WAYS))
    for what, given, names in known:
        if unknown := [name for name in given if name not in names]:
            raise InputError(f"there is no {what} {unknown[0]!r} here: choose from {', '.join(names)}")
    there = {(row.network, row.runtime, row.way) for row in read_rows(folder / NAME, Row)}
    machine = f"{platform.machine()}, torch {torch.__version__}"
    for name in networks:
        for runtime in runtimes:
            for way in ways:
                row = Row(name, runtime, way, torch.get_num_threads(), machine)
                if (name, runtime, way) not in there and not _absent(name, way):
                    row = measured(row)
                    append_row(folder / NAME, row)
                    yield row


def _absent(name: str, way: str) -> bool:
    """Whether weights or packages are missing."""
    if way == TORCH_PRUNING:
        return find_spec("torch_pruning") is None or name not in surgery.NETWORKS
    return bool(NETWORKS[name].weights) and not available(NETWORKS[name].weights)


def measured(row: Row) -> Row:
    """Prune one network one way, and time it beside the dense one."""
    torch.manual_seed(0)
    runtime: Any = row.runtime
    dense, batch = NETWORKS[row.network].build().eval(), NETWORKS[row.network].batch()
    try:
        if row.way == TORCH_PRUNING:
            model = surgery.stepped(row.network, 0.5)
            timed = timed_pair(dense, model, first_of(batch, 1), runtime)
            cost = compare(dense, model, [first_of(batch, 1)], runtime=lambda model, batch: 1e-3).cost
        else:
            keep = WAYS[row.way]
            keep = replace(keep, runtime=runtime) if isinstance(keep, Latency) else keep
            result = prune(dense, [batch], keep, method="l1", compensate=None, progress=False)
            timed = result.latency or timed_pair(dense, result.model, first_of(batch, 1), runtime)
            cost = result.cost
    except IspaspError as error:
        return replace(row, failure=str(error))
    left = cost.macs / cost.dense_macs
    return replace(row, macs=left, predicted=_predicted(timed, left), **_times(timed))


def _predicted(timed: LatencyResult, left: float) -> float:
    return timed.dense / timed.predicted if timed.predicted else 1 / left


def _times(timed: LatencyResult) -> dict[str, Any]:
    return {"measured": timed.speedup, "dense_ms": timed.dense, "spread": max(timed.dense_spread, timed.pruned_spread)}


def write(folder: Path) -> Path:
    """Write latency.md beside latency.csv, from its rows alone."""
    rows = read_rows(folder / NAME, Row)
    lines = [
        "# Latency of pruned networks",
        "",
        "Made by `ispasp bench latency` from [latency.csv](latency.csv), which has threads and versions. One example a "
        "call. Speed-ups are dense over pruned times of one run, the two in turn. Predicted is what the budget counts: "
        "MACs, for `Latency` its table. Spread is the middle half of the runs relative to their median: where it is "
        "large, speed-ups are rough. Time that the thread waited for a processor is not counted. Rows that are not "
        "here were not run.",
        "",
        "```",
        as_table(rows),
        "```",
        "",
    ]
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")
    return folder / PAGE


def as_table(rows: Sequence[Row]) -> str:
    """A table a person likes to read."""
    shown = [{**asdict(row), "failure": row.failure or None} for row in rows]
    columns = [c for c in COLUMNS if c.key != "failure" or any(row.failure for row in rows)]
    return render("", columns, shown)
