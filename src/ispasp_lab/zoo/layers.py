"""Layers of the plain cases, one structure each."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def conv(i: int, o: int, k: int = 3, *, groups: int = 1, norm: bool = True, stride: int = 1) -> nn.Module:
    """Return a convolution that keeps the size, a BatchNorm and a ReLU."""
    layer = nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=not norm)
    return nn.Sequential(layer, *([nn.BatchNorm2d(o)] if norm else []), nn.ReLU())


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Branches(nn.Module):
    """Runs branches on the same input and joins what they return; `skip` adds the input itself."""

    def __init__(self, *branches: nn.Module, join: str = "add", skip: bool = False) -> None:
        super().__init__()
        self.branches, self.join, self.skip = nn.ModuleList(branches), join, skip

    def forward(self, x: Tensor) -> Tensor:
        parts = [x] * self.skip + [branch(x) for branch in self.branches]
        if self.join == "cat":
            return torch.cat(parts, 1)
        joined: Tensor = reduce(Tensor.mul if self.join == "mul" else Tensor.add, parts)
        return joined


class Shuffle(nn.Module):
    """ShuffleNet's channel shuffle."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class Split(nn.Module):
    """Splits the channels in unequal parts that go different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.sizes = conv(3, 24), [8, 16]
        self.left, self.right, self.head = conv(8, 8), conv(16, 8), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.split(self.stem(x), self.sizes, dim=1)
        return self.head(torch.cat([self.right(right), self.left(left)], 1))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Two levels, a transposed convolution upwards and a concatenated skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = conv(3, 8), conv(8, 16), conv(16, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.Upsample(scale_factor=2)
        self.mid, self.top = conv(32, 8), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(functional.max_pool2d(one, 2))
        low = self.bottom(functional.max_pool2d(two, 2))
        two = self.mid(torch.cat([self.up2(low), two], 1))
        return self.top(torch.cat([self.up1(two), one], 1))  # type: ignore[no-any-return]


class Buffer(nn.Module):
    """Multiplies a registered buffer in, channel by channel, and adds another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(width, 1, 1) + 0.5)
        self.register_buffer("shift", torch.randn(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("scale") + self.get_buffer("shift")


class SwiGLU(nn.Module):
    """A gated MLP with separate or fused gate and up projections."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = nn.Linear(16, 64)
        else:
            self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.fused else (self.gate(x), self.up(x))
        return self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Calls the same MLP twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.mlp(x)))  # type: ignore[no-any-return]


class TwoInputs(nn.Module):
    """An image and a vector in, a dict of two out."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.conv, self.fc, self.as_dict = conv(3, 8), nn.Linear(16, 8), as_dict
        self.mix, self.head, self.aux = nn.Linear(16, 24), nn.Linear(24, 4), nn.Linear(24, 2)

    def forward(self, image: Tensor, vector: Tensor) -> Any:
        seen = torch.cat([self.conv(image).mean([2, 3]), self.fc(vector).relu()], 1)
        mixed = self.mix(seen).relu()
        both = {"logits": self.head(mixed), "aux": [self.aux(mixed)]}
        return both if self.as_dict else both["logits"]


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self, cell: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.inward, self.cell, self.head = (
            nn.Linear(16, 24),
            cell(24, 16, batch_first=True),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.inward(x).relu())[0][:, -1])  # type: ignore[no-any-return]


class Bilinear(nn.Module):
    """Channel arithmetic outside of layers: parameters of its own, slices, stacks and products."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(16, 32), nn.Parameter(torch.randn(32))
        self.weight, self.bias = nn.Parameter(torch.randn(32, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.fc(x) * self.scale).relu()
        low, high = h[..., :16], h[..., 16:]
        h = torch.cat([low * 2, high.abs().sqrt()], -1)
        return torch.stack([h @ self.weight + self.bias, h.square() @ self.weight]).sum(0)
