"""Figure "MNIST" (Section 6.2, Appendix A.2): two-layer networks pruned by i-SpaSP, GFS and Top-K.

The sizes of the paper's figure are not in its text: ours are. Every trial trains its own dense network. A random draw
stands beside as the control that says how much of a result is fine-tuning.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from ispasp.errors import InputError
from ispasp.report import track
from ispasp_lab.experiments.mnist_network import Digits, Settings, dense, evaluate, outputs, smaller, train
from ispasp_lab.experiments.mnist_prune import METHODS, Task, choose

SIZES: tuple[int, ...] = (50, 100, 200, 400)
RATES = (1e-3, 1e-2)  # the paper does not say: the one it trains with here, and the one it fine-tunes with elsewhere
QUICK = Settings(hidden=1000, epochs=3, finetune_epochs=1, examples=12_000)
QUICK_SIZES: tuple[int, ...] = (25, 50, 100)
Key = tuple[int, str, int, float | None]


@dataclass(frozen=True)
class Row:
    """One pruned network on the test data, before and after fine-tuning; accuracies in percent, loss: cross entropy.

    `output_error` is ||f_S - f|| / ||f|| of its logits before fine-tuning. A dense network is not fine-tuned.
    """

    settings: str
    trial: int
    method: str
    kept: int
    pruning_s: float
    output_error: float
    accuracy: float
    loss: float
    finetune_lr: float | None = None
    finetuned_accuracy: float | None = None
    finetuned_loss: float | None = None

    @property
    def key(self) -> Key:
        """The key of this row among those with the same settings."""
        return self.trial, self.method, self.kept, self.finetune_lr


def run(
    settings: Settings,
    folder: Path,
    sizes: Sequence[int] = SIZES,
    rates: Sequence[float] = RATES,
    methods: Sequence[str] = tuple(METHODS),
    trials: int = 3,
    *,
    progress: bool = True,
) -> list[Row]:
    """All rows of the grid, fine-tuned with each learning rate of `rates`.

    Those in mnist.csv of the folder are not made again; each new one is added to it at once. Dense networks are kept in
    the folder too, so that a run that was cut off goes on where it was.
    """
    sizes, rates = sorted(set(sizes)), [float(f"{rate:.6g}") for rate in rates]  # as the table can hold them
    _check(settings, sizes, rates, methods, trials)
    data, path = Digits.load(settings.examples), folder / "mnist.csv"
    rows = read(path)
    done = {row.key for row in rows if row.settings == str(settings)}
    wanted: list[Key] = []
    for trial, method in track([(t, m) for t in range(trials) for m in ("dense", *methods)], "mnist", show=progress):
        grid = product(sizes, rates) if method != "dense" else [(settings.hidden, None)]
        keys = [(trial, method, size, rate) for size, rate in grid]
        wanted += keys
        missing = [key for key in keys if key not in done]
        if not missing:
            continue
        task = Task(dense(settings, data, trial, folder, progress=progress), data, settings, trial)
        for row in _rows(task, method, missing):
            rows.append(row)
            save(rows, path)
    saved = {row.key: row for row in read(path) if row.settings == str(settings)}  # the same rows, resumed or not
    return [saved[key] for key in wanted]


def _rows(task: Task, method: str, missing: Sequence[Key]) -> Iterator[Row]:
    settings, data = task.settings, task.data
    if method == "dense":
        yield Row(str(settings), task.trial, method, settings.hidden, 0.0, 0.0, *evaluate(task.net, data))
        return
    truth = outputs(task.net, data.x_test)
    sizes = sorted({size for _, _, size, _ in missing})
    for size, choice in zip(sizes, choose(method, task, sizes), strict=True):
        net = smaller(task.net, choice.kept)
        error = float((outputs(net, data.x_test) - truth).norm() / truth.norm())
        row = Row(str(settings), task.trial, method, size, choice.seconds, error, *evaluate(net, data))
        for rate in [rate for _, _, of, rate in missing if of == size and rate is not None]:
            net = smaller(task.net, choice.kept)
            train(net, data, settings.finetune_epochs, rate, settings.batch, settings.seed + task.trial, progress=False)
            right, loss = evaluate(net, data)
            yield replace(row, finetune_lr=rate, finetuned_accuracy=right, finetuned_loss=loss)


def _check(
    settings: Settings, sizes: Sequence[int], rates: Sequence[float], methods: Sequence[str], trials: int
) -> None:
    if not sizes or sizes[0] < 1 or sizes[-1] > settings.hidden:
        raise InputError(f"sizes={list(sizes)}: pass numbers of units to keep, from 1 to {settings.hidden}")
    if not rates or len(set(rates)) < len(rates):
        raise InputError(f"rates={list(rates)}: pass different learning rates for fine-tuning, at least one")
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise InputError(f"methods={list(methods)}: choose from {', '.join(METHODS)}")
    if trials < 1:
        raise InputError(f"trials={trials}: pass 1 or more")


def save(rows: Sequence[Row], path: Path) -> None:
    """Write rows as CSV, all or nothing.

    >>> from tempfile import TemporaryDirectory
    >>> row = Row("a=1", 0, "topk", 50, 0.25, 0.5, 90.0, 0.75, 0.001, 95.0, 0.125)
    >>> with TemporaryDirectory() as folder:
    ...     save([row], Path(folder) / "mnist.csv"); read(Path(folder) / "mnist.csv") == [row]
    True
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(field.name for field in fields(Row))
        lines.writerows([_written(getattr(row, field.name)) for field in fields(Row)] for row in rows)
    part.replace(path)


def read(path: Path) -> list[Row]:
    """Rows of a CSV file that `save` wrote; none if there is no such file.

    >>> read(Path("no-such-folder") / "mnist.csv")
    []
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        names = [field.name for field in fields(Row)]
        if lines.fieldnames != names:
            raise InputError(f"{path} has the columns {lines.fieldnames}, not {names}: choose another folder")
        return [_row(line) for line in lines]


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _row(line: dict[str, str]) -> Row:
    def number(name: str) -> float | None:
        return float(line[name]) if line[name] else None

    return Row(
        settings=line["settings"],
        trial=int(line["trial"]),
        method=line["method"],
        kept=int(line["kept"]),
        pruning_s=float(line["pruning_s"]),
        output_error=float(line["output_error"]),
        accuracy=float(line["accuracy"]),
        loss=float(line["loss"]),
        finetune_lr=number("finetune_lr"),
        finetuned_accuracy=number("finetuned_accuracy"),
        finetuned_loss=number("finetuned_loss"),
    )
