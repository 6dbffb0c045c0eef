"""`ispasp bench prune`: sequential pruning against one dense forward pass over the same images.

Everything that `ispasp.prune` does counts: copy, survey, lockstep pass, selection, surgery and proof. What the first
export of a process imports stands in a row of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ispasp._apply import apply_
from ispasp._survey import survey
from ispasp.report import Column, render
from ispasp_lab.benchmarks import job
from ispasp_lab.benchmarks.timing import Timing, interleaved, timed

FORWARD, PRUNE, DENSE = "dense forward pass", "prune, compensate=None", "prune, compensate='dense'"
SURVEY, SURGERY = "of it: survey", "of it: copy and surgery"
REST = "of it: lockstep pass, selection, proof"
START = "once in a process: imports of the first export"


@dataclass(frozen=True)
class Row:
    """Median seconds of one job, also as a multiple of the dense forward pass; `runs` are all its seconds.

    Rows that start with "of it" are parts of `prune, compensate=None`.
    """

    what: str
    seconds: float
    ratio: float
    runs: tuple[float, ...]


def run(
    images: int = 128,
    batch: int = 16,
    repeats: int = 3,
    T: int = 20,
    seed: int = 0,
    *,
    size: int = 224,
    progress: bool = True,
) -> list[Row]:
    """Rounds of forward pass, pruning and pruning with compensation; then the parts of pruning."""
    model, batches = job.network(seed), job.images(images, batch, size, seed)
    start_s, _ = timed(job.warm_up)
    job.forward(model, batches[:1])
    small = batches[0][:2]
    plan = survey(model, small).plan(job.RECIPE.keep)
    found = interleaved(
        {
            FORWARD: lambda: job.forward(model, batches),
            PRUNE: lambda: job.prune(model, batches, T),
            DENSE: lambda: job.prune(model, batches, T, "dense"),
            SURVEY: lambda: survey(model, small),
            SURGERY: lambda: apply_(copy.deepcopy(model), plan),
        },
        repeats,
        "prune",
        progress=progress,
    )
    parts = zip(found[PRUNE].runs, found[SURVEY].runs, found[SURGERY].runs, strict=True)
    found[REST] = Timing(tuple(whole - a - b for whole, a, b in parts), None)
    found[START] = Timing((start_s,), None)
    unit = found[FORWARD].median
    return [Row(what, timing.median, timing.median / unit, timing.runs) for what, timing in found.items()]


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries.

    >>> as_json([Row(FORWARD, 9.0, 1.0, (9.0, 8.0, 10.0))])[0]["runs"]
    (9.0, 8.0, 10.0)
    """
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row], images: int = 128, batch: int = 16, T: int = 20) -> str:
    """Rows as a table.

    >>> "1.20x" in as_table([Row(PRUNE, 10.8, 1.2, (10.8,))])
    True
    """
    columns = [
        Column("what", "what"),
        Column("seconds", "seconds", "{:.2f}".format),
        Column("ratio", "forward passes", "{:.2f}x".format),
        Column("runs", "all runs", lambda runs: ", ".join(f"{seconds:.2f}" for seconds in runs)),
    ]
    note = (
        f"torchvision ResNet34, {job.weights()}, recipe {job.RECIPE.name}, {images} images in batches of {batch}, "
        f"sequential order, T = {T}, {torch.get_num_threads()} thread(s); medians of interleaved runs."
    )
    return render("Sequential pruning against one dense forward pass", columns, as_json(rows), note)
