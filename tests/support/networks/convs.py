"""Convolutions in other roles: scaled, shared, normed, computed in the forward, as attention, by im2col."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks.table import WIDTHS, Pick, Shape, block, conv1x1, divisor, of_rank


@block("image")
class Scaled(nn.Module):
    """Parameters and buffers per channel, shaped in the forward."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        C, self.ones = shape[0], [1] * (len(shape) - 1)
        self.style = pick("view", "index", "shaped", "reshape_literal")
        self.gamma = nn.Parameter(torch.rand(C, *self.ones) if self.style == "shaped" else torch.rand(C))
        self.register_buffer("offset", torch.randn(1, C, *self.ones), persistent=pick(True, False))

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "view":
            gamma = self.gamma.view(1, -1, *self.ones)
        elif self.style == "index":
            gamma = self.gamma[None, :, None] if x.dim() == 3 else self.gamma[None, :, None, None]
        elif self.style == "shaped":
            gamma = self.gamma
        else:
            gamma = self.gamma.reshape(1, self.gamma.numel(), *self.ones)
        return x * gamma + self.offset


@block("image")
class Twice(nn.Module):
    """The same modules called twice."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.conv, self.norm = conv1x1(shape, shape[0]), of_rank("BatchNorm", shape)(shape[0])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.relu(self.norm(self.conv(x)))
        return x


@block("image")
class Normed(nn.Sequential):
    """weight_norm, the old one and the parametrization; spectral_norm."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        wrap = pick(
            nn.utils.parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.parametrizations.spectral_norm
        )
        first = wrap(conv1x1(shape, pick(*WIDTHS)))
        super().__init__(first, nn.ReLU(), wrap(of_rank("Conv", shape)(first.out_channels, pick(*WIDTHS), 1)))


@block("image")
class Standardised(nn.Module):
    """A conv whose weight is computed in the forward."""

    reads: ClassVar = {"weight": (1,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.first, self.width = conv1x1(shape, pick(*WIDTHS)), pick(*WIDTHS)
        self.style = pick("scaled", "standardised", "flat")
        self.weight = nn.Parameter(torch.randn(self.width, self.first.out_channels, *[1] * (len(shape) - 1)))
        self.gain = nn.Parameter(torch.rand(self.width))

    def forward(self, x: Tensor) -> Tensor:
        w, x = self.weight, self.first(x).tanh()
        if self.style == "standardised":
            w = (w - w.mean(1, keepdim=True)) / (w.var(1, keepdim=True) + 0.1).sqrt()
        if self.style == "flat":
            w = w.view(w.size(0), -1) * self.gain[:, None]
            return torch.einsum("oc,bcn->bon", w, x.flatten(2)).view(x.shape[0], -1, *x.shape[2:])
        return (F.conv1d if x.dim() == 3 else F.conv2d)(x, w * self.gain.view(-1, *[1] * (w.dim() - 1)))


@block("image")
class NonLocal(nn.Module):
    """Attention over space with one head."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.inner = pick(4, 6)
        self.theta, self.phi, self.g = (conv1x1(shape, self.inner) for _ in range(3))
        self.out = of_rank("Conv", shape)(self.inner, shape[0], 1)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        theta = self.theta(x).view(b, self.inner, -1).permute(0, 2, 1)
        phi, g = self.phi(x).view(b, self.inner, -1), self.g(x).view(b, self.inner, -1).permute(0, 2, 1)
        y = torch.matmul(F.softmax(torch.matmul(theta, phi), dim=-1), g)
        return x + self.out(y.permute(0, 2, 1).contiguous().view(b, self.inner, *x.size()[2:]))


@block("image")
class SplitAttention(nn.Module):
    """ResNeSt: softmax over the radix."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.radix, self.width = 2, pick(4, 6)
        conv = of_rank("Conv", shape)
        self.conv = conv(shape[0], self.width * 2, 1, groups=divisor(pick, (1, 2), shape[0]))
        self.fc1, self.fc2 = conv(self.width, 4, 1), conv(4, self.width * 2, 1)
        self.last = conv(self.width, pick(*WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        b, c, *space = x.shape
        parts = x.view(b, self.radix, c // self.radix, *space)
        pooled = parts.sum(1).flatten(2).mean(-1).view(b, c // self.radix, *[1] * len(space))
        gate = self.fc2(F.relu(self.fc1(pooled))).view(b, self.radix, -1).softmax(1)
        return self.last((parts * gate.view(b, self.radix, -1, *[1] * len(space))).sum(1))


@block("image")
class Ghost(nn.Module):
    """GhostNet: cheap features from a depthwise conv, concatenated and cropped."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.width, self.out = pick(4, 6), pick(8, 7)
        self.primary = conv1x1(shape, self.width)
        self.cheap = of_rank("Conv", shape)(self.width, self.width, 3, padding=1, groups=self.width)
        self.last = of_rank("Conv", shape)(min(self.out, 2 * self.width), pick(*WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.primary(x))
        return self.last(torch.cat([a, self.cheap(a)], dim=1)[:, : self.out])


@block("image")
class Unfolded(nn.Module):
    """A convolution by im2col."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.first, k = conv1x1(shape, pick(*WIDTHS)), 1 if min(shape[1:]) < 3 else 3
        self.k = (k, k) if len(shape) == 3 else (1, k)
        self.linear = nn.Linear(self.first.out_channels * math.prod(self.k), pick(*WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        y = F.unfold(x if x.dim() == 4 else x.unsqueeze(2), self.k, padding=tuple(k // 2 for k in self.k))
        return self.linear(y.transpose(1, 2)).transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])
