"""`ispasp bench memory`: one-shot pruning needs no more memory for many batches than for few.

Every measurement has a process of its own, and its batches are made when they are asked for. Two numbers are told: the
peak of the whole process, and what pruning adds to a process that has PyTorch, the network and one forward pass.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ispasp._options import Compensate
from ispasp._prune import prune
from ispasp.errors import InputError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.report import Column, render, track
from ispasp_lab.benchmarks import timing
from ispasp_lab.benchmarks.job import forward, warm_up

COMPENSATIONS: tuple[Compensate, ...] = (None, "local")


@dataclass(frozen=True)
class Row:
    """Megabytes of one run. `ratio` and `extra_ratio` compare with the run of the fewest batches."""

    compensate: Compensate
    batches: int
    peak_mb: float
    extra_mb: float
    ratio: float
    extra_ratio: float


@dataclass(frozen=True)
class Generated:
    """Batches of noise, made one at a time, as often as they are gone through.

    >>> data = Generated(count=2, batch=3, size=4)
    >>> [x.shape for x in data] == [x.shape for x in data] == [torch.Size([3, 3, 4, 4])] * 2
    True
    """

    count: int
    batch: int
    size: int

    def __iter__(self) -> Iterator[Tensor]:
        """From the first one on."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            yield torch.randn(self.batch, 3, self.size, self.size, generator=generator)


def run(
    batches: Sequence[int] = (4, 64),
    batch: int = 16,
    size: int = 64,
    *,
    compensations: Sequence[Compensate] = COMPENSATIONS,
    progress: bool = True,
) -> list[Row]:
    """One process for each number of batches and compensation.

    >>> run(batches=())
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: no numbers of batches: pass some, such as 4 and 64
    """
    if not batches:
        raise InputError("no numbers of batches: pass some, such as 4 and 64")
    jobs = [(compensate, count) for compensate in compensations for count in sorted(batches)]
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    for compensate, count in track(jobs, "memory", show=progress):
        with ProcessPoolExecutor(1, context) as pool:
            peak, extra = pool.submit(measure, compensate, Generated(count, batch, size)).result()
        few = next((row for row in rows if row.compensate == compensate), None)
        ratios = (1.0, 1.0) if few is None else (peak / few.peak_mb, extra / few.extra_mb)
        rows.append(Row(compensate, count, peak, extra, *ratios))
    return rows


def measure(compensate: Compensate, batches: Generated) -> tuple[float, float]:
    """Megabytes at the peak of this process, and how many of them came by pruning."""
    torch.manual_seed(0)
    model = import_torchvision().models.resnet18().eval()
    warm_up()
    forward(model, Generated(1, batches.batch, batches.size))
    before, _ = timing.memory()
    prune(model, batches, 0.5, method="ispasp", order="oneshot", compensate=compensate, examples=None, progress=False)
    _, peak = timing.memory()
    return peak / timing.MB, (peak - before) / timing.MB


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries.

    >>> as_json([Row(None, 4, 800.0, 200.0, 1.0, 1.0)])[0]["peak_mb"]
    800.0
    """
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row], batch: int = 16, size: int = 64) -> str:
    """Rows as a table.

    >>> "+1.5 %" in as_table([Row("local", 64, 800.0, 200.0, 1.015, 1.1)])
    True
    """
    columns = [
        Column("compensate", "compensate"),
        Column("batches", "batches"),
        Column("peak_mb", "peak, MB", "{:.0f}".format),
        Column("ratio", "against fewest", _percent),
        Column("extra_mb", "by pruning, MB", "{:.0f}".format),
        Column("extra_ratio", "against fewest", _percent),
    ]
    shown = [{**asdict(row), "compensate": str(row.compensate)} for row in rows]
    note = (
        f"torchvision ResNet18 at {size} x {size}, batches of {batch}, keep 0.5, order='oneshot', method ispasp; peak "
        "resident memory, each run in a process of its own."
    )
    return render("Memory of one-shot pruning", columns, shown, note)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
