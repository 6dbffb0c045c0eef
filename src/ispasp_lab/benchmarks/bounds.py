"""`ispasp bench bounds`: what measured layer errors can say about the change of a network's output.

Units of one hidden dimension after the other are removed. With f_k the network after k of them, the triangle
inequality gives ||f_n - f_0|| <= sum over k of ||f_k - f_(k-1)|| <= sum over k of L_k ||d_k||: d_k is the error at the
consumer, L_k a Lipschitz constant of the dense network behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input

from ispasp import Plan, apply_, prune, survey
from ispasp.graph.state import copied
from ispasp.report import Column, render
from ispasp_lab.data import available, cifar10
from ispasp_lab.experiments.mnist_network import network as two_layers
from ispasp_lab.models import CifarResNet, resnet20, resnet56

_ROUNDS = 50  # of power iteration
Behind = Callable[[nn.Module, str], float]


@dataclass(frozen=True)
class Row:
    """All relative to the norm of the dense output, the mean over examples.

    `measured`: the change of the output. `telescoped`: the sum of the changes by one hidden dimension at a time, a
    bound that takes as many runs as there are dimensions. `norms`: with products of spectral norms, a bound for every
    input. `local`: with the norm of the Jacobian at the example, which is no bound.
    """

    network: str
    dimensions: int
    keep: float
    measured: float
    telescoped: float
    norms: float
    local: float


def networks() -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Behind]]:
    """Name -> network, images, and the Lipschitz constant behind a consumer."""

    def chain(widths: Sequence[int]) -> Callable[[], nn.Module]:
        return lambda: _chain(widths)

    found: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Behind]] = {
        "two layers": (lambda: two_layers(64, 128, 10, seed=0), _random, behind_in_chain),
        "four layers": (chain([64, 128, 128, 128, 10]), _random, behind_in_chain),
        "eight layers": (chain([64, *[128] * 7, 10]), _random, behind_in_chain),
    }
    for name, build in (("resnet20", resnet20), ("resnet56", resnet56)):
        if available("cifar10.npz") and available(f"cifar10-{name}.safetensors"):
            found[name] = build, lambda n: cifar10("test")[0][:n], behind_in_resnet
    return found


def run(names: Sequence[str] = (), keep: float = 0.75, images: int = 16) -> list[Row]:
    """One row for each network, pruned by l1 without compensation."""
    known = networks()
    return [
        measured(name, known[name][0]().eval(), known[name][1](images), known[name][2], keep) for name in names or known
    ]


@torch.no_grad()
def measured(name: str, model: nn.Module, x: Tensor, behind: Behind, keep: float) -> Row:
    """Remove the units of one hidden dimension after the other."""
    options: dict[str, Any] = {
        "method": "l1",
        "compensate": None,
        "order": "oneshot",
        "hold_out": False,
        "progress": False,
    }
    plan = prune(model, [x], keep, **options).plan
    consumers = {d.name: d.consumers[0] for d in survey(model, x).dimensions}
    dense = model(x)
    outputs, norms, local = [dense], torch.zeros(len(x)), torch.zeros(len(x))
    now: dict[str, tuple[int, ...]] = {}
    before = copied(model)
    for dimension, kept in plan.kept.items():
        now[dimension] = kept
        after = apply_(copied(model), Plan(dict(now), plan.structure))
        read = consumers[dimension]
        d = (_output_of(after, read, x) - _output_of(before, read, x)).flatten(1).norm(dim=1)
        norms += behind(model, read) * d
        local += _jacobian_norms(model, read, x) * d
        outputs.append(after(x))
        before = after
    size = dense.norm(dim=1)

    def mean(values: Tensor) -> float:
        return float((values / size).mean())

    steps = sum((b - a).norm(dim=1) for a, b in pairwise(outputs))
    assert isinstance(steps, Tensor)  # noqa: S101  # there is a hidden dimension
    change = (outputs[-1] - dense).norm(dim=1)
    return Row(name, len(now), keep, mean(change), mean(steps), mean(norms), mean(local))


def behind_in_chain(model: nn.Module, consumer: str) -> float:
    """The product of the spectral norms of all linear layers behind one; ReLU has 1."""
    assert isinstance(model, nn.Sequential)  # noqa: S101
    later = [layer for layer in list(model)[int(consumer) + 1 :] if isinstance(layer, nn.Linear)]
    return math.prod(float(torch.linalg.matrix_norm(layer.weight, 2)) for layer in later)


def behind_in_resnet(model: nn.Module, consumer: str) -> float:
    """Behind the second convolution of a block: its BatchNorm, 1 + the block's norms for each later block, the head."""
    assert isinstance(model, CifarResNet)  # noqa: S101
    blocks = {
        f"{stage}.{i}": block
        for stage in ("layer1", "layer2", "layer3")
        for i, block in getattr(model, stage).named_children()
    }
    names = list(blocks)
    at, size = names.index(consumer.rpartition(".")[0]), {"layer1": 32, "layer2": 16, "layer3": 8}
    factor = _scale(blocks[names[at]].bn2)
    for name in names[at + 1 :]:
        block, out = blocks[name], size[name.partition(".")[0]]
        into = out * block.stride
        branch = conv_norm(block.conv1, into) * _scale(block.bn1) * conv_norm(block.conv2, out) * _scale(block.bn2)
        factor *= 1 + branch
    return factor * float(torch.linalg.matrix_norm(model.linear.weight, 2)) / 8  # the mean of 64 positions


