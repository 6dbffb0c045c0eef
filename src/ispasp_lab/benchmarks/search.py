"""`ispasp bench search`: searches of widths at the same MACs, on ResNet20 for CIFAR-10, without labels.

Every network is pruned by the same method and refitted alike; only its widths differ. Rows go to a CSV file, and a run
that was cut off goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ispasp import Macs, prune
from ispasp._evaluate import divergence
from ispasp.engine.batches import count_examples
from ispasp.engine.runner import Runner
from ispasp.errors import InputError
from ispasp_lab.accuracy import accuracy
from ispasp_lab.data import batches, cifar10
from ispasp_lab.experiments.records import append_row, read_rows
from ispasp_lab.models import resnet20
from ispasp_lab.search import AMC, LeGR, MetaPruning
from ispasp_lab.search.meta import PruningNet

NAME = "search"
_HELD = 1000  # training images that no search has seen


@dataclass(frozen=True)
class Row:
    """One pruned network. `passes`: forward passes of one image that all of pruning took, a backward pass being two."""

    search: str
    candidates: int
    macs: float
    images: int
    tested: int
    seed: int
    spent: float
    divergence: float
    accuracy: float
    passes: float
    cpu_s: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What was asked for."""
        return self.search, self.candidates, self.macs, self.images, self.tested, self.seed


@dataclass(frozen=True)
class Settings:
    """On what to search: `images` for calibration, `tested` test images (0: all)."""

    images: int = 1024
    tested: int = 0
    seed: int = 0


def searches(candidates: int, seed: int) -> dict[str, dict[str, Any]]:
    """Name -> options of `prune`. Each search tries that many networks; what it needs besides counts in its passes."""
    return {
        "uniform": {"uniform": True, "bias": "add"},
        "allocation": {"search": 0},
        "exchanges": {"search": candidates},
        "legr": {"search": LeGR(steps=candidates, seed=seed)},
        "amc": {"search": AMC(episodes=candidates, explore=candidates // 4, seed=seed)},
        "meta": {"search": MetaPruning(steps=5 * candidates, rounds=max(1, candidates // 20), seed=seed)},
    }


def run(
    settings: Settings, folder: Path, macs: Sequence[float], candidates: int, names: Sequence[str] = ()
) -> Iterator[Row]:
    """Make the rows that the CSV file in the folder does not have yet, and yield each."""
    known = searches(candidates, settings.seed)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"searches {unknown}: choose from {', '.join(known)}")
    path = folder / f"{NAME}.csv"
    done = {row.key for row in read_rows(path, Row)}
    model, data = resnet20(), _data(settings)
    for amount in macs:
        for name in names or known:
            tried = candidates if "search" in known[name] and name != "allocation" else 0
            key = name, tried, amount, settings.images, settings.tested, settings.seed
            if key not in done:
                row = _row(key, model, data, known[name])
                append_row(path, row)
                yield row


@dataclass(frozen=True, eq=False)
class _Data:
    calibration: list[Tensor]
    held: Tensor
    x_test: Any
    y_test: Tensor


def _data(settings: Settings) -> _Data:
    x, _ = cifar10("train")
    x_test, y_test = cifar10("test")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    some = x.subset(torch.tensor(order[: settings.images]))
    held = x.subset(torch.tensor(order[settings.images : settings.images + _HELD]))
    test = torch.arange(settings.tested or len(y_test))
    return _Data(list(batches(some, 128)), held[:], x_test.subset(test), y_test[test])


def _row(key: tuple[Any, ...], model: nn.Module, data: _Data, options: dict[str, Any]) -> Row:
    started = time.process_time()
    with counted_passes() as passes:
        result = prune(model, data.calibration, Macs(key[2]), examples=None, progress=False, **options)
    seconds = time.process_time() - started
    with torch.no_grad():
        apart = divergence(result.model(data.held), model(data.held), data.held)
    right = accuracy(result.model, data.x_test, data.y_test, 128, progress=False)
    found: tuple[Any, ...] = (*key, result.cost.macs / result.cost.dense_macs, apart, right, passes(), seconds)
    return Row(*found)


@contextmanager
def counted_passes() -> Iterator[Callable[[], float]]:
    """Count passes of one example through the network: parts of the graph by their nodes, PruningNets by their calls.

    Every step of `prune` runs the network by `Runner`, so nothing is left out.
    """
    total = [0.0]
    start, advance, generate = Runner.__init__, Runner.advance, PruningNet.forward

    def counting_start(self: Any, graph: Any, batch: Any, *rest: Any, **named: Any) -> None:
        self.counted = count_examples(batch)
        start(self, graph, batch, *rest, **named)

    def counting_advance(self: Any, to: Any = None) -> Any:
        before = self._at
        result = advance(self, to)
        networks = 1 if self._dense is None else 2
        total[0] += self.counted * networks * (self._at - before) / len(self.graph.nodes)
        return result

    def counting_generate(self: Any, widths: Any, batch: Any) -> Any:
        times = 4 if torch.is_grad_enabled() else 1  # the dense target, forward, and twice that for backward
        total[0] += times * count_examples(batch)
        return generate(self, widths, batch)

    Runner.__init__, Runner.advance, PruningNet.forward = counting_start, counting_advance, counting_generate  # type: ignore[method-assign]
    try:
        yield lambda: total[0]
    finally:
        Runner.__init__, Runner.advance, PruningNet.forward = start, advance, generate  # type: ignore[method-assign]


def write(folder: Path, command: str) -> Path:
    """Describe all rows that the CSV file in the folder has."""
    path = folder / f"{NAME}.md"
    path.write_text(page(read_rows(folder / f"{NAME}.csv", Row), command), encoding="utf-8")
    return path


def page(rows: Sequence[Row], command: str) -> str:
    """The rows as Markdown, for each budget in the order of their divergence.

    >>> print(page([Row("amc", 9, 0.5, 64, 100, 0, 0.5, 0.01, 91, 3e4, 1.0)], "ispasp bench search").splitlines()[-1])
    | amc | 9 | 0.500 | 0.0100 | 91.00 | 30,000 | 1 |
    """
    first = rows[0]
    lines = [
        "# Searches of widths at the same budget",
        "",
        f"Made by `{command}`: ResNet20 on CIFAR-10, {first.images:,} calibration images without labels, method and"
        " refit by default, no healing and no fine-tuning. Divergence: of the outputs from the dense network's on"
        f" {_HELD:,} training images that no search has seen. Accuracy: percent of"
        f" {f'the first {first.tested:,}' if first.tested else 'all'} test images. Passes: of one image through the"
        " network, all of pruning included; a backward pass counts as two.",
        "",
        "`uniform` cuts every hidden dimension alike, `allocation` is what `prune` does by itself, `exchanges` is its"
        " `search=`. `legr`, `amc` and `meta` are those of `ispasp_lab.search`; their papers try more candidates"
        " (400 for LeGR and AMC) and train between.",
        "",
    ]  # fmt: skip
    for amount in sorted({row.macs for row in rows}, reverse=True):
        lines += [
            f"## {amount:g} of the MACs",
            "",
            "| search | candidates | MACs | divergence | accuracy, % | passes | CPU s |",
        ]
        lines += ["|---|---:|---:|---:|---:|---:|---:|"]
        for r in sorted((row for row in rows if row.macs == amount), key=lambda row: row.divergence):
            right = f"{r.divergence:.4f} | {r.accuracy:.2f} | {r.passes:,.0f} | {r.cpu_s:,.0f}"
            lines.append(f"| {r.search} | {r.candidates or '-'} | {r.spent:.3f} | {right} |")
        lines.append("")
    return "\n".join(lines)
