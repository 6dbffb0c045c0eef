"""Producers and consumers: the layers that make and read the units of a hidden dimension, as linear maps.

A consumer computes `A H + bias`. Residuals do not depend on the bias, so it is left out. A BatchNorm in eval mode after
the layer belongs to the linear map and enters as `scale` (gamma / sqrt(running_var + eps), one value per output).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ispasp.errors import InputError
from ispasp.types.dimension import check_finite, checked_tensor, is_integer

_BLOCK = 128  # rows that are multiplied at a time: fewer are slower, with more there is less to save

_LEAST = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}


@dataclass(frozen=True)
class Geometry:
    """Stride, padding with zeros, dilation and groups of a convolution. An empty tuple is torch's default."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | Literal["same", "valid"] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_integer(self.groups) or self.groups < 1:
            raise InputError(f"groups={self.groups!r}: pass an integer >= 1")
        for name, least in _LEAST.items():
            values = getattr(self, name)
            if name == "padding" and isinstance(values, str) and values in ("same", "valid"):
                continue
            if not isinstance(values, Sequence) or not all(is_integer(value) and value >= least for value in values):
                words = ", or 'same' or 'valid'" if name == "padding" else ""
                raise InputError(f"{name}={values!r}: pass a tuple of integers >= {least}, one per spatial axis{words}")
            object.__setattr__(self, name, tuple(values))
        strided = self.padding == "same" and any(step != 1 for step in self.stride)
        if strided or (self.transposed and isinstance(self.padding, str)):
            wrong = f"padding={self.padding!r} with stride={self.stride}, transposed={self.transposed}"
            raise InputError(f"{wrong}: pass numeric padding")
        if not self.transposed and any(self.output_padding):
            raise InputError(f"output_padding={self.output_padding}: only a transposed convolution has it")

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise if this is not the geometry of a convolution with a weight of this shape."""
        axes = len(shape) - 2
        if shape[0] % self.groups:
            raise InputError(f"{shape[0]} channels do not divide into {self.groups} groups: pass the layer's groups")
        for name in _LEAST:
            values = getattr(self, name)
            if not isinstance(values, str) and len(values) not in (0, axes):
                raise InputError(
                    f"{name}={values} has {len(values)} values: pass one for each of the {axes} spatial axes"
                )
        for axis, extra in enumerate(self.output_padding):
            if extra >= max(_along(self.stride, axis, 1), _along(self.dilation, axis, 1)):
                raise InputError(f"output_padding={self.output_padding}: pass less than the stride or the dilation")

    def pads(self, axis: int, kernel: int) -> tuple[int, int]:
        """Padding before and after one axis; "same" pads dilation * (kernel - 1), the odd one after."""
        if self.padding == "valid":
            return 0, 0
        if self.padding == "same":
            total = _along(self.dilation, axis, 1) * (kernel - 1)
            return total // 2, total - total // 2
        return (_along(self.padding, axis, 0),) * 2

    def sources(self, axis: int, size: int, kernel: int) -> Tensor:
        """Input position that tap u reads for output position r, -1 outside the input. (kernel, output size)

        It is r * stride + u * dilation - padding. A transposed convolution solves this for its input:
        (r + padding - u * dilation) / stride, outside where that is no integer.
        """
        stride, dilation = _along(self.stride, axis, 1), _along(self.dilation, axis, 1)
        (before, after), reach = self.pads(axis, kernel), dilation * (kernel - 1)
        if self.transposed:
            out = (size - 1) * stride - before - after + reach + _along(self.output_padding, axis, 0) + 1
        else:
            out = (size + before + after - reach - 1) // stride + 1
        if out < 1:
            raise InputError(
                f"a map of size {size} is too small for a kernel of {kernel} (dilation {dilation}, padding {before}): "
                "pass the maps the layer gets in the network"
            )
        u, r = torch.arange(kernel, device="cpu")[:, None] * dilation, torch.arange(out, device="cpu")[None, :]
        if self.transposed:
            x = torch.div(r + before - u, stride, rounding_mode="floor")
            return torch.where((x * stride == r + before - u) & (x >= 0) & (x < size), x, -1)
        x = r * stride + u - before
        return torch.where((x >= 0) & (x < size), x, -1)

    def apply(self, H: Tensor, weight: Tensor) -> Tensor:
        """Run the convolution. H (batch, channels, *size) -> (batch, outputs, *output size)"""
        axes = weight.ndim - 2
        zeros, ones = (0,) * axes, (1,) * axes
        pads = [self.pads(axis, kernel) for axis, kernel in enumerate(weight.shape[2:])]
        padding = tuple(before for before, _ in pads)
        if any(before != after for before, after in pads):
            H, padding = F.pad(H, [size for pair in reversed(pads) for size in pair]), zeros
        stride, dilation, extra = self.stride or ones, self.dilation or ones, self.output_padding or zeros
        return torch.convolution(H, weight, None, stride, padding, dilation, self.transposed, extra, self.groups)


def _along(values: Sequence[int] | str, axis: int, default: int) -> int:
    return int(values[axis]) if values else default


@dataclass(frozen=True, eq=False)
class _Layer(ABC):
    """A weight with the unit of each channel. It holds values only, so that no selection builds an autograd graph."""

    role: ClassVar[str]
    ranks: ClassVar[Sequence[int]] = (2,)  # numbers of axes that the weight may have
    expected: ClassVar[str]  # the weight, in the remedy of an error
    weight: Tensor
    units: Tensor | None = None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        checked_tensor(f"a {self.role}'s weight", self.weight)
        shape = tuple(self.weight.shape)
        if len(shape) not in self.ranks:
            raise InputError(f"the weight of a {type(self).__name__} has shape {shape}: pass {self.expected}")
        if self.weight.numel() == 0:
            raise InputError(f"a weight of shape {shape} is empty: there is nothing to prune")
        check_finite(f"{self.role} weight", self.weight, "repair the layer before pruning it")
        object.__setattr__(self, "weight", self.weight.detach())
        if self.units is not None:
            object.__setattr__(self, "units", self._checked_units(checked_tensor("units", self.units)))
        if self.scale is not None:
            shape = tuple(checked_tensor("scale", self.scale).shape)
            if shape != (self.outputs,):
                raise InputError(f"scale has shape {shape}, the {self.role} {self.outputs} outputs: pass a factor each")
            check_finite(f"{self.role} scale", self.scale, "repair the BatchNorm before pruning")
            object.__setattr__(self, "scale", self.scale.detach())

    def _checked_units(self, units: Tensor) -> Tensor:
        shape, remedy = tuple(units.shape), "pass one unit index per channel, -1 for channels outside"
        if shape != (self.channels,):
            raise InputError(f"units has shape {shape}, the {self.role} has {self.channels} channels: {remedy}")
        if units.is_floating_point() or units.dtype == torch.bool:
            raise InputError(f"units is {units.dtype}: {remedy}, as int64")
        if int(units.min()) < -1 or int(units.max()) < 0:
            raise InputError(f"units goes from {int(units.min())} to {int(units.max())}: {remedy}")
        return units.detach().long()

    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of channels that belong to units: outputs of a producer, inputs of a consumer."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of output channels."""

    def unit_of(self) -> Tensor:
        """Unit of every channel, -1 outside the hidden dimension. (channels,)"""
        if self.units is not None:
            return self.units.to(self.weight.device)
        return torch.arange(self.channels, device=self.weight.device)


