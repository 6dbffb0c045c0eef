"""`ispasp bench healing`: end to end against block by block, judged by held-out examples and scored on test ones."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ispasp._heal import heal
from ispasp._prune import prune
from ispasp.report import Column, render
from ispasp_lab.benchmarks.accuracy_tasks import NETWORKS

COLUMNS = [
    Column("task", "network"),
    Column("keep", "keep"),
    Column("way", "healed"),
    Column("steps", "steps"),
    Column("seconds", "CPU seconds", "{:.0f}".format),
    Column("before", "held-out before", "{:.4f}".format),
    Column("after", "after", "{:.4f}".format),
    Column("score", "test score", "{:.2f}".format),
]


@dataclass(frozen=True)
class Row:
    """One healed network. `before` and `after` are divergences on held-out examples."""

    task: str
    keep: float
    way: str
    steps: int
    seconds: float
    before: float
    after: float
    score: float


def run(task: str, keep: float, method: str, steps: int, block_steps: int, test: int) -> Iterator[Row]:
    """Prune once, then heal copies of the network in both ways."""
    work = NETWORKS[task].load(test)
    pruned = prune(work.model, work.calibration, keep, method=method, examples=None, progress=False).model
    for way, blocks, most in (("end to end", False, steps), ("by blocks", True, block_steps)):
        model, started = copy.deepcopy(pruned), time.process_time()
        config = replace(work.heal, steps=most, blocks=blocks)
        gain = heal(model, work.model, work.healing, config, progress=False)
        seconds = time.process_time() - started
        yield Row(task, keep, way, gain.steps, seconds, gain.before, gain.after, work.scores(model)[0])


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One object for each row."""
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row]) -> str:
    """A table a person likes to read."""
    return render("Healing, end to end and block by block", COLUMNS, as_json(rows))
