"""`ispasp bench healing`: end to end against block by block, judged by held-out examples and scored on test ones.

With `examples`, networks heal on that many: the CIFAR networks on up to all training images, by the same defaults.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ispasp._heal import Heal, heal
from ispasp._prune import prune
from ispasp._widths import first_batches
from ispasp.engine.batches import count_examples
from ispasp.errors import InputError
from ispasp.report import Column, render
from ispasp_lab.benchmarks.accuracy_tasks import NETWORKS
from ispasp_lab.benchmarks.classify import sample
from ispasp_lab.data import batches, cifar10
from ispasp_lab.experiments.records import append_row, read_rows

NAME, PAGE = "healing.csv", "healing.md"
WAYS = {"end to end": False, "by blocks": True}
COLUMNS = [
    Column("task", "network"),
    Column("keep", "keep"),
    Column("examples", "examples", "{:,}".format),
    Column("way", "healed"),
    Column("steps", "steps", "{:,}".format),
    Column("seconds", "CPU seconds", "{:.0f}".format),
    Column("before", "held-out before", "{:.4f}".format),
    Column("after", "after", "{:.4f}".format),
    Column("pruned", "test score before", "{:.2f}".format),
    Column("score", "after", "{:.2f}".format),
]


@dataclass(frozen=True)
class Row:
    """One healed network. `before` and `after` are divergences on held-out examples, `pruned` and `score` on test ones.

    `settings`: the steps that were asked for, and the number of test examples.
    """

    task: str
    keep: float
    method: str
    examples: int
    way: str
    settings: str
    steps: int
    seconds: float
    before: float
    after: float
    pruned: float
    score: float

    @property
    def key(self) -> tuple[str, float, str, int, str, str]:
        """What was asked for."""
        return self.task, self.keep, self.method, self.examples, self.way, self.settings


def run(
    task: str,
    keep: float,
    method: str,
    steps: int = 0,
    block_steps: int = 0,
    test: int = 1000,
    examples: Sequence[int] = (),
    folder: Path | None = None,
) -> Iterator[Row]:
    """Prune once, then heal copies of the network in both ways; 0 steps are the defaults of `Heal`.

    Rows that healing.csv of the folder has are not made again.
    """
    work = NETWORKS[task].load(test)
    whole = sum(map(count_examples, work.healing))
    if examples and max(examples) > whole and not task.startswith("resnet"):
        raise InputError(f"examples={list(examples)} with {task}: it has {whole:,} to heal on, pass at most as many")
    counts = examples or [whole]
    done = set() if folder is None else {row.key for row in read_rows(folder / NAME, Row)}
    model, pruned = None, 0.0
    for count in counts:
        for way, blocks in WAYS.items():
            most = block_steps if blocks else steps
            settings = f"{most or 'default'} steps, {test} test examples"
            row = Row(task, keep, method, count, way, settings, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
            if row.key in done:
                continue
            if model is None:
                model = prune(work.model, work.calibration, keep, method=method, examples=None, progress=False).model
                pruned = work.scores(model)[0]
            healed, started = copy.deepcopy(model), time.process_time()
            config = replace(Heal(augment=work.heal.augment, batch=work.heal.batch), steps=most or None, blocks=blocks)
            given = _images(count) if task.startswith("resnet") else first_batches(work.healing, count)
            gain = heal(healed, work.model, given if examples else work.healing, config, progress=False)
            seconds, score = time.process_time() - started, work.scores(healed)[0]
            row = replace(
                row, steps=gain.steps, seconds=seconds, before=gain.before, after=gain.after, pruned=pruned, score=score
            )
            if folder is not None:
                append_row(folder / NAME, row)
            yield row


def _images(count: int) -> list[Any]:
    """Training images of CIFAR-10, without their labels."""
    images, _ = sample(*cifar10("train"), count)
    return list(batches(images, 128))


def write(folder: Path) -> Path:
    """Write healing.md beside healing.csv, from its rows alone."""
    rows, path = read_rows(folder / NAME, Row), folder / PAGE
    text = (
        "# Healing end to end and block by block\n\nMade by `ispasp bench healing` from [healing.csv](healing.csv). The"
        " pruned network is healed by the defaults of `ispasp.Heal` (images with flips and crops), if the column steps"
        " of the CSV file does not say otherwise, on so many unlabelled training examples. Divergence from the dense"
        f" outputs on held-out ones of them, then the score on test examples.\n\n```\n{as_table(rows)}\n```\n"
    )
    path.write_text(text, encoding="utf-8")
    return path


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One object for each row."""
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row]) -> str:
    """A table a person likes to read."""
    return render("Healing, end to end and block by block", COLUMNS, as_json(rows))