@dataclass(frozen=True, eq=False)
class Producer(_Layer):
    """A layer that makes the channels of a hidden dimension: one row of weights for each channel.

    `weight` (channels, fan-in): a convolution's filters flattened. `units[c]` is the unit of channel c, -1 outside the
    hidden dimension; None means that channel i is unit i. `scale` (channels,) is the weight (gamma) of a BatchNorm
    right after the layer.

    >>> Producer(torch.ones(4, 3), units=torch.tensor([0, 0, 1, 1])).unit_of()
    tensor([0, 0, 1, 1])
    """

    role: ClassVar[str] = "producer"
    expected: ClassVar[str] = "(channels, fan-in), a convolution's filters flattened"

    @property
    def channels(self) -> int:
        return self.weight.shape[0]

    outputs = channels


@dataclass(frozen=True, eq=False)
class Consumer(_Layer):
    """A linear map A that reads the channels of a hidden dimension.

    `units[c]` is the unit of input channel c, -1 outside the hidden dimension; None means that channel i is unit i. An
    attention head of 64 channels is one unit of 64 channels.
    """

    role: ClassVar[str] = "consumer"

    def __call__(self, H: Tensor) -> Tensor:
        """A H in the dtype of H, without bias: H as the layer gets it."""
        if not H.is_floating_point():  # integers would round the weight
            H = H.to(torch.promote_types(self.weight.dtype, torch.float32))
        out = self._apply(H, self.weight.to(H.dtype))
        return out if self.scale is None else out * self.scale.to(H.dtype).reshape(-1, *(1,) * len(self.kernel))

    @abstractmethod
    def _apply(self, H: Tensor, weight: Tensor) -> Tensor:
        """The map without its scale, by a weight in the dtype of H."""

    @property
    def kernel(self) -> tuple[int, ...]:
        """Size of the kernel along each spatial axis; () for a linear layer."""
        return tuple(self.weight.shape[2:])

    @abstractmethod
    def grouped_weight(self) -> Tensor:
        """The weight as (groups, outputs / groups, channels / groups, *kernel); a linear layer has one group."""

    @abstractmethod
    def ungrouped(self, weight: Tensor) -> Tensor:
        """A weight as `grouped_weight` gives it, back in the layout of the layer's own."""

    def per_channel(self, by_unit: Tensor) -> Tensor:
        """The value of each channel's unit, 0 outside the hidden dimension. (units,) -> (channels, *1s)"""
        unit_of = self.unit_of()
        values = torch.where(unit_of >= 0, by_unit[unit_of.clamp(min=0)], 0.0)
        return values.reshape(-1, *(1,) * len(self.kernel))

    def count_units(self) -> int:
        """Number of units: the largest index + 1."""
        return int(self.unit_of().max()) + 1


