"""Blocks around other blocks: residuals, branches, gates."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks.table import WIDTHS, Pick, Shape, block, conv1x1, leaf, of_rank


@block("image", nested=True)
class Residual(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.body, inner = leaf(pick, shape, "image")
        self.norm = of_rank("BatchNorm", inner)(inner[0])
        self.last = conv1x1(inner, shape[0])
        self.shortcut = nn.Identity() if pick(True, False) else conv1x1(shape, shape[0])
        self.inplace = pick(False, True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(F.relu(self.norm(self.body(x))))
        if y.shape != x.shape:
            y = F.interpolate(y, size=x.shape[2:])
        if self.inplace:
            y += self.shortcut(x)
            return F.relu(y)
        return self.shortcut(x) + y


@block("image", nested=True)
class Dense(nn.Module):
    """DenseNet: each step reads the concatenation of all before."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.steps = nn.ModuleList()
        C = shape[0]
        for _ in range(pick(1, 2, 3)):
            growth = pick(2, 4)
            conv = of_rank("Conv", shape)(C, growth, 3, padding=1, bias=False)
            self.steps.append(nn.Sequential(of_rank("BatchNorm", shape)(C), nn.ReLU(), conv))
            C += growth
        self.transition, _ = leaf(pick, (C, *shape[1:]), "image")

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for step in self.steps:
            features.append(step(torch.cat(features, 1)))
        return self.transition(torch.cat(features, 1))


@block("image", nested=True)
class Branches(nn.Module):
    """Inception: branches brought to one size and concatenated or added."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.space, self.add = shape[1:], pick(False, True)
        made = [leaf(pick, shape, "image") for _ in range(pick(2, 3))]
        self.branches = nn.ModuleList(m for m, _ in made)
        self.match = nn.ModuleList(conv1x1(s, 6) if self.add else nn.Identity() for _, s in made)

    def forward(self, x: Tensor) -> Tensor:
        ys = [match(branch(x)) for branch, match in zip(self.branches, self.match, strict=True)]
        ys = [y if y.shape[2:] == x.shape[2:] else F.interpolate(y, size=x.shape[2:]) for y in ys]
        return sum(ys) / 2 if self.add else torch.cat(ys, dim=1)


@block("image", nested=True)
class UNet(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        conv, width = of_rank("Conv", shape), pick(4, 6)
        self.down = conv(shape[0], width, 1)
        self.inner, inner = leaf(pick, (width, *(max(n // 2, 1) for n in shape[1:])), "image")
        self.up = of_rank("ConvTranspose", shape)(inner[0], 4, 2, 2)
        self.last = conv(width + 4, pick(*WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        half = [max(n // 2, 1) for n in x.shape[2:]]
        y = F.adaptive_avg_pool1d(skip, half[0]) if x.dim() == 3 else F.adaptive_avg_pool2d(skip, half)
        y = F.interpolate(self.up(self.inner(y)), size=skip.shape[2:])
        return self.last(torch.cat([skip, y], 1))


@block("image", nested=True)
class Gated(nn.Module):
    """A block's output gates another's."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.a, a = leaf(pick, shape, "image")
        self.match, self.gate = conv1x1(a, 6), conv1x1(shape, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).flatten(2).mean(-1).sigmoid()
        return self.match(self.a(x)) * gate[(...,) + (None,) * (x.dim() - 2)]


@block("tokens", nested=True)
class PreNorm(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.norm = pick(nn.LayerNorm, nn.RMSNorm)(shape[1])
        self.body, (n, width) = leaf(pick, shape, "tokens")
        self.out = nn.Identity() if width == shape[1] else nn.Linear(width, shape[1])
        self.scale, self.start = nn.Parameter(torch.rand(shape[1])), n - shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.out(self.body(self.norm(x)))[:, self.start :]


@block("tokens", nested=True)
class Parallel(nn.Module):
    """Two blocks side by side, concatenated over channels or added."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        (self.a, a), (self.b, b) = leaf(pick, shape, "tokens"), leaf(pick, shape, "tokens")
        self.add, self.n = pick(False, True), min(a[0], b[0])
        self.left, self.right = nn.Linear(a[1], 6), nn.Linear(b[1], 6)
        self.out = nn.Linear(6 if self.add else 12, shape[1])

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(self.a(x)[:, : self.n]), self.right(self.b(x)[:, : self.n])
        return self.out(a + b if self.add else torch.cat([a, b], -1))
