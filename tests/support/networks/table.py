"""The tables of blocks, and what blocks are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Pick = Callable[..., Any]
Shape = tuple[int, ...]  # of one example: (channels, *space) for images and signals, (length, channels) for tokens
LEAVES: dict[str, dict[str, type[nn.Module]]] = {"image": {}, "tokens": {}}
NESTED: dict[str, dict[str, type[nn.Module]]] = {"image": {}, "tokens": {}}
BATCH, VOCABULARY = 2, 11
WIDTHS = (4, 8, 6, 12)


def block(kind: str, nested: bool = False) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a block in the table. Nested ones contain another block."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        (NESTED if nested else LEAVES)[kind][cls.__name__] = cls
        return cls

    return register


def of_rank(name: str, shape: Shape) -> Any:
    """nn.Conv2d for an image, nn.Conv1d for a signal, ..."""
    return getattr(nn, f"{name}{len(shape) - 1}d")


def conv1x1(shape: Shape, outputs: int, bias: bool = True) -> nn.Module:
    return of_rank("Conv", shape)(shape[0], outputs, 1, bias=bias)


def activation(pick: Pick) -> nn.Module:
    return pick(
        nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Hardswish, nn.Hardsigmoid, nn.ReLU6,
        nn.Mish, nn.Softplus, nn.SELU, nn.CELU, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.LogSigmoid, nn.Hardtanh,
    )()  # fmt: skip


def divisor(pick: Pick, options: tuple[int, ...], *sizes: int) -> int:
    return pick(*(n for n in options if all(size % n == 0 for size in sizes)))


def kernels(pick: Pick, shape: Shape) -> int:
    return pick(*(k for k in (1, 3, 2) if k <= min(shape[1:])))


def leaf(pick: Pick, shape: Shape, kind: str) -> tuple[nn.Module, Shape]:
    return drawn(pick, shape, LEAVES[kind])


def drawn(pick: Pick, shape: Shape, table: dict[str, type[nn.Module]]) -> tuple[nn.Module, Shape]:
    """A block of the table and the shape of what it returns."""
    made = table[pick(*table)](pick, shape)
    return made, after(made, shape)


def after(module: nn.Module, shape: Shape) -> Shape:
    with torch.no_grad():
        return tuple(module.eval()(torch.randn(BATCH, *shape)).shape[1:])


class Fn(nn.Module):
    """A function with what it closes over: sizes are literals that no attribute holds."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