@dataclass(frozen=True, eq=False)
class LinearConsumer(Consumer):
    """A linear layer: weight (outputs, channels), input (..., channels).

    >>> A = LinearConsumer(torch.tensor([[1.0, 2.0]]), scale=torch.tensor([10.0]))
    >>> A(torch.tensor([[1.0, 1.0]]))
    tensor([[30.]])
    """

    expected: ClassVar[str] = "that of a linear layer (outputs, channels), or a ConvConsumer"

    @property
    def channels(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def grouped_weight(self) -> Tensor:
        return self.weight[None]

    def ungrouped(self, weight: Tensor) -> Tensor:
        return weight[0]

    def _apply(self, H: Tensor, weight: Tensor) -> Tensor:
        """H W^T, H (..., channels) -> (..., outputs)."""
        return F.linear(H, weight)


@dataclass(frozen=True, eq=False)
class ConvConsumer(Consumer):
    """A convolution in one to three spatial dimensions, any stride, padding, dilation and groups.

    Weight as torch keeps it: (outputs, channels / groups, *kernel), or (channels, outputs / groups, *kernel) for a
    transposed one. Input (batch, channels, *size).

    >>> A = ConvConsumer(torch.ones(1, 1, 2), scale=torch.tensor([10.0]), geometry=Geometry(stride=(2,)))
    >>> A(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]))
    tensor([[[30., 70.]]])
    """

    ranks: ClassVar[Sequence[int]] = (3, 4, 5)
    expected: ClassVar[str] = "3 to 5 axes (outputs, channels / groups, *kernel), or a LinearConsumer"
    geometry: Geometry = Geometry()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.geometry.check(tuple(self.weight.shape))

    @property
    def channels(self) -> int:
        rows, columns = self.weight.shape[:2]
        return rows if self.geometry.transposed else columns * self.geometry.groups

    @property
    def outputs(self) -> int:
        rows, columns = self.weight.shape[:2]
        return columns * self.geometry.groups if self.geometry.transposed else rows

    def grouped_weight(self) -> Tensor:
        split = self.weight.reshape(self.geometry.groups, -1, *self.weight.shape[1:])
        return split.transpose(1, 2) if self.geometry.transposed else split

    def ungrouped(self, weight: Tensor) -> Tensor:
        return (weight.transpose(1, 2) if self.geometry.transposed else weight).flatten(0, 1)

    def _apply(self, H: Tensor, weight: Tensor) -> Tensor:
        """conv(H, W), H (batch, channels, *size) -> (batch, outputs, *output size)."""
        return self.geometry.apply(H, weight)


def output_size(consumer: Consumer, H: Tensor) -> tuple[int, ...]:
    """The output positions of one example along each axis, as one input H of the consumer gives them."""
    if not isinstance(consumer, ConvConsumer):
        return tuple(H.shape[1:-1])
    axes = enumerate(zip(H.shape[2:], consumer.kernel, strict=True))
    return tuple(consumer.geometry.sources(axis, *sizes).shape[1] for axis, sizes in axes)


def patches(consumer: Consumer, H: Tensor, at: Tensor | None = None) -> Tensor:
    """Unfold the input so that the consumer becomes one matrix product per group.

    Returns X (groups, K, N), K = channels / groups x taps (channel-major), N = examples x output positions, so that
    `weight.flatten(1) @ X` is the layer's output. `at` has numbers of positions: N = examples x these.
    """
    if not isinstance(consumer, ConvConsumer):
        rows = H if at is None else H.reshape(len(H), -1, H.shape[-1])[:, at]
        return rows.reshape(-1, H.shape[-1]).T[None]
    geometry, groups = consumer.geometry, consumer.geometry.groups
    if not geometry.transposed:
        return _unfolded(consumer, H, at)
    X = H.reshape(H.shape[0], groups, -1, *H.shape[2:])  # (B, g, C/g, *size)
    for axis, (size, kernel) in enumerate(zip(H.shape[2:], consumer.kernel, strict=True)):
        source = geometry.sources(axis, size, kernel).to(H.device)  # (kernel, out)
        dim = 3 + 2 * axis  # every axis done so far has become two: tap and output position
        before, after = X.shape[:dim], X.shape[dim + 1 :]
        X = X.index_select(dim, source.clamp(min=0).flatten()).reshape(*before, *source.shape, *after)
        X = X * (source >= 0).reshape(*source.shape, *(1,) * len(after)).to(X.dtype)
    taps = range(3, X.ndim, 2)
    X = X.permute(1, 2, *taps, 0, *range(4, X.ndim, 2)).flatten(3 + len(taps))  # (g, C/g, *taps, B, positions)
    return (X if at is None else X[..., at]).flatten(-2).flatten(1, -2)


def _unfolded(consumer: ConvConsumer, H: Tensor, at: Tensor | None) -> Tensor:
    """The usual case: a view of every tap at every position, and one copy."""
    geometry, kernel = consumer.geometry, consumer.kernel
    pads = [geometry.pads(axis, size) for axis, size in enumerate(kernel)]
    H = F.pad(H, [width for before_and_after in reversed(pads) for width in before_and_after])
    step, spread = geometry.stride or (1,) * len(kernel), geometry.dilation or (1,) * len(kernel)
    reach = [d * (k - 1) + 1 for d, k in zip(spread, kernel, strict=True)]
    out = [(size - r) // s + 1 for size, r, s in zip(H.shape[2:], reach, step, strict=True)]
    batch, channel, *space = H.stride()
    taps, moves = ([a * b for a, b in zip(each, space, strict=True)] for each in (spread, step))
    X = H.as_strided((H.shape[1], *kernel, len(H), *out), (channel, *taps, batch, *moves))
    if at is not None:
        places: tuple[Any, ...] = tuple(at // math.prod(out[axis + 1 :]) % size for axis, size in enumerate(out))
        X = X[(..., *places)]
    return X.reshape(geometry.groups, H.shape[1] // geometry.groups * math.prod(kernel), -1)


def products_of_rows(X: Tensor) -> Tensor:
    """X X^T: blocks below the diagonal are mirrored, not multiplied. (..., K, N) -> (..., K, K)

    >>> products_of_rows(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[5., 6.],
            [6., 9.]])
    """
    found = X.new_empty(*X.shape[:-1], X.shape[-2])
    for start in range(0, X.shape[-2], _BLOCK):
        end = start + _BLOCK
        found[..., start:end, start:] = X[..., start:end, :] @ X[..., start:, :].mT
        found[..., end:, start:end] = found[..., start:end, end:].mT
    return found
