"""The geometry of a convolution, one spatial axis at a time.

Every convolution, plain or transposed, sums over taps u: output position r reads input position `source(u, r)`. All
we need of padding, stride and dilation is that table, one per axis, with -1 where a tap falls outside the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ispasp.errors import InputError

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Geometry:
    """Stride, padding, dilation, groups: an empty tuple stands for torch's default on every axis.

    >>> Geometry(stride=(2,), padding=(1,)).sources(0, size=4, kernel=3)   # taps x output positions
    tensor([[-1,  1],
            [ 0,  2],
            [ 1,  3]])
    """

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | Literal["same", "valid"] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: PaddingMode = "zeros"
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse combinations torch does not have either."""
        if self.groups < 1:
            raise InputError(f"groups={self.groups}: a convolution has at least one group")
        if self.transposed and (self.padding_mode != "zeros" or isinstance(self.padding, str)):
            raise InputError("a transposed convolution takes numeric padding with zeros only")

    def _along(self, values: Sequence[int], axis: int, default: int) -> int:
        return values[axis] if values else default

    def pads(self, axis: int, kernel: int) -> tuple[int, int]:
        """Padding before and after along one axis."""
        if self.padding == "valid":
            return 0, 0
        if self.padding == "same":
            total = self._along(self.dilation, axis, 1) * (kernel - 1)
            return total // 2, total - total // 2
        p = self._along(self.padding, axis, 0)
        return p, p

    def sources(self, axis: int, size: int, kernel: int) -> Tensor:
        """Input position that tap u reads for output position r, -1 for outside. (kernel, output size)"""
        stride, dilation = self._along(self.stride, axis, 1), self._along(self.dilation, axis, 1)
        before, after = self.pads(axis, kernel)
        u = torch.arange(kernel)[:, None] * dilation
        if self.transposed:
            out = (size - 1) * stride - before - after + dilation * (kernel - 1)
            out += self._along(self.output_padding, axis, 0) + 1
            x = torch.arange(out)[None, :] + before - u
            source = torch.div(x, stride, rounding_mode="floor")
            inside = (x % stride == 0) & (source >= 0) & (source < size)
            return torch.where(inside, source, -1)
        out = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
        if out < 1:
            raise InputError(
                f"a map of size {size} is too small for a kernel of {kernel} (dilation {dilation}, padding {before}): "
                "pass the maps the layer gets in the network"
            )
        x = torch.arange(out)[None, :] * stride + u - before
        return self._fold_back(x, size)

    def _fold_back(self, x: Tensor, size: int) -> Tensor:
        if self.padding_mode == "reflect":
            x = (size - 1) - (x.abs() - (size - 1)).abs()
        elif self.padding_mode == "replicate":
            x = x.clamp(0, size - 1)
        elif self.padding_mode == "circular":
            x = x % size
        return torch.where((x >= 0) & (x < size), x, -1)

    def apply(self, H: Tensor, weight: Tensor) -> Tensor:
        """The convolution itself, by torch. H (batch, channels, *size)"""
        axes = weight.ndim - 2
        stride, dilation = self.stride or (1,) * axes, self.dilation or (1,) * axes
        if self.transposed:
            padding, extra = self.padding or (0,) * axes, self.output_padding or (0,) * axes
            transposed = _TRANSPOSED[axes]
            return transposed(H, weight, None, stride, padding, extra, self.groups, dilation)  # type: ignore[arg-type]
        if self.padding_mode != "zeros":
            kernel = weight.shape[2:]
            pads = [p for axis in reversed(range(axes)) for p in self.pads(axis, kernel[axis])]
            H, padding = F.pad(H, pads, mode=self.padding_mode), (0,) * axes
        else:
            padding = self.padding or (0,) * axes
        return _CONV[axes](H, weight, None, stride, padding, dilation, self.groups)
