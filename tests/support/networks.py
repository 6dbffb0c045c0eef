"""Random networks: chains of small blocks, written in the many ways that forwards are written in the wild.

A block is a module class whose constructor gets `pick` (choose one of some options) and the shape of one example. All
choices of a network are recorded, so `build(seed, choices)` makes it again: that line is a reproducer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

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


# Helpers ----------------------------------------------------------------------------------------------------------


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


def kernels(pick: Pick, shape: Shape) -> int:
    return pick(*(k for k in (1, 3, 2) if k <= min(shape[1:])))


def leaf(pick: Pick, shape: Shape, kind: str) -> tuple[nn.Module, Shape]:
    """A block of the table and the shape of what it returns."""
    made = LEAVES[kind][pick(*LEAVES[kind])](pick, shape)
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


# Images and signals -----------------------------------------------------------------------------------------------


@block("image")
class Conv(nn.Sequential):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        width, k = pick(*WIDTHS), kernels(pick, shape)
        groups = pick(*(g for g in (1, 2, 3, 4) if shape[0] % g == 0 and width % g == 0))
        stride, bias = pick(1, 2), pick(True, False)
        dilation = pick(*(d for d in (1, 2) if d * (k - 1) < min(shape[1:])))
        padding = pick(0, *range(1, min(k, *shape[1:])))
        mode = pick("zeros", "reflect", "circular", "replicate")
        conv = of_rank("Conv", shape)(shape[0], width, k, stride, padding, dilation, groups, bias, mode)
        super().__init__(conv, activation(pick))


@block("image")
class ConvNorm(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        width = pick(*WIDTHS)
        self.conv = of_rank("Conv", shape)(shape[0], width, 1, bias=False)
        norms = {
            "batch": lambda: of_rank("BatchNorm", shape)(width),
            "batch_plain": lambda: of_rank("BatchNorm", shape)(width, affine=False),
            "group": lambda: nn.GroupNorm(pick(*(g for g in (2, 1, 3, 4) if width % g == 0)), width),
            "instance": lambda: of_rank("InstanceNorm", shape)(width, affine=pick(True, False)),
            "instance_tracked": lambda: of_rank("InstanceNorm", shape)(width, affine=True, track_running_stats=True),
            "response": lambda: nn.LocalResponseNorm(3),
        }
        self.norm = norms[pick(*norms)]()
        self.act = activation(pick)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


@block("image")
class LayerNormChannels(nn.Module):
    """ConvNeXt's: channels last and back."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(shape[0]), nn.Linear(shape[0], 8), nn.Linear(8, shape[0])
        self.gamma = nn.Parameter(torch.rand(shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.movedim(1, -1))
        return x + (self.gamma * self.back(F.gelu(self.wide(y)))).movedim(-1, 1)


@block("image")
class Activation(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        functions = {
            "relu_inplace": lambda x: F.relu_(x + 0),
            "hardswish": lambda x: x * F.relu6(x + 3) / 6,
            "clamp": lambda x: x.clamp(-1, 2),
            "where": lambda x: torch.where(x > 0, x, 0.1 * x),
            "square": lambda x: x.square().add(1).rsqrt() - x.abs().neg().exp(),
            "masked": lambda x: x.masked_fill(x < 0, 0.5),
            "max": lambda x: torch.maximum(x, x.sin()) + torch.minimum(x.cos(), x),
            "dropout": lambda x: F.dropout(x, 0.5, training=False),
            "float": lambda x: x.to(torch.float64).contiguous().clone(),
        }
        self.function = functions[pick(*functions)]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@block("image")
class Slopes(nn.Sequential):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__(nn.PReLU(shape[0]) if pick(True, False) else nn.PReLU())


@block("image")
class Depthwise(nn.Module):
    """MobileNet's inverted residual without the residual; `multiplier` outputs per channel."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        width, multiplier, k = pick(*WIDTHS), pick(1, 2), kernels(pick, shape)
        self.expand = conv1x1(shape, width, bias=False)
        self.bn = of_rank("BatchNorm", shape)(width)
        conv = of_rank("Conv", shape)
        self.depthwise = conv(width, width * multiplier, k, padding=k // 2, groups=width)
        self.project = conv(width * multiplier, pick(*WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.relu6(self.depthwise(F.relu6(self.bn(self.expand(x))))))


@block("image")
class Pool(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        least = min(shape[1:])
        kinds = {
            "avg": lambda: of_rank("AvgPool", shape)(min(2, least), 1),
            "max": lambda: of_rank("MaxPool", shape)(1),
        }
        if least > 2:
            kinds["max"] = lambda: of_rank("MaxPool", shape)(3, pick(1, 2), 1)
            kinds["adaptive"] = lambda: of_rank("AdaptiveAvgPool", shape)(3)
            kinds["adaptive_max"] = lambda: of_rank("AdaptiveMaxPool", shape)(2)
            kinds["power"] = lambda: of_rank("LPPool", shape)(2, 2)
        self.pool = kinds[pick(*kinds)]()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)


@block("image")
class Resize(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        smooth = "bilinear" if len(shape) == 3 else "linear"
        self.mode = pick("nearest", smooth)
        self.size = tuple(min(n + 1, 8) for n in shape[1:])
        self.by_size = pick(False, True)

    def forward(self, x: Tensor) -> Tensor:
        given = {"size": self.size} if self.by_size else {"scale_factor": 1.5}
        return F.avg_pool1d(F.interpolate(x, mode=self.mode, **given).flatten(1, -2), 1).view(
            x.shape[0], x.shape[1], *F.interpolate(x, mode=self.mode, **given).shape[2:]
        )


@block("image")
class Transposed(nn.Sequential):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        width = pick(*WIDTHS)
        groups = pick(*(g for g in (1, 2, 3, 4) if shape[0] % g == 0 and width % g == 0))
        stride = pick(1, 2) if max(shape[1:]) < 8 else 1
        super().__init__(of_rank("ConvTranspose", shape)(shape[0], width, 2, stride, groups=groups), activation(pick))


@block("image")
class SqueezeExcite(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.linear, self.dims = pick(False, True), tuple(range(2, len(shape) + 1))
        C, hidden = shape[0], pick(4, 6)
        self.down = nn.Linear(C, hidden) if self.linear else conv1x1(shape, hidden)
        self.up = nn.Linear(hidden, C) if self.linear else conv1x1((hidden, *shape[1:]), C)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear:
            b, c = x.shape[:2]
            gate = self.up(F.relu(self.down(x.mean(self.dims).view(b, c))))
            return x * gate.sigmoid().view(b, c, *[1] * len(self.dims)).expand_as(x)
        gate = self.up(F.relu(self.down(x.mean(self.dims, keepdim=True))))
        return x * gate.sigmoid()


@block("image")
class Shuffle(nn.Module):
    """ShuffleNet: grouped conv, channel shuffle, grouped conv."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.groups, self.style = pick(2, 4), pick("shape", "function", "literal")
        width = self.groups * pick(2, 4, 6)
        self.conv1 = conv1x1(shape, width)
        conv = of_rank("Conv", shape)
        self.conv2 = conv(width, width, 1, groups=pick(*{1, self.groups, width}))
        if self.style == "function" and len(shape) == 3:
            self.shuffle = nn.ChannelShuffle(self.groups)
        elif self.style == "literal":
            groups, per = self.groups, width // self.groups
            self.shuffle = Fn(lambda x: x.reshape(len(x), groups, per, -1).transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        if hasattr(self, "shuffle"):
            return self.conv2(self.shuffle(x))
        b, c, *space = x.size()
        x = x.view(b, self.groups, c // self.groups, *space).transpose(1, 2).contiguous().view(b, c, *space)
        return self.conv2(x)


@block("image")
class Pixels(nn.Module):
    """Channels to space and back."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.up = pick(True, False)
        self.conv1 = conv1x1(shape, 4 * pick(2, 3) if self.up else pick(*WIDTHS))
        inner = self.conv1.out_channels // 4 if self.up else self.conv1.out_channels * 4
        self.conv2 = of_rank("Conv", shape)(inner, pick(*WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).relu()
        if x.dim() == 3:  # by hand over one spatial axis
            b, c, n = x.shape
            if self.up:
                x = x.view(b, c // 4, 4, n).transpose(2, 3).flatten(2)
            else:
                x = F.pad(x, (0, -n % 4)).unflatten(2, (-1, 4)).transpose(2, 3).flatten(1, 2)
        elif self.up:
            x = F.pixel_shuffle(x, 2)
        else:
            x = F.pixel_unshuffle(F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2)), 2)
        return self.conv2(x)[..., :8]


@block("image")
class Split(nn.Module):
    """One producer, cut into parts that are treated differently and joined again."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.style = pick("chunk", "split", "slice", "narrow", "tensor_split")
        self.join = pick("cat", "swap", "add", "mul", "max")
        self.half = pick(2, 4, 6)
        self.conv = conv1x1(shape, 2 * self.half)
        self.branch = of_rank("Conv", shape)(self.half, self.half, 1)
        self.last = of_rank("Conv", shape)(self.half * (2 if self.join in ("cat", "swap") else 1), pick(*WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv(x))
        if self.style == "chunk":
            a, b = x.chunk(2, dim=1)
        elif self.style == "split":
            a, b = torch.split(x, [self.half, self.half], 1)
        elif self.style == "slice":
            a, b = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        elif self.style == "narrow":
            a, b = x.narrow(1, 0, self.half), x.narrow(1, self.half, self.half)
        else:
            a, b = x.tensor_split(2, 1)
        b = self.branch(b) if self.join in ("cat", "swap", "mul") else b
        joined = {"cat": lambda: torch.cat([a, b], 1), "swap": lambda: torch.cat((b, a), dim=1), "add": lambda: a + b,
                  "mul": lambda: a * b, "max": lambda: torch.max(a, b)}  # fmt: skip
        return self.last(joined[self.join]())


@block("image")
class CrossStage(nn.Module):
    """YOLO's C2f: unequal parts, a chain whose every step is concatenated."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.c, conv = pick(2, 4), of_rank("Conv", shape)
        self.first = conv1x1(shape, 3 * self.c)
        self.steps = nn.ModuleList(conv(self.c, self.c, 1) for _ in range(pick(1, 2)))
        self.last = conv((3 + len(self.steps)) * self.c, pick(*WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.first(x).split((2 * self.c, self.c), 1))
        y.extend(F.relu(step(y[-1])) for step in self.steps)
        return self.last(torch.cat(y, 1))


@block("image")
class GatedConv(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.conv = conv1x1(shape, 2 * pick(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.conv(x), dim=1)


@block("image")
class Pad(nn.Module):
    """Zero padding of space or of channels (ResNet's option A)."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.pads = pick((1, 0), (0,) * 2 * (len(shape) - 1) + (1, 1), (0,) * 2 * (len(shape) - 1) + (0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.pads)[..., :9]


@block("image")
class Space(nn.Module):
    """Things done to space alone."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        functions = {
            "roll": lambda x: x.roll(1, -1),
            "flip": lambda x: x.flip(-1),
            "cumsum": lambda x: x.cumsum(-1),
            "mix": lambda x: x - x.mean(-1, keepdim=True),
            "softmax": lambda x: x * x.flatten(2).softmax(-1).view_as(x),
            "stack": lambda x: torch.stack([x, x.tanh(), x.flip(-1)], 0).sum(0),
            "stack_last": lambda x: torch.stack([x, x.sin()], dim=-1).amax(-1),
            "focus": lambda x: torch.cat([x[..., ::2], x[..., ::2] * 2], 1),
            "transpose": lambda x: x.transpose(1, -1).contiguous().transpose(-1, 1),
            "batch": lambda x: (
                x.flatten(0, 1).unsqueeze(1).exp().log1p().squeeze(1).unflatten(0, (x.shape[0], x.shape[1]))
            ),
            "coordinates": lambda x: torch.cat([x, torch.linspace(-1, 1, x.shape[-1]).expand_as(x[:, :1])], 1),
            "repeat": lambda x: x.repeat(1, 2, *[1] * (x.dim() - 2)),
            "interleave": lambda x: x.repeat_interleave(2, dim=1),
        }
        self.function = functions[pick(*functions)]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@block("image")
class OverChannels(nn.Module):
    """Ops that run over channels, between two convs: what they run over is frozen."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        functions = {
            "softmax": lambda x: x.softmax(1),
            "mean": lambda x: x * x.mean(1, keepdim=True).sigmoid(),
            "cbam": lambda x: x * torch.cat([x.mean(1, True), x.amax(1, True)], 1).sum(1, True).sigmoid(),
            "normalize": lambda x: F.normalize(x, dim=1),
            "topk": lambda x: x * (x >= x.topk(2, dim=1)[0][:, -1:]),
            "sort": lambda x: x.sort(1)[0],
            "roll": lambda x: x.roll(1, 1),
            "gram": lambda x: torch.bmm(
                torch.bmm(x.flatten(2), x.flatten(2).transpose(1, 2)) / 9, x.flatten(2)
            ).view_as(x),
            "first": lambda x: x * x[:, 0:1] + x[:, 1].unsqueeze(1),
            "strided": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
            "index": lambda x: x[:, torch.tensor([1, 0, 3, 2])],
        }
        self.first, self.function = conv1x1(shape, pick(*WIDTHS)), functions[pick(*functions)]
        outputs = after(Fn(lambda x: self.function(self.first(x))), shape)[0]
        self.last = of_rank("Conv", shape)(outputs, pick(*WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


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
        self.conv = conv(shape[0], self.width * 2, 1, groups=pick(*(g for g in (1, 2) if shape[0] % g == 0)))
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


# Tokens -----------------------------------------------------------------------------------------------------------


@block("tokens")
class Mlp(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        hidden = pick(8, 6, 12)
        self.norm = pick(nn.LayerNorm, nn.RMSNorm, nn.Identity)(shape[1])
        self.fc1, self.act, self.fc2 = nn.Linear(shape[1], hidden), activation(pick), nn.Linear(hidden, shape[1])
        self.residual = pick(True, False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(self.act(self.fc1(self.norm(x))))
        return x + y if self.residual else y


@block("tokens")
class GatedMlp(nn.Module):
    """SwiGLU and its relatives, with one or two input projections."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.style, self.hidden = pick("two", "chunk", "glu", "split", "slice", "unbind", "view"), pick(6, 8)
        C = shape[1]
        if self.style == "two":
            self.gate, self.up = nn.Linear(C, self.hidden, bias=False), nn.Linear(C, self.hidden, bias=False)
        else:
            self.fused = nn.Linear(C, 2 * self.hidden)
        self.down = nn.Linear(self.hidden, C)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "two":
            return x + self.down(F.silu(self.gate(x)) * self.up(x))
        y = self.fused(x)
        if self.style == "glu":
            return x + self.down(F.glu(y))
        if self.style == "chunk":
            gate, up = y.chunk(2, dim=-1)
        elif self.style == "split":
            gate, up = y.split(self.hidden, dim=-1)
        elif self.style == "slice":
            gate, up = y[..., : self.hidden], y[..., self.hidden :]
        elif self.style == "unbind":
            gate, up = y.view(*y.shape[:-1], 2, -1).unbind(-2)
        else:
            gate, up = y.view(*y.shape[:-1], self.hidden, 2).unbind(-1)
        return x + self.down(F.gelu(gate) * up)


@block("tokens")
class Attention(nn.Module):
    """Heads made and joined in various ways; what a head does is `_attend`."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.num_heads, self.head_dim = pick(2, 3, 4), pick(4, 2)
        self.style = pick("separate", "chunk", "reshape3", "per_head", "split", "literal", "shape")
        self.core = pick(
            "sdpa", "matmul", "einsum", "bmm", "bias", "temperature", "talking", "qk_norm", "linear", "mask"
        )
        self.inner = self.all_head_size = self.num_heads * self.head_dim
        C = shape[1]
        if self.style in ("separate", "shape", "literal"):
            self.q, self.k, self.v = (nn.Linear(C, self.inner, bias=pick(True, False)) for _ in range(3))
        else:
            self.qkv = nn.Linear(C, 3 * self.inner)
        self.proj = nn.Linear(self.inner, C)
        self.scale = self.head_dim**-0.5
        if self.style == "literal":
            heads, size = self.num_heads, self.head_dim
            self.cut = lambda t: t.view(t.shape[0], t.shape[1], heads, size).permute(0, 2, 1, 3)
        self._extras(shape[0])

    def _extras(self, n: int) -> None:
        if self.core == "bias":
            self.table = nn.Parameter(torch.randn(2 * n - 1, self.num_heads))
            self.register_buffer("index", torch.arange(n)[:, None] - torch.arange(n)[None] + n - 1)
        elif self.core == "temperature":
            self.temperature = nn.Parameter(torch.rand(self.num_heads, 1, 1) + 0.5)
        elif self.core == "talking":
            self.mix = nn.Linear(self.num_heads, self.num_heads)
        elif self.core == "qk_norm":
            self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n = x.shape[:2]
        y = self._attend(*self._heads(x))  # (b, heads, n, size)
        if self.style in ("separate", "split"):
            y = y.permute(0, 2, 1, 3).contiguous().view(b, n, self.inner)
        elif self.style in ("chunk", "literal"):
            y = y.transpose(1, 2).reshape(b, n, self.num_heads * self.head_dim)
        elif self.style == "per_head":
            y = y.permute(0, 2, 1, 3).flatten(-2)
        else:
            y = y.transpose(1, 2).reshape(b, n, -1)
        return x + self.proj(y)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        b, n, _ = x.shape
        if self.style == "separate":
            shape = (b, n, self.num_heads, self.head_dim)
            return tuple(layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.style == "literal":
            return self.cut(self.q(x)), self.cut(self.k(x)), self.cut(self.v(x))
        if self.style == "shape":
            return tuple(layer(x).view(b, n, -1, self.head_dim).movedim(2, 1) for layer in (self.q, self.k, self.v))
        if self.style == "reshape3":
            return self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.style == "per_head":
            return self.qkv(x).view(b, n, self.num_heads, 3 * self.head_dim).transpose(1, 2).chunk(3, dim=-1)
        parts = self.qkv(x).chunk(3, dim=-1) if self.style == "chunk" else self.qkv(x).split(self.all_head_size, 2)
        return tuple(t.view(b, n, self.num_heads, t.shape[-1] // self.num_heads).transpose(1, 2) for t in parts)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, n, _ = q.shape
        if self.core == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        if self.core == "qk_norm":
            return F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        if self.core == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            return q @ (k.transpose(-2, -1) @ v) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
        if self.core == "einsum":
            weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(self.scale).softmax(-1)
            return torch.einsum("bhij,bhjd->bhid", weights, v)
        if self.core == "bmm":
            q, k, v = (t.reshape(b * self.num_heads, n, self.head_dim) for t in (q, k, v))
            scores = torch.baddbmm(torch.zeros(1, n, n, dtype=q.dtype), q, k.transpose(1, 2), alpha=self.scale)
            return torch.bmm(scores.softmax(-1), v).view(b, self.num_heads, n, self.head_dim)
        scores = q @ k.transpose(-2, -1) * self.scale
        if self.core == "bias":
            scores = scores + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        elif self.core == "temperature":
            scores = scores * self.temperature
        elif self.core == "talking":
            scores = self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        elif self.core == "mask":
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(dim=-1) @ v


@block("tokens")
class GroupedQuery(nn.Module):
    """Fewer key/value heads than query heads."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.kv_heads, self.n_rep, self.d = pick(2, 3, 1), pick(2, 3), pick(2, 4)
        self.heads, C = self.kv_heads * self.n_rep, shape[1]
        self.style, self.fused = pick("interleave", "expand", "flag", "grouped"), pick(False, True)
        if self.fused:
            self.qkv = nn.Linear(C, (self.heads + 2 * self.kv_heads) * self.d, bias=False)
        else:
            self.q_proj = nn.Linear(C, self.heads * self.d)
            self.k_proj, self.v_proj = (nn.Linear(C, self.kv_heads * self.d) for _ in range(2))
        self.o_proj = nn.Linear(self.heads * self.d, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        if self.fused:
            few = self.kv_heads * self.d
            q, k, v = self.qkv(x).split([self.heads * self.d, few, few], dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = q.view(b, n, self.heads, self.d).transpose(1, 2)
        k, v = (t.view(b, n, self.kv_heads, self.d).transpose(1, 2) for t in (k, v))
        if self.style == "grouped":
            q = q.reshape(b, self.kv_heads, self.n_rep, n, self.d)
            y = (q @ k.unsqueeze(2).transpose(-1, -2)).softmax(-1) @ v.unsqueeze(2)
            return x + self.o_proj(y.flatten(1, 2).transpose(1, 2).reshape(b, n, -1))
        if self.style == "flag":
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, self._repeat(k), self._repeat(v))
        return x + self.o_proj(y.transpose(1, 2).reshape(b, n, self.heads * self.d))

    def _repeat(self, x: Tensor) -> Tensor:
        if self.style == "interleave":
            return x.repeat_interleave(self.n_rep, dim=1)
        b, h, n, d = x.shape
        return x[:, :, None, :, :].expand(b, h, self.n_rep, n, d).reshape(b, h * self.n_rep, n, d)


@block("tokens")
class Multihead(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        heads = pick(*(h for h in (2, 3, 4, 1) if shape[1] % h == 0))
        self.attention = nn.MultiheadAttention(shape[1], heads, bias=pick(True, False), batch_first=True)
        self.weights = pick(False, True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, need_weights=self.weights)
        return x + y if weights is None else x + y * weights.mean()


@block("tokens")
class Encoder(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        heads = pick(*(h for h in (2, 3, 4, 1) if shape[1] % h == 0))
        self.layer = nn.TransformerEncoderLayer(
            shape[1], heads, pick(6, 8), 0.0, norm_first=pick(True, False), batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block("tokens")
class EinsumAttention(nn.Module):
    """Heads as an axis of the weights."""

    reads: ClassVar = {"w": (1,), "wo": (0, 1)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        h, d = pick(2, 3), pick(2, 4)
        self.w = nn.Parameter(torch.randn(3, shape[1], h, d) / 3)
        self.wo = nn.Parameter(torch.randn(h, d, shape[1]) / 3)
        self.three = pick(False, True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnc,chd->bhnd", x, w) for w in self.w)
        a = torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1)
        if self.three:
            return x + torch.einsum("bhnm,bhmd,hdc->bnc", a, v, self.wo)
        return x + torch.einsum("bhnd,hdc->bnc", a @ v, self.wo)


@block("tokens")
class TokenMixing(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.norm, hidden = nn.LayerNorm(shape[1]), pick(4, 6)
        self.fc1, self.fc2 = nn.Linear(shape[0], hidden), nn.Linear(hidden, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x).transpose(1, 2)))).transpose(1, 2)


@block("tokens")
class RawProducts(nn.Module):
    """Weights that no nn.Linear holds: GPT-2's Conv1D, `weight.t()`, `@`, views and concatenations of weights."""

    reads: ClassVar = {"w1": (0,), "w3": (0,), "w2": (0,), "a": (0,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.style = pick("addmm", "matmul", "einsum", "linear_t", "flat", "cat", "lora", "scaled", "stacked")
        C, self.nf = shape[1], pick(6, 8)
        self.w1, self.b1 = nn.Parameter(torch.randn(C, self.nf) / 2), nn.Parameter(torch.randn(self.nf))
        self.w2, self.b2 = nn.Parameter(torch.randn(self.nf, C) / 2), nn.Parameter(torch.randn(C))
        if self.style == "cat":
            self.w3 = nn.Parameter(torch.randn(C, 4))
            self.a = nn.Parameter(torch.randn(4, C))
        elif self.style == "lora":
            self.down, self.up = nn.Linear(C, 4, bias=False), nn.Linear(4, self.nf, bias=False)
        elif self.style == "scaled":
            self.s = nn.Parameter(torch.rand(self.nf))

    def forward(self, x: Tensor) -> Tensor:  # noqa: PLR0911
        b, n, c = x.shape
        if self.style == "addmm":
            h = torch.addmm(self.b1, x.reshape(-1, x.size(-1)), self.w1).view(b, n, self.nf)
            return torch.addmm(self.b2, F.gelu(h).view(-1, self.nf), self.w2).view(*x.shape[:-1], c)
        if self.style == "matmul":
            return (x @ self.w1 + self.b1).relu() @ self.w2 + self.b2
        if self.style == "einsum":
            h = torch.einsum("bnc,ch->bnh", x, self.w1).sigmoid()
            return torch.einsum("bnh,hc->bnc", h, self.w2)
        if self.style == "linear_t":
            return F.linear(F.linear(x, self.w1.t(), self.b1).tanh(), self.w2.transpose(0, 1), self.b2)
        if self.style == "flat":
            w = self.w1.view(c, 2, self.nf // 2)
            h = torch.einsum("bnc,cgh->bngh", x, w).relu()
            return torch.einsum("bngh,ghc->bnc", h, self.w2.view(2, -1, c))
        if self.style == "cat":
            h = F.relu(x @ torch.cat([self.w1, self.w3], 1))
            return h @ torch.cat([self.w2, self.a], 0)
        if self.style == "lora":
            return F.silu(x @ self.w1 + self.up(self.down(x))) @ self.w2
        if self.style == "scaled":
            return F.relu(x @ (self.w1 * self.s)) @ (self.w2 * self.s[:, None].exp())
        h = torch.stack([x @ self.w1, x @ self.w1.flip(0)])
        return h.amax(0) @ self.w2


@block("tokens")
class Experts(nn.Module):
    """A mixture of experts: all computed, gated by softmax or by the best two."""

    reads: ClassVar = {"w1": (1,), "w2": (1,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        C, self.experts, hidden = shape[1], pick(3, 4), pick(4, 6)
        self.router, self.style = nn.Linear(C, self.experts), pick("softmax", "topk", "loop")
        self.w1 = nn.Parameter(torch.randn(self.experts, C, hidden) / 2)
        self.w2 = nn.Parameter(torch.randn(self.experts, hidden, C) / 2)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        if self.style == "topk":
            best, index = gate.topk(2, dim=-1)
            gate = torch.zeros_like(gate).scatter(-1, index, best)
        if self.style == "loop":
            ys = [F.silu(x @ self.w1[e]) @ self.w2[e] * gate[..., e : e + 1] for e in range(self.experts)]
            return x + sum(ys)
        h = torch.einsum("bnc,ech->bneh", x, self.w1).relu()
        return x + torch.einsum("bneh,ehc,bne->bnc", h, self.w2, gate)


@block("tokens")
class Grouped(nn.Module):
    """A block-diagonal linear layer: groups as an axis."""

    reads: ClassVar = {"weight": (1,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.groups, per = pick(2, 3), pick(2, 4)
        self.first = nn.Linear(shape[1], self.groups * per)
        self.weight = nn.Parameter(torch.randn(self.groups, per, 4))
        self.last = nn.Linear(self.groups * 4, shape[1])
        self.bmm = pick(False, True)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        y = self.first(x).unflatten(-1, (self.groups, -1))
        if self.bmm:
            y = torch.bmm(y.permute(2, 0, 1, 3).reshape(self.groups, b * n, -1), self.weight)
            y = y.view(self.groups, b, n, -1).permute(1, 2, 0, 3)
        else:
            y = torch.einsum("bngi,gio->bngo", y, self.weight)
        return self.last(F.relu(y.reshape(b, n, -1)))


@block("tokens")
class ConvOverTokens(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        hidden = pick(6, 8)
        self.fc1, self.fc2 = nn.Linear(shape[1], hidden), nn.Linear(hidden, shape[1])
        self.conv = nn.Conv1d(hidden, hidden, 3, padding=1, groups=pick(hidden, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.conv(self.fc1(x).transpose(1, 2))).transpose(1, 2))


@block("tokens")
class OverWidth(nn.Module):
    """Ops over the hidden channels of an MLP."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        hidden = pick(6, 8)
        functions = {
            "softmax": lambda h: h.softmax(-1),
            "mean": lambda h: h - h.mean(-1, keepdim=True),
            "norm": lambda h: F.layer_norm(h, h.shape[-1:]),
            "sum_gate": lambda h: h * h.sum(-1, keepdim=True).sigmoid(),
            "tokens": lambda h: h * h.softmax(1) - h.mean(1, keepdim=True),
            "max": lambda h: h * h.max(dim=-1, keepdim=True)[0],
            "cumsum": lambda h: h.cumsum(1) / 4,
            "flip": lambda h: h.flip(-1),
            "halves": lambda h: torch.cat([-h[..., h.shape[-1] // 2 :], h[..., : h.shape[-1] // 2]], -1),
            "self_product": lambda h: torch.einsum("bnc,bmc->bnm", h, h).softmax(-1) @ h,
            "outer": lambda h: (h.unsqueeze(-1) * h.unsqueeze(-2)).sum(-1),
        }
        self.fc1, self.fc2 = nn.Linear(shape[1], hidden), nn.Linear(hidden, pick(*WIDTHS))
        self.function = functions[pick(*functions)]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.function(self.fc1(x)))


@block("tokens")
class Positions(nn.Module):
    """A class token and position embeddings."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        n, C = shape
        self.token = nn.Parameter(torch.randn(1, 1, C)) if pick(True, False) else None
        n += self.token is not None
        self.table = nn.Embedding(n + 2, C) if pick(False, True) else None
        self.position = nn.Parameter(torch.randn(1, n, C)) if self.table is None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return x + (self.position if self.table is None else self.table(torch.arange(x.shape[1])))


@block("tokens")
class Shared(nn.Module):
    """Two layers with one weight; a module called twice; the transposed weight as a decoder."""

    reads: ClassVar = {"a.weight": (0,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        C, hidden = shape[1], pick(6, 8)
        self.style = pick("autoencoder", "tied", "twice", "square")
        self.a, self.b = nn.Linear(C, hidden), nn.Linear(C, hidden)
        self.out = nn.Linear(hidden, C)
        if self.style == "tied":
            self.b.weight = self.a.weight
        if self.style == "square":
            self.square = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "autoencoder":
            return F.linear(self.a(x).relu(), self.a.weight.t())
        if self.style == "twice":
            return self.out(F.gelu(self.a(self.out(F.gelu(self.a(x))))))
        if self.style == "square":
            return self.out(self.square(self.square(self.a(x)).tanh()).tanh())
        return self.out(F.relu(self.a(x)) * torch.sigmoid(self.b(x.flip(1))))


@block("tokens")
class Recurrent(nn.Module):
    """LSTM and GRU: frozen, but the layers around them need not be."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.cell = pick(nn.GRU, nn.LSTM)(shape[1], 5, batch_first=True, bidirectional=pick(False, True))
        self.fc1, self.fc2 = nn.Linear(5 * (1 + self.cell.bidirectional), 6), nn.Linear(6, pick(*WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(self.cell(x)[0])))


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


# Networks ---------------------------------------------------------------------------------------------------------


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
            made = table[pick(*table)](pick, shape)
            shape = after(made, shape)
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


@dataclass(frozen=True)
class Network:
    """A model in eval mode with a batch. `repr` is the call that makes it again."""

    seed: int
    choices: tuple[Any, ...]
    model: nn.Module = field(repr=False)
    batch: Any = field(repr=False)

    @property
    def stubborn(self) -> bool:
        """Whether sizes stand in the code of a forward, or follow from shapes in ways that suit some plans only."""
        return bool({"literal", "halves"}.intersection(map(str, self.choices)))

    def __repr__(self) -> str:
        names = [getattr(c, "__name__", c) for c in self.choices]
        return f"build({self.seed}, {names!r})"


def build(seed: int, choices: list[Any] | tuple[Any, ...]) -> Network:
    """The network of recorded choices; classes may be given by name."""
    left = iter(choices)

    def replay(*options: Any) -> Any:
        given = next(left)
        return next(option for option in options if given in (option, getattr(option, "__name__", option)))

    return _build(seed, replay)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Random networks; hypothesis shrinks towards few, plain blocks."""
    return _build(draw(st.integers(0, 99)), lambda *options: draw(st.sampled_from(options)))


def _build(seed: int, choose: Pick) -> Network:
    log: list[Any] = []

    def pick(*options: Any) -> Any:
        log.append(choose(*options))
        return log[-1]

    with _doubles(seed):
        model = Net(pick)
        _trained(model)
        batch = _batch(model)
    return Network(seed, tuple(log), model.eval(), batch)


@contextmanager
def _doubles(seed: int) -> Iterator[None]:
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _trained(model: nn.Module) -> None:
    """No parameter stays at its initial constant, and running statistics are not those of fresh layers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)


def _batch(model: Net) -> Any:
    def example() -> Tensor:
        if model.domain == "ids":
            return torch.randint(VOCABULARY, (BATCH, *model.example))
        return torch.randn(BATCH, *model.example)

    if model.inputs == "tensor":
        return example()
    pair = (example(), example())
    return pair if model.inputs == "tuple" else dict(zip("xy", pair, strict=True))
