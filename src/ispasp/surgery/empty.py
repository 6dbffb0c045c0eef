"""Layers of width zero. torch's linear layers run without units, its convolutions and BatchNorms do not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class _EmptyConv(nn.modules.conv._ConvNd):
    """A convolution that reads or makes no channels: its output is its bias, or nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the bias, or zeros, in the shape that the convolution would return."""
        axes = len(self.kernel_size)
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        if isinstance(self.padding, str):
            padding = reach if self.padding == "same" else [0] * axes
        else:
            padding = [2 * p for p in self.padding]
        rows = zip(x.shape[-axes:], padding, reach, self.stride, strict=True)
        size = [(n + p - r - 1) // s + 1 for n, p, r, s in rows]
        y = x.new_zeros(*x.shape[: -axes - 1], self.out_channels, *size)
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * axes)


class EmptyConv1d(_EmptyConv, nn.Conv1d):
    """`nn.Conv1d` without channels."""


class EmptyConv2d(_EmptyConv, nn.Conv2d):
    """`nn.Conv2d` without channels.

    >>> layer = nn.Conv2d(2, 3, kernel_size=3, stride=2)
    >>> layer.weight.data = layer.weight.data[:, :0]
    >>> layer.__class__ = empty_class(layer)
    >>> y = layer(layer.weight.new_ones(4, 0, 9, 9))
    >>> y.shape, bool((y == layer.bias[:, None, None]).all())
    (torch.Size([4, 3, 4, 4]), True)
    """


class EmptyConv3d(_EmptyConv, nn.Conv3d):
    """`nn.Conv3d` without channels."""


class _EmptyNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm of no channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class EmptyBatchNorm1d(_EmptyNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` of no channels."""


class EmptyBatchNorm2d(_EmptyNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` of no channels."""


class EmptyBatchNorm3d(_EmptyNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` of no channels."""


_EMPTY: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: EmptyConv1d,
    nn.Conv2d: EmptyConv2d,
    nn.Conv3d: EmptyConv3d,
    nn.BatchNorm1d: EmptyBatchNorm1d,
    nn.BatchNorm2d: EmptyBatchNorm2d,
    nn.BatchNorm3d: EmptyBatchNorm3d,
}


def empty_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class that runs with this layer's empty tensors, if its own class does not."""
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    return _EMPTY.get(type(layer)) if any(tensor.ndim and not tensor.numel() for tensor in tensors) else None
