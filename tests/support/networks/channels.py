"""Image blocks that gate, shuffle, cut, join and pad channels, and ops over channels or over space."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks.table import WIDTHS, Fn, Pick, Shape, after, block, conv1x1, of_rank


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
class Space(Fn):
    """Things done to space alone."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
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
        super().__init__(functions[pick(*functions)])


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
