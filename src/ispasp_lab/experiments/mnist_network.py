"""The two-layer networks of `ispasp reproduce mnist`: data, training, what they get right (Appendix A.2)."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ispasp._finetune import finetune
from ispasp.errors import InputError
from ispasp.train import Sgd
from ispasp_lab.data import mnist

_TRAINING = ("hidden", "epochs", "lr", "batch", "examples", "seed")  # what the dense network depends on


@dataclass(frozen=True)
class Settings:
    """Settings that all rows of a run share: the paper's values where it gives them, except for the epochs.

    `fresh` takes a new mini-batch in every iteration of i-SpaSP, as the paper does. `examples` limits the training set.
    The paper trains for 200 epochs and does not say how long it fine-tunes. `precision` "bf16" trains the dense
    networks in mixed precision, which processors with bfloat16 do faster.

    >>> print(Settings(hidden=100))
    hidden=100 epochs=8 lr=0.001 finetune_epochs=5 batch=128 prune_batch=512 iterations=20 fresh=True examples=60000
    seed=0
    """

    hidden: int = 10_000
    epochs: int = 8
    lr: float = 1e-3
    finetune_epochs: int = 5
    batch: int = 128
    prune_batch: int = 512
    iterations: int = 20
    fresh: bool = True
    examples: int = 60_000
    seed: int = 0
    precision: str = "no"

    def __str__(self) -> str:
        """One line, by which rows of the same settings are found again."""
        plain = () if self.precision != "no" else ("precision",)
        return self.only(tuple(field.name for field in fields(self) if field.name not in plain))

    def only(self, names: Sequence[str]) -> str:
        """Some of the settings, in one line.

        >>> Settings().only(["hidden", "seed"])
        'hidden=10000 seed=0'
        """
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


@dataclass(frozen=True, eq=False)
class Digits:
    """MNIST as flat vectors without augmentation: x (n, 784), y (n,), x_test, y_test."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @staticmethod
    def load(examples: int) -> Digits:
        """Read MNIST from the data folder; the first `examples` of the training set, which is in random order."""
        x, y = mnist("train")
        if not 1 <= examples <= len(x):
            raise InputError(f"examples={examples}: MNIST has {len(x)} training examples, pass 1 to {len(x)}")
        x_test, y_test = mnist("test")
        return Digits(x[:examples].flatten(1), y[:examples], x_test[:].flatten(1), y_test)


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Batches of (x, y) in a new random order each time, as `ispasp.finetune` reads them.

    >>> torch.manual_seed(0); batches = Shuffled(torch.arange(5.0), torch.arange(5), 2)   # doctest: +ELLIPSIS
    <...>
    >>> len(batches), sorted(torch.cat([y for _, y in batches]).tolist())
    (3, [0, 1, 2, 3, 4])
    """

    x: Tensor
    y: Tensor
    size: int

    def __len__(self) -> int:
        """How many batches."""
        return math.ceil(len(self.y) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch."""
        for index in torch.split(torch.randperm(len(self.y)), self.size):
            yield self.x[index], self.y[index]


def network(inputs: int, hidden: int, outputs: int, seed: int) -> nn.Sequential:
    """f(x) = W1 relu(W0 x), without biases as in the paper: (batch, inputs) -> (batch, outputs).

    >>> network(784, 100, 10, seed=0)(torch.zeros(5, 784)).shape
    torch.Size([5, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(inputs, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, outputs, bias=False)
        ).eval()


def weights(net: nn.Sequential) -> tuple[Tensor, Tensor]:
    """W0 (hidden, inputs) and W1 (outputs, hidden).

    >>> [tuple(W.shape) for W in weights(network(4, 3, 2, seed=0))]
    [(3, 4), (2, 3)]
    """
    first, last = net[0], net[2]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)  # noqa: S101  # built by `network`
    return first.weight.detach(), last.weight.detach()


def smaller(net: nn.Sequential, kept: Sequence[int]) -> nn.Sequential:
    """A new network of the kept units alone.

    >>> [tuple(W.shape) for W in weights(smaller(network(4, 3, 2, seed=0), [0, 2]))]
    [(2, 4), (2, 2)]
    """
    W0, W1 = weights(net)
    pruned = network(W0.shape[1], len(kept), W1.shape[0], seed=0)
    with torch.no_grad():
        for old, new in zip((W0[list(kept)], W1[:, list(kept)]), pruned.parameters(), strict=True):
            new.copy_(old)
    return pruned


def train(net: nn.Sequential, data: Digits, epochs: int, lr: float, batch: int, seed: int, **options: object) -> None:
    """SGD with momentum 0.9 and no weight decay; the learning rate falls tenfold at 50 % and 75 %. Changes `net`."""
    recipe = Sgd(lr=lr, momentum=0.9, weight_decay=0.0, schedule="steps")
    loader = Shuffled(data.x, data.y, batch)
    finetune(net, loader, epochs=epochs, recipe=recipe, seed=seed, **options)  # type: ignore[arg-type]
    net.eval()


def dense(settings: Settings, data: Digits, trial: int, folder: Path, *, progress: bool = True) -> nn.Sequential:
    """The trained network of this trial, from `folder` if it is there; a training that was cut off goes on."""
    seed = settings.seed + trial
    net = network(data.x.shape[1], settings.hidden, int(data.y.max()) + 1, seed)
    text = f"{settings.only(_TRAINING)} trial={trial}"
    text += "" if settings.precision == "no" else f" precision={settings.precision}"
    path = folder / f"mnist-dense-{hashlib.sha256(text.encode()).hexdigest()[:10]}.safetensors"
    if path.exists():
        net.load_state_dict(load_file(path))
        return net
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = path.with_suffix(".checkpoint")
    options: dict[str, object] = {
        "checkpoint": checkpoint,
        "checkpoint_every": len(Shuffled(data.x, data.y, settings.batch)),
        "mixed_precision": None if settings.precision == "no" else settings.precision,
    }
    train(net, data, settings.epochs, settings.lr, settings.batch, seed, progress=progress, **options)
    whole = path.with_suffix(".part")  # a cut-off write must not look like a network
    save_file(net.state_dict(), whole, {"settings": text})
    whole.replace(path)
    shutil.rmtree(checkpoint)
    return net


def evaluate(net: nn.Sequential, data: Digits) -> tuple[float, float]:
    """Percent of the test examples classified rightly, and their mean cross entropy.

    >>> eye = torch.eye(2)
    >>> net = network(2, 2, 2, seed=0); [W.copy_(eye) for W in weights(net)]   # doctest: +ELLIPSIS
    [...]
    >>> right, loss = evaluate(net, Digits(eye, torch.arange(2), eye, torch.tensor([0, 0])))
    >>> right, round(loss, 3)
    (50.0, 0.813)
    """
    y = outputs(net, data.x_test)
    right = float((y.argmax(1) == data.y_test).double().mean())
    return 100 * right, float(nn.functional.cross_entropy(y.double(), data.y_test))


def outputs(net: nn.Sequential, x: Tensor) -> Tensor:
    """The network's outputs for all examples, computed in parts. (n, inputs) -> (n, outputs)

    >>> outputs(network(4, 3, 2, seed=0), torch.zeros(5, 4)).shape
    torch.Size([5, 2])
    """
    with torch.no_grad():
        return torch.cat([net(part) for part in torch.split(x, 1000)])
