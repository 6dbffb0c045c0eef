"""A case of the zoo, and the random values that bring a freshly built network to life."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A small network and a batch for it; both come out the same at every call."""

    name: str
    """`group/model`, e.g. `torchvision/resnet18`."""
    group: str
    """Where the network comes from: `plain`, `torchvision`, `timm` or `transformers`."""
    build: Callable[[], nn.Module]
    """Makes the network: seeded, float32, in eval mode."""
    batch: Callable[[], Any]
    """Makes a batch of two: a Tensor for `model(x)`, a tuple for `model(*x)`, a dict for `model(**x)`."""

    def run(self, model: nn.Module) -> Any:
        """Return what `model` makes of this case's batch."""
        return call(model, self.batch())


def call(model: nn.Module, batch: Any) -> Any:
    """Return what `model` makes of a batch."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def case(group: str, name: str, make: Callable[[], nn.Module], batch: Callable[[], Any]) -> Case:
    """Return the case whose network `make` makes, seeded and enlivened."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = enliven_(make().float().eval())
            return settle_(model, lambda: call(model, seeded()))

    def seeded() -> Any:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            return batch()

    return Case(f"{group}/{name}", group, build, seeded)


@torch.no_grad()
def enliven_(model: nn.Module) -> nn.Module:
    """Give random values to what initialisation leaves constant, and strength to what it leaves weak, in place.

    Zero biases, unit scales and layer scales of 1e-6 hide mistakes (a wrongly sliced vector of ones is still a
    vector of ones), and so do layers whose share in the output is too small to be seen.
    """
    for parameter in model.parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        low, high = parameter.aminmax()
        if low < high:
            if parameter.ndim > 1:
                healthy = (parameter.numel() / len(parameter)) ** -0.5  # 1 / sqrt(fan in)
                spread = parameter.std().item()
                parameter.mul_(0.7 * healthy / spread if spread < 0.3 * healthy else 1.0)
        elif low == 0:
            parameter.normal_(std=0.1)
        elif low == 1 or 0 < low < 0.1:
            parameter.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def settle_(model: nn.Module, run: Callable[[], Any]) -> nn.Module:
    """Give the BatchNorms of `model` the statistics of what they see in one `run`, in place.

    With the statistics of initialisation a deep network's signal fades to 1e-14, and any surgery is right.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
        if norm.affine and norm.weight.abs().max() < 0.2:  # transformers draws them like any other weight
            norm.weight.uniform_(0.5, 1.5)
    if norms:
        run()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
        if norm.running_var is not None:
            norm.running_var += 0.05 * norm.running_var.mean()  # a channel may be dead in this batch
    return model


def image(size: int, channels: int = 3) -> Callable[[], Tensor]:
    """Return a maker of two random square images, coarse and fine: white noise alone pools to a constant."""

    def make() -> Tensor:
        coarse = nn.functional.interpolate(torch.randn(2, channels, 4, 4), size=(size, size))
        return coarse + 0.5 * torch.randn(2, channels, size, size)

    return make


def tokens(length: int = 8, vocabulary: int = 100) -> Callable[[], Tensor]:
    """Return a maker of two random token sequences, free of the first ten (special) tokens."""
    return lambda: torch.randint(10, vocabulary, (2, length))
