"""Random pruning problems: consumers, the activations they get, and the layers the reference runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from ispasp.engine import measure
from ispasp.types import Consumer, ConvConsumer, LinearConsumer, Statistics
from ispasp.types.consumer import Geometry

KINDS = ("linear", "tokens", "heads", "scaled", "conv", "transposed", "two", "batchnorm")


@dataclass(frozen=True)
class Problem:
    consumers: list[Consumer]
    layers: list[nn.Module]  # read H with channels on axis 1
    channels_per_unit: int
    units: int
    shape: tuple[int, ...]  # of H without the batch, channels first
    seed: int
    signed: bool

    def data(self, batch: int, part: int = 0) -> Tensor:
        g = torch.Generator().manual_seed(1000 * self.seed + part)
        H = torch.randn(batch, *self.shape, generator=g, dtype=torch.float64)
        return H if self.signed else H.relu()

    def as_consumer_gets(self, A: Consumer, H: Tensor) -> Tensor:
        return H if isinstance(A, ConvConsumer) else H.movedim(1, -1)

    def statistics(self, H: Tensor, needs: tuple[str, ...] = ("moment",)) -> Statistics:
        return Statistics(self.units, tuple(measure(A, self.as_consumer_gets(A, H), needs) for A in self.consumers))


class _ChannelsFirst(nn.Module):
    """A linear layer for (B, C, ...) activations."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.movedim(1, -1))


@st.composite
def problems(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> Problem:
    kind = draw(st.sampled_from(kinds))
    seed = draw(st.integers(0, 10**6))
    signed = draw(st.booleans())
    torch.manual_seed(seed)
    if kind == "scaled":
        units, outputs = draw(st.integers(1, 12)), draw(st.integers(1, 8))
        layer = nn.Linear(units, outputs, dtype=torch.float64)
        norm = _trained_batchnorm(outputs, 1).eval()
        A = LinearConsumer(layer.weight.detach(), scale=_scale(norm))
        return Problem([A], [nn.Sequential(layer, norm)], 1, units, (units,), seed, signed)
    if kind in ("linear", "tokens", "heads"):
        per_unit = draw(st.integers(2, 4)) if kind == "heads" else 1
        units = draw(st.integers(1, 12))
        layer = nn.Linear(units * per_unit, draw(st.integers(1, 8)), dtype=torch.float64)
        unit_of = torch.arange(units).repeat_interleave(per_unit)
        shape = (units * per_unit,) if kind == "linear" else (units * per_unit, 3)
        A = LinearConsumer(layer.weight.detach(), units=unit_of)
        return Problem([A], [_ChannelsFirst(layer)], per_unit, units, shape, seed, signed)
    conv, reads, size = draw(convolutions(transposed=kind == "transposed"))
    layers: list[nn.Module] = [conv]
    consumers: list[Consumer] = [reads]
    if kind == "two":
        linear = nn.Linear(conv.in_channels, draw(st.integers(1, 5)), dtype=torch.float64)
        layers.append(_ChannelsFirst(linear))
        consumers.append(LinearConsumer(linear.weight.detach()))
    if kind == "batchnorm":
        norm = _trained_batchnorm(conv.out_channels, len(size)).eval()
        layers = [nn.Sequential(conv, norm)]
        consumers = [ConvConsumer(reads.weight, scale=_scale(norm), geometry=reads.geometry)]
    return Problem(consumers, layers, 1, conv.in_channels, (conv.in_channels, *size), seed, signed)


@st.composite
def convolutions(draw: st.DrawFn, transposed: bool = False) -> tuple[nn.Module, ConvConsumer, tuple[int, ...]]:
    axes = draw(st.integers(1, 3 if not transposed else 2))
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    channels, outputs = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 3))
    each = st.tuples(*(st.integers(1, 3),) * axes)
    kernel, stride, dilation = draw(each), draw(each), draw(st.tuples(*(st.integers(1, 2),) * axes))
    padding: Any = tuple(draw(st.integers(0, k - 1)) for k in kernel)
    size = tuple(draw(st.integers(d * (k - 1) + 1, 7)) for k, d in zip(kernel, dilation, strict=True))
    if transposed:
        cls = (nn.ConvTranspose1d, nn.ConvTranspose2d)[axes - 1]
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        conv = cls(channels, outputs, kernel, stride, padding, extra, groups, True, dilation, dtype=torch.float64)
        geometry = Geometry(stride, padding, dilation, groups, transposed=True, output_padding=extra)
    else:
        cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        if draw(st.booleans()):
            padding = "same" if set(stride) == {1} else "valid"
        conv = cls(channels, outputs, kernel, stride, padding, dilation, groups, True, dtype=torch.float64)
        geometry = Geometry(stride, padding, dilation, groups)
    return conv, ConvConsumer(conv.weight.detach(), geometry=geometry), size


def _scale(norm: nn.Module) -> Tensor:
    return (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()


def _trained_batchnorm(channels: int, axes: int) -> nn.Module:
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1](channels, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.1, 3.0)
    return norm
