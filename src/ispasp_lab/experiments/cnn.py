"""Table "ImageNet" (Section 6.3, Appendix A.3) without fine-tuning: every method, several sizes, with compensation.

Fine-tuning hides much of what a method did. Here top-1 accuracy is taken right after pruning, and beside every method
stands what compensation makes of its choice. `cnn_pipeline` is the paper's whole pipeline with fine-tuning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from ispasp._options import Compensate
from ispasp._prune import prune
from ispasp._survey import survey
from ispasp.errors import InputError, IspaspError
from ispasp.report import track
from ispasp.result import Result
from ispasp.select import methods, selector
from ispasp_lab.accuracy import accuracy
from ispasp_lab.data import batches
from ispasp_lab.experiments.cnn_setup import Images, load_images, load_network
from ispasp_lab.experiments.records import append_row, read_rows, rewrite

KEEPS = (0.25, 0.4, 0.5, 0.75)
COMPENSATIONS = ("none", "local", "dense")
DENSE = "dense network"
QUICK_METHODS = ("ispasp", "topk", "random", "l1", "taylor")


@dataclass(frozen=True)
class Settings:
    """On what to prune: `examples` calibration images, `tested` test images (0: all); `memory`: bytes, see `prune`."""

    model: str = "cifar_resnet56"
    data: str = "cifar10"
    examples: int = 1280
    tested: int = 0
    seed: int = 0
    batch: int = 128
    weights: Path | None = None
    memory: int | None = None

    @property
    def stem(self) -> str:
        """The name of the files, such as cnn-cifar10."""
        return f"cnn-{Path(self.data).name}"


@dataclass(frozen=True)
class Row:
    """One pruned network. Where a method cannot run, `note` says why.

    `accuracy`: percent of the test images; `cpu_s`: processor time of pruning, all threads together.
    """

    model: str
    data: str
    examples: int
    tested: int
    seed: int
    method: str
    compensate: str
    keep: float
    accuracy: float | None
    macs: float | None
    params: float | None
    cpu_s: float | None
    note: str = ""

    @property
    def key(self) -> tuple[str, str, float]:
        """The key of this row among those with the same settings."""
        return self.method, self.compensate, self.keep


def quick(settings: Settings) -> Settings:
    """Few images: under two minutes with one size and `QUICK_METHODS`."""
    return replace(settings, examples=64, tested=200, batch=32)


def default_methods() -> list[str]:
    """All methods but those that run the network for every unit they try.

    >>> "ispasp" in default_methods(), "gfs" in default_methods()
    (True, False)
    """
    return [name for name in methods() if "task" not in selector(name).needs]


def run(
    settings: Settings,
    folder: Path,
    names: Sequence[str] = (),
    keeps: Sequence[float] = KEEPS,
    compensations: Sequence[str] = COMPENSATIONS,
    *,
    progress: bool = True,
) -> Iterator[Row]:
    """Make the rows of the grid that the CSV file in the folder does not have yet, and yield each when it is there.

    Rows of methods that could not run are tried again.
    """
    names = names or default_methods()
    _check(names, keeps, compensations)
    path = folder / f"{settings.stem}.csv"
    done = _known(path, settings)
    grid = [(DENSE, "none", 1.0), *((m, c, k) for k, c, m in product(keeps, compensations, names))]
    missing = [key for key in dict.fromkeys(grid) if key not in done]
    if not missing:
        return
    model = load_network(settings.model, settings.weights)
    images = load_images(settings.data).some(settings.examples, settings.tested, settings.seed)
    for method, compensate, keep in track(missing, settings.stem, show=progress):
        row = _row(settings, model, images, method, compensate, keep)
        append_row(path, row)
        yield row


def _known(path: Path, settings: Settings) -> set[tuple[str, str, float]]:
    rows = read_rows(path, Row)
    mine = _blank(settings)
    for row in rows:
        if any(getattr(row, name) != getattr(mine, name) for name in ("model", "data", "examples", "tested", "seed")):
            raise InputError(
                f"{path} holds rows of {row.model} on {row.data} with {row.examples} examples, {row.tested} tested, "
                f"seed {row.seed}: choose another folder for other settings"
            )
    good = [row for row in rows if row.accuracy is not None]
    if path.exists():
        rewrite(path, good)
    return {row.key for row in good}


def _blank(settings: Settings) -> Row:
    s = settings
    return Row(s.model, Path(s.data).name, s.examples, s.tested, s.seed, "", "", 1.0, None, None, None, None)


def _row(settings: Settings, model: nn.Module, images: Images, method: str, compensate: str, keep: float) -> Row:
    row = replace(_blank(settings), method=method, compensate=compensate, keep=keep)
    started = time.process_time()
    if method == DENSE:
        cost = survey(model, images.x[:2]).cost()
        return replace(row, accuracy=_top1(model, images, settings), macs=cost.dense_macs, params=cost.dense_params)
    try:
        result = _pruned(settings, model, images, method, compensate, keep)
    except IspaspError as error:
        return replace(row, note=str(error))
    seconds = time.process_time() - started
    right = _top1(result.model, images, settings)
    return replace(row, accuracy=right, macs=result.cost.macs, params=result.cost.params, cpu_s=seconds)


def _pruned(settings: Settings, model: nn.Module, images: Images, method: str, compensate: str, keep: float) -> Result:
    """Gradients of all layers come from one backward pass of the dense network; for each layer anew they cost more."""
    return prune(
        model,
        list(batches(images.x, settings.batch, images.y)),
        keep=keep,
        method=method,
        compensate=None if compensate == "none" else cast("Compensate", compensate),
        refit="consumers",  # as the pages were measured
        order="oneshot" if "sensitivity" in selector(method).needs else "sequential",
        examples=None,
        loss=cross_entropy,
        memory=settings.memory,
        progress=False,
    )


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    """The loss of a batch (images, labels)."""
    return functional.cross_entropy(output, batch[1])


def _top1(model: nn.Module, images: Images, settings: Settings) -> float:
    return accuracy(model, images.x_test, images.y_test, settings.batch, progress=False)


def _check(names: Sequence[str], keeps: Sequence[float], compensations: Sequence[str]) -> None:
    for name in names:
        selector(name)
    wrong = [keep for keep in keeps if not 0 < keep <= 1]
    if wrong or not keeps:
        raise InputError(f"keep={list(keeps)}: pass fractions above 0 and at most 1, such as 0.5")
    unknown = [name for name in compensations if name not in COMPENSATIONS]
    if unknown or not compensations:
        raise InputError(f"compensate={list(compensations)}: choose from {', '.join(COMPENSATIONS)}")
