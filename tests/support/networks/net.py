"""The module of a whole network: a stem, a few blocks, a head."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from support.networks.table import LEAVES, NESTED, VOCABULARY, WIDTHS, Pick, Shape, after, drawn, of_rank


class Net(nn.Module):
    """A stem, a few blocks, a head. `inputs` and `outputs` say how it is called and what it returns."""

    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self.domain = pick("image", "tokens", "signal", "ids", "patches")
        self.inputs = pick("tensor", "tuple", "dict")
        self.outputs = pick("tensor", "dict", "tuple")
        width = pick(*WIDTHS)
        shape = self._stem(pick, width)
        self.blocks = nn.ModuleList()
        kind = "image" if self.domain in ("image", "signal") else "tokens"
        for _ in range(pick(1, 2, 3, 4, 5, 6)):
            table = (NESTED if pick(False, False, True) else LEAVES)[kind]
            made, shape = drawn(pick, shape, table)
            self.blocks.append(made)
        self._head(pick, shape, kind, width)

    def _stem(self, pick: Pick, width: int) -> Shape:
        self.pair = self.inputs != "tensor"
        if self.domain == "ids":
            self.stem = nn.Embedding(VOCABULARY, width)
            self.stem2 = nn.Embedding(VOCABULARY, width) if self.pair else None
            self.example: Shape = (pick(5, 6),)
            return (*self.example, width)
        if self.domain == "tokens":
            self.example = (pick(5, 6), 3)
            self.stem, self.stem2 = nn.Linear(3, width), nn.Linear(3, width) if self.pair else None
            return (self.example[0], width)
        self.example = (3, *((pick(8, 7),) if self.domain == "signal" else (pick(6, 8), pick(6, 8))))
        conv = of_rank("Conv", self.example)
        k = 3 if self.domain == "patches" else 1
        self.stem = conv(3, width, k, k)
        self.stem2 = conv(3, width, k, k) if self.pair else None
        shape = after(self.stem, self.example)
        return (math.prod(shape[1:]), width) if self.domain == "patches" else shape

    def _head(self, pick: Pick, shape: Shape, kind: str, width: int) -> None:
        self.pooling = (
            pick("mean", "flatten", "none", "adaptive") if kind == "image" else pick("mean", "first", "none", "flatten")
        )
        channels = shape[0] if kind == "image" else shape[1]
        self.channels_last = kind == "tokens"
        self.head = nn.Linear(math.prod(shape) if self.pooling == "flatten" else channels, 3)
        if self.domain == "ids" and self.pooling == "none" and channels == width and pick(True, False):
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = self.stem(x)
        if y is not None:
            x = x + self.stem2(y)
        if self.domain == "patches":
            x = x.flatten(2).transpose(1, 2)
        for module in self.blocks:
            x = module(x)
        out = self.head(self._pool(x))
        return {"tensor": out, "dict": {"logits": out, "n": x.shape[0]}, "tuple": (out, out.softmax(-1))}[self.outputs]

    def _pool(self, x: Tensor) -> Tensor:
        if self.pooling == "flatten":
            return x.flatten(1)
        if self.pooling == "none":
            return x if self.channels_last else x.movedim(1, -1)
        if self.channels_last:
            return x.mean(1) if self.pooling == "mean" else x[:, 0]
        if self.pooling == "mean":
            return x.mean(tuple(range(2, x.dim())))
        pool = F.adaptive_avg_pool1d if x.dim() == 3 else F.adaptive_avg_pool2d
        return pool(x, 1).view(x.size(0), -1)
