"""Consumers: the linear maps that read a hidden dimension.

A consumer computes `A H + bias`. The bias never enters a residual, so it is left out; a BatchNorm in eval mode after
the layer is part of the linear map, and enters as `scale` (gamma / sqrt(running_var + eps), one value per output).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ispasp.errors import InputError
from ispasp.types.checks import check_finite, checked_tensor
from ispasp.types.geometry import Geometry


@dataclass(frozen=True, eq=False)
class Consumer(ABC):
    """A linear map A that reads the channels of a hidden dimension.

    `units[c]` is the unit that input channel c belongs to, -1 for a channel that is not part of the hidden
    dimension; None means that channel i is unit i. An attention head of 64 channels is one unit of 64 channels.
    """

    weight: Tensor
    units: Tensor | None = None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a consumer; keep values only, so that no selection builds an autograd graph."""
        checked_tensor("a consumer's weight", self.weight)
        self._check_weight()
        if self.weight.numel() == 0:
            raise InputError(f"a weight of shape {tuple(self.weight.shape)} is empty: there is nothing to prune")
        check_finite("consumer weight", self.weight, "repair the layer before pruning it")
        object.__setattr__(self, "weight", self.weight.detach())
        if self.units is not None:
            object.__setattr__(self, "units", self._checked_units(self.units))
        if self.scale is not None:
            object.__setattr__(self, "scale", self._checked_scale(self.scale))

    def _checked_units(self, given: Tensor) -> Tensor:
        units, ask = checked_tensor("units", given), "pass one unit index per input channel, -1 for channels outside"
        shape = tuple(units.shape)
        if shape != (self.channels,):
            raise InputError(f"units has shape {shape}, the consumer reads {self.channels} channels: {ask}")
        if units.is_floating_point() or units.dtype == torch.bool:
            raise InputError(f"units is {units.dtype}, an index is an integer: {ask}, as int64")
        if int(units.min()) < -1 or int(units.max()) < 0:
            raise InputError(f"units goes from {int(units.min())} to {int(units.max())}, a unit from 0 on: {ask}")
        return units.long()

    def _checked_scale(self, given: Tensor) -> Tensor:
        scale = checked_tensor("scale", given)
        if tuple(scale.shape) != (self.outputs,):
            raise InputError(
                f"scale has shape {tuple(scale.shape)}, the consumer has {self.outputs} outputs: "
                "pass one factor per output channel"
            )
        check_finite("consumer scale", scale, "repair the BatchNorm before pruning")
        return scale.detach()

    @abstractmethod
    def _check_weight(self) -> None:
        """Raise if the weight does not have the shape this map needs."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of input channels."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of output channels."""

    @abstractmethod
    def __call__(self, H: Tensor) -> Tensor:
        """A H in the dtype of H, without bias: H as the layer gets it."""

    def _floating(self, H: Tensor) -> Tensor:
        # The map is computed in the dtype of H; integers would round the weight.
        return H if H.is_floating_point() else H.to(torch.promote_types(self.weight.dtype, torch.float32))

    def unit_of(self) -> Tensor:
        """Unit of every input channel. (channels,)

        >>> LinearConsumer(torch.ones(1, 3)).unit_of()
        tensor([0, 1, 2])
        """
        if self.units is not None:
            return self.units.to(self.weight.device)
        return torch.arange(self.channels, device=self.weight.device)

    def count_units(self) -> int:
        """Number of units: the largest index + 1.

        >>> LinearConsumer(torch.ones(1, 5), units=torch.tensor([0, 0, 1, 1, -1])).count_units()  # two heads of two
        2
        """
        return int(self.unit_of().max()) + 1


@dataclass(frozen=True, eq=False)
class LinearConsumer(Consumer):
    """A linear layer: weight (outputs, channels), input (..., channels).

    >>> A = LinearConsumer(torch.tensor([[1.0, 2.0]]), scale=torch.tensor([10.0]))
    >>> A(torch.tensor([[1.0, 1.0]]))
    tensor([[30.]])
    """

    def _check_weight(self) -> None:
        if self.weight.ndim != 2:
            raise InputError(
                f"a linear weight is (outputs, channels), this one has shape {tuple(self.weight.shape)}: "
                "pass the weight of a linear layer, or a ConvConsumer"
            )

    @property
    def channels(self) -> int:
        """Number of input channels."""
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return self.weight.shape[0]

    def __call__(self, H: Tensor) -> Tensor:
        """A H = scale * (H W^T), H (..., channels) -> (..., outputs).

        >>> LinearConsumer(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))(torch.tensor([3.0, 4.0]))
        tensor([11.,  4.])
        """
        H = self._floating(H)
        out = F.linear(H, self.weight.to(H.dtype))
        return out if self.scale is None else out * self.scale.to(H.dtype)


@dataclass(frozen=True, eq=False)
class ConvConsumer(Consumer):
    """A convolution in one to three spatial dimensions, any stride, padding, dilation and groups.

    Weight as torch keeps it: (outputs, channels / groups, *kernel), and (channels, outputs / groups, *kernel) for a
    transposed one. Input (batch, channels, *size).

    >>> A = ConvConsumer(torch.ones(1, 1, 3, 3), geometry=Geometry(padding=(1, 1)))
    >>> A(torch.ones(1, 1, 2, 2))
    tensor([[[[4., 4.],
              [4., 4.]]]])
    """

    geometry: Geometry = Geometry()

    def _check_weight(self) -> None:
        if not 3 <= self.weight.ndim <= 5:
            raise InputError(
                f"a convolution's weight has 3 to 5 axes (outputs, channels / groups, *kernel), "
                f"this one has shape {tuple(self.weight.shape)}: pass the weight of a convolution, or a LinearConsumer"
            )
        self.geometry.check_axes(self.weight.ndim - 2)
        if self.weight.shape[0] % self.geometry.groups:
            raise InputError(
                f"a weight of {self.weight.shape[0]} channels cannot be divided into {self.geometry.groups} groups: "
                "pass the groups of the layer"
            )

    @property
    def channels(self) -> int:
        """Number of input channels."""
        rows, columns = self.weight.shape[:2]
        return rows if self.geometry.transposed else columns * self.geometry.groups

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        rows, columns = self.weight.shape[:2]
        return columns * self.geometry.groups if self.geometry.transposed else rows

    @property
    def kernel(self) -> tuple[int, ...]:
        """Size of the kernel along each spatial axis."""
        return tuple(self.weight.shape[2:])

    def grouped_weight(self) -> Tensor:
        """The weight as (groups, outputs / groups, channels / groups, *kernel).

        >>> ConvConsumer(torch.ones(6, 2, 3, 3), geometry=Geometry(groups=2)).grouped_weight().shape
        torch.Size([2, 3, 2, 3, 3])
        """
        g = self.geometry.groups
        split = self.weight.reshape(g, self.weight.shape[0] // g, *self.weight.shape[1:])
        return split.transpose(1, 2) if self.geometry.transposed else split

    def __call__(self, H: Tensor) -> Tensor:
        """A H = scale * conv(H, W), H (batch, channels, *size) -> (batch, outputs, *output size).

        >>> A = ConvConsumer(torch.ones(1, 1, 2), scale=torch.tensor([10.0]), geometry=Geometry(stride=(2,)))
        >>> A(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]))
        tensor([[[30., 70.]]])
        """
        H = self._floating(H)
        out = self.geometry.apply(H, self.weight.to(H.dtype))
        if self.scale is None:
            return out
        return out * self.scale.to(H.dtype).reshape(-1, *(1,) * len(self.kernel))
