"""Small networks for pruning, written as people write them, with random BatchNorm statistics."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def alive(model: nn.Module, seed: int = 0) -> nn.Module:
    """Float64, in eval mode, with biases and statistics that are not those of initialisation."""
    g = torch.Generator().manual_seed(seed)
    for module in model.double().eval().modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not tensor.is_floating_point():
                continue
            values = torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
            if name == "running_var" or (tensor.ndim == 1 and name == "weight"):
                values = 0.5 + values.abs()
            elif tensor.ndim > 1:
                values = values * (tensor.numel() / len(tensor)) ** -0.5 * 1.5
            else:
                values = 0.3 * values
            tensor.data.copy_(values)
    return model


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers = [[nn.Linear(a, b, bias=bias), nn.ReLU()] for a, b in pairwise(widths)]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1])


class Block(nn.Module):
    """torchvision's basic block: everything in place, the downsample after the second convolution."""

    def __init__(self, inputs: int, hidden: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, hidden, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Three blocks: strided, plain and strided; the last one may be left out."""

    def __init__(self, *, small: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(6, 7, 8, stride=2), Block(8, 9, 8))
        self.layer2 = nn.Identity() if small else nn.Sequential(Block(8, 10, 6, stride=2))
        self.fc = nn.Linear(8 if small else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class ResidualMLP(nn.Module):
    """Blocks on a residual stream without a norm, so that the stream can lose units as well."""

    def __init__(self, width: int = 8, hidden: int = 9, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(x)


class ViewChangedInPlace(nn.Module):
    """Between two readers of a tensor a view of it is changed in place, which no edge of a graph tells."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 9), nn.Linear(9, 4), nn.Linear(9, 4)
        self.d = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        h.view(-1).mul_(-3.0).relu_()
        return self.d(torch.tanh(y - self.c(h)))


class CalledTwice(nn.Module):
    """One layer reads two hidden layers, which so become one dimension; what it makes is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.first = nn.Linear(5, 9), nn.Linear(5, 9), nn.Linear(5, 7)
        self.shared, self.c, self.d = nn.Linear(9, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.e = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.e(torch.relu(self.first(x)))
        y = torch.relu(self.shared(torch.relu(self.a(x)))) + torch.tanh(self.shared(torch.tanh(self.b(x))))
        return self.d(torch.relu(self.c(y)))


class Recurrent(nn.Module):
    """A layer that reads what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.step, self.c = nn.Linear(5, 9), nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(torch.relu(self.step(torch.tanh(self.step(h)))))


class Inception(nn.Module):
    """One tensor read by several convolutions, whose outputs stand side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.one = nn.Conv2d(8, 5, 1)
        self.reduce, self.three = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 7, 3, padding=1)
        self.pool, self.pooled = nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 4, 1)
        self.head = nn.Conv2d(16, 3, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        branches = [self.one(x), self.three(torch.relu(self.reduce(x))), self.pooled(self.pool(x))]
        return self.head(torch.relu(torch.cat(branches, 1))).mean((2, 3))


class DenseNet(nn.Module):
    """Every layer reads all that came before it."""

    def __init__(self, layers: int = 3, growth: int = 5) -> None:
        super().__init__()
        widths = [6 + growth * k for k in range(layers + 1)]
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in widths)
        self.convs = nn.ModuleList(nn.Conv2d(n, growth, 3, padding=1, bias=False) for n in widths[:-1])
        self.fc = nn.Linear(widths[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=False):
            features.append(conv(torch.relu(norm(torch.cat(features, 1)))))
        return self.fc(torch.relu(self.norms[-1](torch.cat(features, 1))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Two layers of attention and feed-forward, normalised before."""

    def __init__(self, width: int = 12, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 10) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(10, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for k, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * k](x))
            x = x + self.down[k](nn.functional.gelu(self.up[k](self.norms[2 * k + 1](x))))
        return self.head(x.mean(1))
