"""`ispasp demo`: the main job on data that is already here.

Trains a small network on scikit-learn's handwritten digits, prunes it with every method, with and without compensation,
and heals and fine-tunes each result alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ispasp._finetune import finetune
from ispasp._heal import Heal, heal
from ispasp._options import Compensate
from ispasp._prune import prune
from ispasp._store import save
from ispasp.errors import IspaspError, MissingExtraError
from ispasp.graph.state import copied
from ispasp.report import Column, render, track
from ispasp.report.html import html
from ispasp.result import Result
from ispasp.select import GFS, methods
from ispasp.train import Sgd
from ispasp.types import units_to_keep
from ispasp_lab.accuracy import accuracy

WIDTHS = (64, 256, 128, 10)
CALIBRATION = 512  # images, of those it was trained on
SHOWN = "auto"  # the method whose result is saved and reported
HEAL = Heal(steps=150)
_QUICK = {"gfs": GFS(candidates=50)}  # the stochastic variant: all units in every step take most of a minute
_NOTE = 42  # letters of what a method says that cannot be used here


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8 x 8 pixels in [0, 1], split at random into training and test data."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @staticmethod
    def load(seed: int = 0) -> Digits:
        """Read the data that scikit-learn carries; nothing is downloaded.

        x (1347, 64), y (1347,), x_test (450, 64), y_test (450,).

        >>> Digits.load().x_test.shape
        torch.Size([450, 64])
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise MissingExtraError("the demo needs scikit-learn: pip install 'ispasp[demo]'") from error
        data = load_digits()
        x = torch.tensor(data.data, dtype=torch.float32) / 16
        y = torch.tensor(data.target)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        train, test = order[:1347], order[1347:]
        return Digits(x[train], y[train], x[test], y[test])


@dataclass(frozen=True)
class Row:
    """One network of the demo's table; accuracies in percent on the test data."""

    method: str
    parameters: int | None = None
    macs: int | None = None
    plain: float | None = None  # pruned, nothing else
    compensated: float | None = None
    healed: float | None = None  # compensated, then trained towards the dense network, without labels
    finetuned: float | None = None  # compensated, then trained with labels
    note: str = ""


@dataclass(frozen=True, eq=False)
class Demo:
    """The table, and the result that the report shows."""

    rows: tuple[Row, ...]
    result: Result


def network(seed: int = 0) -> nn.Sequential:
    """A multi-layer perceptron with two hidden layers: (batch, 64) -> (batch, 10).

    >>> network()(torch.zeros(5, 64)).shape
    torch.Size([5, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(WIDTHS):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, data: Digits, epochs: int, lr: float, seed: int = 0) -> None:
    """SGD with momentum and a cosine schedule, batches of 64; changes the model.

    >>> model, data = network(), Digits.load()
    >>> train(model, data, epochs=1, lr=0.1)
    >>> accuracy(model, data.x_test, data.y_test) > 50
    True
    """
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=64, shuffle=True)
    finetune(model, loader, epochs=epochs, recipe=Sgd(lr=lr), seed=seed, progress=False)


def run(
    keep: float = 0.2, seed: int = 0, *, epochs: int = 30, only: Sequence[str] | None = None, progress: bool = True
) -> Demo:
    """Train, prune with every method (or `only` some), fine-tune; one row for each network.

    >>> [row.method for row in run(epochs=1, only=["l1"], progress=False).rows]
    ['dense', 'l1']
    """
    units_to_keep(keep, WIDTHS[1])  # tells at once, not after training
    with _one_thread():
        data = Digits.load(seed)
        dense = network(seed)
        train(dense, data, epochs, lr=0.1, seed=seed)
        shown = _pruned(dense, data, keep, SHOWN, "dense", curves=True, heal=HEAL)
        reached = accuracy(dense, data.x_test, data.y_test, progress=False)
        rows = [Row("dense", shown.cost.dense_params, shown.cost.dense_macs, reached)]
        for method in track(only or methods(), "pruning digits", show=progress):
            rows.append(_row(dense, data, keep, method, max(1, epochs // 6), seed))
    return Demo(tuple(rows), shown)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: for matrices this small, threads cost more than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def write(demo: Demo, folder: Path, command: str = "ispasp demo") -> Path:
    """Save the pruned network and its report; returns the report."""
    save(demo.result, folder)
    told = {**json.loads(demo.result.to_json()), "model": "Handwritten digits", "command": command}
    report = folder / "report.html"
    report.write_text(html(told, demo.result.curves, demo.result.tradeoffs), encoding="utf-8")
    return report


def as_table(rows: tuple[Row, ...], keep: float) -> str:
    """The rows as text.

    >>> print(as_table((Row("dense", 50826, 50432, 98.0),), keep=0.2))
                         Pruning a network on handwritten digits
    ┏━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━━┓
    ┃ network ┃ parameters ┃   MACs ┃ pruned ┃ compensated ┃ + healed ┃ + fine-tuned ┃
    ┡━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━━┩
    │ dense   │     50,826 │ 50,432 │ 98.0 % │           - │        - │            - │
    └─────────┴────────────┴────────┴────────┴─────────────┴──────────┴──────────────┘
    digits, 64-256-128-10 ReLU network, keep=0.2; accuracy on 450 test images.
    Compensated ...
    """
    percent = "{:.1f} %".format
    columns = [
        Column("method", "network"),
        Column("parameters", "parameters", "{:,}".format),
        Column("macs", "MACs", "{:,}".format),
        Column("plain", "pruned", percent),
        Column("compensated", "compensated", percent),
        Column("healed", "+ healed", percent),
        Column("finetuned", "+ fine-tuned", percent),
    ]
    if any(row.note for row in rows):
        columns.append(Column("note", "why not"))
    note = (
        f"digits, {'-'.join(map(str, WIDTHS))} ReLU network, keep={keep}; accuracy on 450 test images. Compensated "
        f"(weights refitted) and healed (trained towards the dense network) with {CALIBRATION} images without labels; "
        "fine-tuned from compensated, with all labels. gfs tries 50 units in every step."
    )
    return render("Pruning a network on handwritten digits", columns, [vars(row) for row in rows], note)


def _row(dense: nn.Module, data: Digits, keep: float, method: str, epochs: int, seed: int) -> Row:
    found: dict[str, Any] = {}
    try:
        plain = _pruned(dense, data, keep, method, None).model
        result = _pruned(dense, data, keep, method, "dense")
        healed, tuned = copied(result.model), copied(result.model)
        heal(healed, dense, data.x[:CALIBRATION], HEAL, progress=False)
        train(tuned, data, epochs, lr=0.02, seed=seed)
        networks = {"plain": plain, "compensated": result.model, "healed": healed, "finetuned": tuned}
        for name, model in networks.items():
            found[name] = accuracy(model, data.x_test, data.y_test, progress=False)
    except IspaspError as error:
        text = " ".join(str(error.__cause__ or error).split())  # the cause does not begin with where it was
        return Row(method, note=text if len(text) <= _NOTE else f"{text[:_NOTE].rstrip()}...")
    return Row(method, result.cost.params, result.cost.macs, **found)


def _pruned(dense: nn.Module, data: Digits, keep: float, method: str, compensate: Compensate, **options: Any) -> Result:
    batch = (data.x[:CALIBRATION], data.y[:CALIBRATION])  # labels are for those methods only that look at the task
    return prune(
        dense,
        [batch],
        keep=keep,
        method=_QUICK.get(method, method),
        compensate=compensate,
        loss=lambda output, pair: cross_entropy(output, pair[1]),
        progress=False,
        **options,
    )