def conv_norm(conv: nn.Conv2d, size: int) -> float:
    """The spectral norm of a convolution on maps of this size, by power iteration (from below).

    >>> conv = nn.Conv2d(1, 1, 1, bias=False); _ = conv.weight.data.fill_(-3.0)
    >>> round(conv_norm(conv, 4), 4)
    3.0
    """
    x = torch.randn(1, conv.in_channels, size, size, generator=torch.Generator().manual_seed(0))
    stride, padding = conv.stride[0], conv.padding[0]
    weight, norm = conv.weight.detach(), 0.0
    for _ in range(_ROUNDS):
        x = x / x.norm()
        y = functional.conv2d(x, weight, stride=stride, padding=padding)
        norm = float(y.norm())
        x = conv2d_input(x.shape, weight, y, stride=stride, padding=padding)  # type: ignore[no-untyped-call]
    return norm


def _scale(norm: Any) -> float:
    return float((norm.weight / (norm.running_var + norm.eps).sqrt()).abs().max())


def _output_of(model: nn.Module, path: str, x: Tensor) -> Tensor:
    """What a layer gives."""
    seen: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_hook(lambda _, __, y: seen.append(y))
    try:
        model(x)
    finally:
        hook.remove()
    return seen[0]


def _jacobian_norms(model: nn.Module, path: str, x: Tensor) -> Tensor:
    """The spectral norm of d output / d (output of a layer) at each example: one backward pass for each output."""
    probes: list[Tensor] = []

    def add(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        probes.append(torch.zeros_like(y, requires_grad=True))
        return y + probes[0]

    hook = model.get_submodule(path).register_forward_hook(add)
    try:
        with torch.enable_grad():
            out = model(x)
            rows = [
                torch.autograd.grad(out[:, k].sum(), probes[0], retain_graph=True)[0].flatten(1)
                for k in range(out.shape[1])
            ]
    finally:
        hook.remove()
    norms: Tensor = torch.linalg.matrix_norm(torch.stack(rows, 1), 2)  # of (examples, outputs, values)
    return norms


def _chain(widths: Sequence[int]) -> nn.Module:
    """Linear layers with ReLU between, of random weights that keep the size of the values."""
    g = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layer = nn.Linear(a, b, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(b, a, generator=g) * math.sqrt(2 / a))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _random(n: int) -> Tensor:
    return torch.randn(n, 64, generator=torch.Generator().manual_seed(1))


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row]) -> str:
    """Rows as a table.

    >>> "1e+06" in as_table([Row("net", 9, 0.75, 0.5, 1.0, 1e6, 2.0)])
    True
    """
    number = "{:.2g}".format
    columns = [Column("network", "network"), Column("dimensions", "dimensions"), Column("keep", "keep")]
    columns += [Column(name, name, number) for name in ("measured", "telescoped", "norms", "local")]
    return render("Change of the output, relative to it", columns, as_json(rows))
