"""A classifier pruned by several methods and compensations, without fine-tuning: what `cifar` and `mobilenet` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ispasp._options import Compensate
from ispasp._prune import prune
from ispasp._survey import survey
from ispasp.errors import InputError
from ispasp.report import Column, render, track
from ispasp.result import Result
from ispasp.select import selector
from ispasp_lab.accuracy import accuracy
from ispasp_lab.benchmarks.timing import timed
from ispasp_lab.data import Files, Pixels, batches

COMPENSATIONS: tuple[Compensate, ...] = (None, "local", "dense")
METHODS = ("ispasp", "l1")


@dataclass(frozen=True)
class Row:
    """One network: top-1 accuracy in percent, and the seconds that pruning took (None: the dense network)."""

    method: str
    compensate: str
    accuracy: float
    seconds: float | None
    params: int
    macs: int


@dataclass(frozen=True, eq=False)
class Task:
    """A classifier, images to calibrate with in batches of `batch`, and labelled images to test with."""

    model: nn.Module
    calibration: Pixels | Files
    test: Pixels | Files
    labels: Tensor
    batch: int


def sample(x: Pixels | Files, y: Tensor, count: int, seed: int = 0) -> tuple[Pixels | Files, Tensor]:
    """`count` of the images drawn at random, with their labels; all of them in their order if that is how many.

    >>> x = Pixels(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), ((0.0,), (1.0,)))
    >>> [len(part) for part in sample(x, torch.arange(5), 3)]
    [3, 3]
    """
    if not 1 <= count <= len(x):
        raise InputError(f"{count} images of {len(x)}: pass a number from 1 to {len(x)}")
    if count == len(x):
        return x, y
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]
    return x.subset(chosen), y[chosen]


def run(
    task: Task,
    keep: Any,
    methods: Sequence[str] = METHODS,
    compensations: Sequence[Compensate] = COMPENSATIONS,
    *,
    progress: bool = True,
) -> list[Row]:
    """The dense network, then every method with every compensation."""
    for method in methods:
        selector(method)  # an unknown name is told before anything is run
    found = list(batches(task.calibration, task.batch))
    cost = survey(task.model, found[0][:2]).cost()
    rows = [Row("dense", "", _accuracy(task, task.model), None, cost.dense_params, cost.dense_macs)]
    jobs = list(product(methods, compensations))
    for method, compensate in track(jobs, "pruning", show=progress):
        seconds, result = timed(partial(_pruned, task.model, found, keep, method, compensate))
        cost = result.cost
        rows.append(Row(method, str(compensate), _accuracy(task, result.model), seconds, cost.params, cost.macs))
    return rows


def _pruned(model: nn.Module, found: list[Tensor], keep: Any, method: str, compensate: Compensate) -> Result:
    return prune(
        model,
        found,
        keep,
        method=method,
        compensate=compensate,
        refit="consumers",  # as the pages were measured
        loss=own_label_loss,
        examples=None,
        progress=False,
    )


def own_label_loss(output: Tensor, batch: Any) -> Tensor:
    """Cross-entropy with the network's own answers as labels, for methods that need gradients: images have none.

    >>> float(own_label_loss(torch.tensor([[100.0, 0.0]]), None))
    0.0
    """
    return nn.functional.cross_entropy(output, output.detach().argmax(1))


def _accuracy(task: Task, model: nn.Module) -> float:
    return accuracy(model, task.test, task.labels, task.batch, progress=False)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries.

    >>> as_json([Row("l1", "dense", 88.5, 20.0, 430_000, 63_000_000)])[0]["accuracy"]
    88.5
    """
    return [asdict(row) for row in rows]


def as_table(title: str, rows: Sequence[Row], note: str) -> str:
    """Rows as a table.

    >>> "88.50 %" in as_table("Pruned", [Row("l1", "dense", 88.5, 20.0, 430_000, 63_000_000)], "No fine-tuning.")
    True
    """
    columns = [
        Column("method", "method"),
        Column("compensate", "compensate"),
        Column("accuracy", "top-1", "{:.2f} %".format),
        Column("params", "params, M", lambda count: f"{count / 1e6:.2f}"),
        Column("macs", "MACs, M", lambda count: f"{count / 1e6:.1f}"),
        Column("seconds", "seconds", "{:.1f}".format),
    ]
    return render(title, columns, as_json(rows), note)
