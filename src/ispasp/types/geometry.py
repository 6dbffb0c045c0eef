"""The geometry of a convolution, one spatial axis at a time.

Every convolution, plain or transposed, sums over taps u: output position r reads input position `source(u, r)`. All
we need of padding, stride and dilation is that table, one per axis, with -1 where a tap falls outside the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ispasp.errors import InputError
from ispasp.types.checks import is_integer

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_LEAST = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
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
        if not is_integer(self.groups) or self.groups < 1:
            raise InputError(f"groups={self.groups!r}: a convolution has an integer number of groups, at least one")
        if self.padding_mode not in get_args(PaddingMode):
            raise InputError(f"padding_mode={self.padding_mode!r}: choose from {', '.join(get_args(PaddingMode))}")
        for name, least in _LEAST.items():
            self._check_values(name, least)
        if self.padding == "same" and any(step != 1 for step in self.stride):
            raise InputError(f"padding='same' with stride={self.stride}: pass numeric padding, or stride 1")
        if self.transposed and (self.padding_mode != "zeros" or isinstance(self.padding, str)):
            raise InputError(
                f"padding={self.padding!r}, padding_mode={self.padding_mode!r}: a transposed convolution takes numeric "
                "padding with zeros only"
            )
        if not self.transposed and any(self.output_padding):
            raise InputError(
                f"output_padding={self.output_padding}: only a transposed convolution has it; leave it out"
            )

    def _check_values(self, name: str, least: int) -> None:
        values = getattr(self, name)
        if name == "padding" and isinstance(values, str) and values in ("same", "valid"):
            return
        if not isinstance(values, Sequence) or not all(is_integer(value) and value >= least for value in values):
            words = ", or 'same' or 'valid'" if name == "padding" else ""
            raise InputError(f"{name}={values!r}: pass a tuple of integers >= {least}, one per spatial axis{words}")
        object.__setattr__(self, name, tuple(values))

    def check_axes(self, axes: int) -> None:
        """Refuse a geometry that is not one of a convolution with so many spatial axes.

        >>> Geometry(stride=(2,)).check_axes(2)
        Traceback (most recent call last):
        ...
        ispasp.errors.InputError: stride=(2,) has 1 values, the convolution has 2 spatial axes: pass one value per axis
        """
        for name in _LEAST:
            values = getattr(self, name)
            if not isinstance(values, str) and len(values) not in (0, axes):
                raise InputError(
                    f"{name}={values} has {len(values)} values, the convolution has {axes} spatial axes: "
                    "pass one value per axis"
                )
        for axis, extra in enumerate(self.output_padding):
            if extra >= max(self._along(self.stride, axis, 1), self._along(self.dilation, axis, 1)):
                raise InputError(f"output_padding={self.output_padding}: pass less than the stride or the dilation")

    def _along(self, values: Sequence[int], axis: int, default: int) -> int:
        return values[axis] if values else default

    def pads(self, axis: int, kernel: int) -> tuple[int, int]:
        """Padding before and after along one axis; "same" pads dilation * (kernel - 1), the odd one after.

        >>> Geometry(padding="same").pads(0, kernel=4)
        (1, 2)
        """
        if self.padding == "valid":
            return 0, 0
        if self.padding == "same":
            total = self._along(self.dilation, axis, 1) * (kernel - 1)
            return total // 2, total - total // 2
        p = self._along(self.padding, axis, 0)
        return p, p

    def sources(self, axis: int, size: int, kernel: int) -> Tensor:
        """Input position that tap u reads for output position r, -1 for outside. (kernel, output size)

        r * stride + u * dilation - padding; a transposed convolution solves this for its input:
        (r + padding - u * dilation) / stride, outside where that is no integer.

        >>> Geometry(stride=(2,), transposed=True).sources(0, size=2, kernel=2)
        tensor([[ 0, -1,  1, -1],
                [-1,  0, -1,  1]])
        """
        stride, dilation = self._along(self.stride, axis, 1), self._along(self.dilation, axis, 1)
        before, after = self.pads(axis, kernel)
        u = torch.arange(kernel, device="cpu")[:, None] * dilation
        if self.transposed:
            out = (size - 1) * stride - before - after + dilation * (kernel - 1)
            out += self._along(self.output_padding, axis, 0) + 1
        else:
            out = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
        self._check_size(size, out, max(before, after), f"kernel of {kernel} (dilation {dilation}, padding {before})")
        if self.transposed:
            x = torch.arange(out, device="cpu")[None, :] + before - u
            source = torch.div(x, stride, rounding_mode="floor")
            inside = (x % stride == 0) & (source >= 0) & (source < size)
            return torch.where(inside, source, -1)
        x = torch.arange(out, device="cpu")[None, :] * stride + u - before
        return self._fold_back(x, size)

    def _check_size(self, size: int, out: int, pad: int, kernel: str) -> None:
        widest = {"reflect": size - 1, "circular": size}.get(self.padding_mode, pad)  # torch wraps around once at most
        if out < 1 or pad > widest:
            raise InputError(
                f"a map of size {size} is too small for a {kernel}, padding mode {self.padding_mode}: "
                "pass the maps the layer gets in the network"
            )

    def _fold_back(self, x: Tensor, size: int) -> Tensor:
        if self.padding_mode == "reflect":
            x = (size - 1) - (x.abs() - (size - 1)).abs()
        elif self.padding_mode == "replicate":
            x = x.clamp(0, size - 1)
        elif self.padding_mode == "circular":
            x = x % size
        return torch.where((x >= 0) & (x < size), x, -1)

    def apply(self, H: Tensor, weight: Tensor) -> Tensor:
        """The convolution itself, by torch. H (batch, channels, *size) -> (batch, outputs, *output size)

        >>> H, W = torch.tensor([[[1.0, 2.0, 4.0]]]), torch.ones(1, 1, 3)
        >>> Geometry(padding=(1,), padding_mode="circular").apply(H, W)
        tensor([[[7., 7., 7.]]])
        """
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
