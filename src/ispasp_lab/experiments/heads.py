"""Table "XNLI" (Section 6.4, Appendix A.4): attention heads of a BERT pruned to 25 % and 40 % and fine-tuned again.

The paper's mBERT on XNLI is a setting for those who have it (`--model`, `--data`). Beside the paper's three methods,
which leave weights as they are, stands i-SpaSP with compensation, and a random choice with compensation as its control.
What heads give has signs, which cancel in the sums that the paper ranks, so i-SpaSP by magnitude stands there as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from ispasp._options import Compensate
from ispasp._prune import prune
from ispasp.errors import InputError, IspaspError
from ispasp.result import Result
from ispasp.select import ISpaSP, Random, Selector, Taylor
from ispasp_lab.data.text import Batch
from ispasp_lab.experiments.heads_network import Settings, Task, dense, inputs_of, task, top1, train
from ispasp_lab.experiments.records import append_row, read_rows, rewrite

KEEPS = (0.25, 0.4)
MAGNITUDE = "ispasp-magnitude"
VARIANTS = (
    *((method, "none") for method in ("ispasp", MAGNITUDE, "random", "taylor")),
    *((method, "dense") for method in ("ispasp", MAGNITUDE, "random")),
)
DENSE = "dense network"
NAME = "heads.csv"
Key = tuple[int, str, str, float]


@dataclass(frozen=True)
class Row:
    """One pruned network: accuracy in percent right after pruning, and after training again.

    `heads`: how many stay in every layer; `macs`: as a part of the dense network's; `cpu_s`: processor time of pruning,
    all threads together. Where a method cannot run, `note` says why.
    """

    settings: str
    data: str
    trial: int
    method: str
    compensate: str
    keep: float
    heads: str
    accuracy: float | None
    finetuned: float | None
    macs: float | None
    cpu_s: float | None
    note: str = ""

    @property
    def key(self) -> Key:
        """The key of this row among those with the same settings."""
        return self.trial, self.method, self.compensate, self.keep


def quick(settings: Settings) -> Settings:
    """Few sentences: under two minutes with one size."""
    return replace(settings, train=800, tested=200, examples=64, epochs=1.0, batch=16, length=32)


def run(
    settings: Settings,
    folder: Path,
    keeps: Sequence[float] = KEEPS,
    variants: Sequence[tuple[str, str]] = VARIANTS,
    trials: int = 1,
    *,
    progress: bool = True,
) -> Iterator[Row]:
    """Make the rows that heads.csv in the folder does not have yet, and yield each when it is there.

    All trials prune the same dense network; they differ in the sentences for pruning, the random choice, and the order
    of training. Rows of methods that could not run are tried again.
    """
    if trials < 1 or not all(0 < keep <= 1 for keep in keeps):
        raise InputError(f"trials={trials}, keep={list(keeps)}: pass 1 or more trials, and fractions above 0")
    path = folder / NAME
    done = _known(path, settings)
    grid: list[Key] = [(0, DENSE, "none", 1.0)]
    grid += [(trial, *variant, keep) for trial in range(trials) for keep in keeps for variant in variants]
    missing = [key for key in grid if key not in done]
    if not missing:
        return
    work = task(settings)
    model, test = dense(work, folder, progress=progress), work.test()
    for key in missing:
        row = _row(work, model, test, key, progress=progress)
        append_row(path, row)
        yield row


def _known(path: Path, settings: Settings) -> set[Key]:
    """Rows of this data; other data may stand in the same file."""
    rows = read_rows(path, Row)
    blank = _blank(settings)
    for row in rows:
        if row.data == blank.data and row.settings != blank.settings:
            raise InputError(f"{path} holds rows of {row.settings}, not {blank.settings}: choose another folder")
    good = [row for row in rows if row.finetuned is not None or row.method == DENSE]
    if path.exists():
        rewrite(path, good)
    return {row.key for row in good if row.data == blank.data}


def _blank(settings: Settings) -> Row:
    language = f"-{settings.language}" if settings.language else ""
    data = f"{Path(settings.data).name}{language}"
    return Row(str(settings), data, 0, "", "", 1.0, "", None, None, None, None)


def _row(work: Task, model: nn.Module, test: Sequence[Batch], key: Key, *, progress: bool) -> Row:
    settings = work.settings
    trial, method, compensate, keep = key
    row = replace(_blank(settings), trial=trial, method=method, compensate=compensate, keep=keep)
    if method == DENSE:
        return replace(row, accuracy=top1(model, test))
    started = time.process_time()
    seed = settings.seed + trial
    try:
        result = pruned(model, work.calibration(seed), keep, method, compensate, seed)
    except IspaspError as error:
        return replace(row, note=str(error))
    seconds = time.process_time() - started
    before = top1(result.model, test)
    train(result.model, work, settings.again, seed + 1000, progress=progress)
    return replace(
        row,
        heads=" ".join(str(layer.kept) for layer in result.layers),
        accuracy=before,
        finetuned=top1(result.model, test),
        macs=result.cost.macs / result.cost.dense_macs,
        cpu_s=seconds,
    )


def pruned(model: nn.Module, batches: Sequence[Batch], keep: float, method: str, compensate: str, seed: int) -> Result:
    """Heads of all layers: i-SpaSP and random choice layer by layer, sensitivities of all layers ranked together.

    `batches` carry "labels", which only the sensitivities see.
    """
    selectors: dict[str, Selector] = {
        "ispasp": ISpaSP(iterations=20),
        MAGNITUDE: ISpaSP(iterations=20, rank="magnitude"),
        "random": Random(seed=seed),
        "taylor": Taylor(),
    }
    if method not in selectors:
        raise InputError(f"method {method!r}: this experiment has {', '.join(selectors)}")
    return prune(
        model,
        batches,
        keep=keep,
        method=selectors[method],
        compensate=None if compensate == "none" else cast("Compensate", compensate),
        refit="consumers",  # as the pages were measured
        order="global" if method == "taylor" else "sequential",
        kinds=("head",),
        input_of=inputs_of,
        examples=None,
        loss=cross_entropy,
        progress=False,
    )


def cross_entropy(output: Any, batch: Batch) -> Tensor:
    """The loss of a batch with labels."""
    return functional.cross_entropy(output["logits"], batch["labels"])
