"""`ispasp bench latency`: speed-up of networks of half the MACs, half the time and half the units, by runtime.

Weights are random, data are noise: neither changes the time of a width. Dense and pruned networks run in turn, in one
process.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ispasp._latency import LatencyResult, timed_pair
from ispasp._prune import prune
from ispasp._survey import survey
from ispasp.budget import Latency, Macs
from ispasp.budget.latency import RUNTIMES
from ispasp.engine.batches import first_of
from ispasp.errors import InputError, IspaspError, failing_as
from ispasp.integrations.torchvision import import_torchvision
from ispasp.report import Column, render
from ispasp_lab.benchmarks import surgery
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
    """A network, noise for it, what a call has, and the package that builds it."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    call: str
    package: str


def _vit() -> nn.Module:
    import_torchvision()
    import timm

    model: nn.Module = timm.create_model("vit_small_patch16_224")
    return model


def _smollm2() -> nn.Module:
    """The sizes of SmolLM2-135M."""
    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
    }
    heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def _images() -> Any:
    return torch.randn(8, 3, 224, 224)


def _tokens(length: int, most: int, examples: int = 8) -> Callable[[], Any]:
    return lambda: {"input_ids": torch.randint(0, most, (examples, length))}


_IMAGE, _TEXT = "an image of 224 x 224", "128 tokens"
NETWORKS = {
    "resnet50": Network(surgery.NETWORKS["resnet50"].build, _images, _IMAGE, "torchvision"),
    "mobilenet_v2": Network(surgery.NETWORKS["mobilenet_v2"].build, _images, _IMAGE, "torchvision"),
    "vit_small": Network(_vit, _images, _IMAGE, "timm"),
    "bert_base": Network(surgery.NETWORKS["bert_base"].build, _tokens(128, 30_000), _TEXT, "transformers"),
    "smollm2-prefill": Network(_smollm2, _tokens(128, 49_000), _TEXT, "transformers"),
    "smollm2-token": Network(_smollm2, _tokens(1, 49_000, 64), "one token, without others in a cache", "transformers"),
}


def run(networks: Sequence[str], runtimes: Sequence[str], ways: Sequence[str], folder: Path) -> Iterator[Row]:
    """Yield every row that the folder has not yet, and add it there; those that cannot be measured here say why."""
    known = (("network", networks, NETWORKS), ("runtime", runtimes, RUNTIMES), ("way", ways, WAYS))
    for what, given, names in known:
        if unknown := [name for name in given if name not in names]:
            raise InputError(f"there is no {what} {unknown[0]!r} here: choose from {', '.join(names)}")
    there = {(row.network, row.runtime, row.way) for row in read_rows(folder / NAME, Row)}
    machine = f"{platform.machine()}, torch {torch.__version__}"
    for name, runtime, way in product(networks, runtimes, ways):
        row = Row(name, runtime, way, torch.get_num_threads(), machine)
        if (name, runtime, way) in there:
            continue
        if missing := absent(name, runtime, way):
            yield replace(row, failure=missing)
        else:
            row = measured(row)
            append_row(folder / NAME, row)
            yield row


def absent(name: str, runtime: str, way: str) -> str:
    """Why a row cannot be measured here; empty if it can."""
    packages = [NETWORKS[name].package, *(("onnx", "onnxscript", "onnxruntime") if runtime == "onnx" else ())]
    if way == TORCH_PRUNING:
        if name not in surgery.NETWORKS:
            return "not run: torch-pruning needs corrections by hand for it"
        packages.append("torch_pruning")
    missing = [package.replace("_", "-") for package in packages if find_spec(package) is None]
    return f"not run: pip install {' '.join(missing)}" if missing else ""


def measured(row: Row) -> Row:
    """Prune one network one way, and time it beside the dense one."""
    torch.manual_seed(0)
    runtime: Any = row.runtime
    dense, batch = NETWORKS[row.network].build().eval(), NETWORKS[row.network].batch()
    one = first_of(batch, 1)
    try:
        if row.way == TORCH_PRUNING:
            with failing_as(InputError, "torch-pruning fails", "nothing was timed"):
                model = surgery.stepped(row.network, 0.5)
            timed = timed_pair(dense, model, one, runtime)
            left = survey(model, one).cost().macs / survey(dense, one).cost().macs
        else:
            keep = WAYS[row.way]
            keep = replace(keep, runtime=runtime) if isinstance(keep, Latency) else keep
            result = prune(dense, [batch], keep, method="l1", compensate=None, progress=False)
            timed = result.latency or timed_pair(dense, result.model, one, runtime)
            left = result.cost.macs / result.cost.dense_macs
    except IspaspError as error:
        return replace(row, failure=str(error))
    return replace(row, macs=left, predicted=_predicted(timed, left), **_times(timed))


def _predicted(timed: LatencyResult, left: float) -> float:
    return timed.dense / timed.predicted if timed.predicted else 1 / left


def _times(timed: LatencyResult) -> dict[str, Any]:
    return {"measured": timed.speedup, "dense_ms": timed.dense, "spread": max(timed.dense_spread, timed.pruned_spread)}


def write(folder: Path) -> Path:
    """Write latency.md beside latency.csv, from its rows alone."""
    rows = read_rows(folder / NAME, Row)
    calls: dict[str, list[str]] = {}
    for name, network in NETWORKS.items():
        calls.setdefault(network.call, []).append(f"`{name}`")
    inputs = "; ".join(f"{call} for {', '.join(names)}" for call, names in calls.items())
    lines = [
        "# Latency of pruned networks",
        "",
        "Made by `ispasp bench latency` from [latency.csv](latency.csv), which has threads and versions. Speed-ups are "
        "dense over pruned times of one run, the two in turn. Weights are random: times do not depend on them.",
        "",
        f"- **network**: a call has one example, {inputs}.",
        "- **runtime**: `eager` PyTorch, `compile` is torch.compile, `onnx` is ONNX Runtime.",
        "- **way**: `Macs(0.5)` and `Latency(0.5)` choose widths for half of the MACs or the time, `keep 0.5` leaves "
        "half of the units of every hidden dimension. `torch-pruning 0.5` does the same with its magnitude pruner, and "
        "prunes residual streams too.",
        "- **MACs left**: of the dense network's.",
        "- **predicted**: the speed-up that the budget counts: for `Latency` by its table, else by MACs.",
        "- **measured**: the speed-up of a call. **dense, ms**: the dense network's time.",
        "- **spread**: the middle half of the runs relative to their median. Where it is large, speed-ups are rough. "
        "Time that the thread waited for a processor is not counted.",
        "",
        "Rows that are not here were not run.",
        "",
        "```",
        as_table(rows),
        "```",
        "",
    ]
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")
    return folder / PAGE


def as_table(rows: Sequence[Row]) -> str:
    """A table a person likes to read, in the order of networks, runtimes and ways."""
    orders = [{name: i for i, name in enumerate(names)} for names in (NETWORKS, RUNTIMES, WAYS)]
    rows = sorted(
        rows, key=lambda row: [o[n] for o, n in zip(orders, (row.network, row.runtime, row.way), strict=True)]
    )
    shown = [{**asdict(row), "failure": row.failure or None} for row in rows]
    columns = [c for c in COLUMNS if c.key != "failure" or any(row.failure for row in rows)]
    return render("", columns, shown)
