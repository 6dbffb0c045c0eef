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
    parameters: int
    macs: int
    accuracy: float
    finetuned: float | None


def network(seed: int = 0) -> nn.Sequential:
    """A multi-layer perceptron with two hidden layers: (batch, 64) -> (batch, 10).

    >>> network()(torch.zeros(5, 64)).shape
    torch.Size([5, 10])
    """
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(WIDTHS):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, data: Digits, epochs: int, lr: float, seed: int = 0) -> None:
    """SGD with momentum and a cosine schedule, batches of 64; changes the model.

    >>> model, data = network(), Digits.load()
    >>> before = accuracy(model, data); train(model, data, epochs=1, lr=0.1); accuracy(model, data) > before + 20
    True
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for index in torch.split(torch.randperm(len(data.x), generator=generator), 64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x[index]), data.y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()


def accuracy(model: nn.Module, data: Digits) -> float:
    """Percent of the test images classified rightly.

    >>> data = Digits(torch.empty(0, 2), torch.empty(0), x_test=torch.eye(2), y_test=torch.tensor([0, 0]))
    >>> accuracy(nn.Identity(), data)
    50.0
    """
    with torch.no_grad():
        return 100 * float((model(data.x_test).argmax(1) == data.y_test).float().mean())


def pruned(model: nn.Sequential, x: Tensor, keep: float, method: Selector) -> nn.Sequential:
    """A copy whose hidden layers are pruned from first to last, each seeing the layers already pruned.

    x (batch, inputs of the model) is the calibration data.

    >>> pruned(network(), torch.rand(8, 64), 0.25, selector("topk"))[2]
    Linear(in_features=64, out_features=32, bias=True)
    """
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
    layer.weight = nn.Parameter(weight.detach().clone())
    layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def cost(model: nn.Module) -> tuple[int, int]:
    """Parameters and multiply-accumulates for one image.

    >>> cost(nn.Linear(3, 2))
    (8, 6)
    """
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return sum(p.numel() for p in model.parameters()), sum(layer.weight.numel() for layer in linears)


def run(keep: float = 0.2, seed: int = 0, *, epochs: int = 30, progress: bool = True) -> list[Row]:
    """Train, prune with every method, fine-tune; one row for each network.

    >>> [row.method for row in run(epochs=1, progress=False)]
    ['dense', 'i-SpaSP', 'Top-K', 'random']
    """
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
    """The rows as text.

    >>> print(as_table([Row("dense", 50826, 50432, 98.0, None)], keep=0.2))
             Pruning a network on handwritten digits
    ┏━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━┓
    ┃ network ┃ parameters ┃   MACs ┃ accuracy ┃ fine-tuned ┃
    ┡━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━┩
    │ dense   │     50,826 │ 50,432 │   98.0 % │          - │
    └─────────┴────────────┴────────┴──────────┴────────────┘
    digits, 64-256-128-10 ReLU network, keep=0.2; accuracy on 450 test images.
    """
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
