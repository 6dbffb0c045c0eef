"""Layers of images and of signals, which are images of one spatial axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks.table import WIDTHS, Fn, Pick, Shape, activation, block, conv1x1, divisor, kernels, of_rank


@block("image")
class Conv(nn.Sequential):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        width, k = pick(*WIDTHS), kernels(pick, shape)
        groups = divisor(pick, (1, 2, 3, 4), shape[0], width)
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
        self.conv = conv1x1(shape, width, bias=False)
        norms = {
            "batch": lambda: of_rank("BatchNorm", shape)(width),
            "batch_plain": lambda: of_rank("BatchNorm", shape)(width, affine=False),
            "group": lambda: nn.GroupNorm(divisor(pick, (2, 1, 3, 4), width), width),
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
class Activation(Fn):
    def __init__(self, pick: Pick, shape: Shape) -> None:
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
        super().__init__(functions[pick(*functions)])


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
        groups = divisor(pick, (1, 2, 3, 4), shape[0], width)
        stride = pick(1, 2) if max(shape[1:]) < 8 else 1
        super().__init__(of_rank("ConvTranspose", shape)(shape[0], width, 2, stride, groups=groups), activation(pick))
