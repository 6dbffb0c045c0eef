"""`ispasp demo`: the main job on data that is already here.

Trains a small network on scikit-learn's handwritten digits, prunes its hidden layers from first to last with each
method, and fine-tunes each result alike.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from ispasp.calibrate import measure
from ispasp.errors import MissingExtraError
from ispasp.report import Column, render, track
from ispasp.select import Selector, selector
from ispasp.types import LinearConsumer, Statistics

WIDTHS = (64, 256, 128, 10)
TITLES = {"ispasp": "i-SpaSP", "topk": "Top-K", "random": "random"}


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8 x 8 pixels in [0, 1], split at random into training and test data."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @staticmethod
    def load(seed: int = 0) -> Digits:
        """Read the data that scikit-learn carries; nothing is downloaded."""
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
    parameters: int
    macs: int
    accuracy: float
    finetuned: float | None


def network(seed: int = 0) -> nn.Sequential:
    """A multi-layer perceptron with two hidden layers."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(WIDTHS):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, data: Digits, epochs: int, lr: float, seed: int = 0) -> None:
    """SGD with momentum and a cosine schedule, batches of 64."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for index in torch.split(torch.randperm(len(data.x), generator=generator), 64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x[index]), data.y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Percent of the test images classified rightly."""
    return 100 * float((model(data.x_test).argmax(1) == data.y_test).float().mean())


@torch.no_grad()
def pruned(model: nn.Sequential, x: Tensor, keep: float, method: Selector) -> nn.Sequential:
    """A copy whose hidden layers are pruned from first to last, each seeing the layers already pruned."""
    model = copy.deepcopy(model)
    linears = [i for i, layer in enumerate(model) if isinstance(layer, nn.Linear)]
    for i, j in pairwise(linears):
        producer, consumer = cast(nn.Linear, model[i]), cast(nn.Linear, model[j])
        A = LinearConsumer(consumer.weight)
        reading = measure(A, model[:j](x), {"moment", *method.needs})
        kept = list(method.select(Statistics(A.channels, (reading,)), keep).kept)
        model[i] = _linear(producer.weight[kept], producer.bias[kept])
        model[j] = _linear(consumer.weight[:, kept], consumer.bias)
    return model


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return layer


def cost(model: nn.Module) -> tuple[int, int]:
    """Parameters and multiply-accumulates for one image."""
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return sum(p.numel() for p in model.parameters()), sum(layer.weight.numel() for layer in linears)


def run(keep: float = 0.2, seed: int = 0, *, epochs: int = 30, progress: bool = True) -> list[Row]:
    """Train, prune with every method, fine-tune; one row for each network."""
    data = Digits.load(seed)
    dense = network(seed)
    train(dense, data, epochs=epochs, lr=0.1, seed=seed)
    rows = [Row("dense", *cost(dense), accuracy(dense, data), None)]
    for name in track(TITLES, "pruning digits", show=progress):
        model = pruned(dense, data.x[:512], keep, selector(name))
        before = accuracy(model, data)
        train(model, data, epochs=max(1, epochs // 6), lr=0.02, seed=seed)
        rows.append(Row(TITLES[name], *cost(model), before, accuracy(model, data)))
    return rows


def as_table(rows: list[Row], keep: float) -> str:
    """The rows as text."""
    percent = "{:.1f} %".format
    columns = [
        Column("method", "network"),
        Column("parameters", "parameters", "{:,}".format),
        Column("macs", "MACs", "{:,}".format),
        Column("accuracy", "accuracy", percent),
        Column("finetuned", "fine-tuned", percent),
    ]
    cells: list[dict[str, Any]] = [vars(row) for row in rows]
    note = f"digits, {'-'.join(map(str, WIDTHS))} ReLU network, keep={keep}; accuracy on 450 test images."
    return render("Pruning a network on handwritten digits", columns, cells, note)
