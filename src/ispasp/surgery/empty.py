"""Layers of width zero. torch's linear layers run without units, its convolutions and BatchNorms do not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class EmptyConv(nn.modules.conv._ConvNd):
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


class EmptyNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm of no channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _emptied(kind: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    """`Empty` and the layer's name: the layer's class with the forward of `kind`. Pickle finds it by its name."""
    name = f"Empty{layer.__name__}"
    made = type(name, (kind, layer), {"__module__": __name__, "__doc__": f"`nn.{layer.__name__}` without channels."})
    return globals().setdefault(name, made)  # type: ignore[no-any-return]


_EMPTY: Mapping[type[nn.Module], type[nn.Module]] = {
    **{layer: _emptied(EmptyConv, layer) for layer in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{layer: _emptied(EmptyNorm, layer) for layer in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)},
}


def empty_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class that runs with this layer's empty tensors, if its own class does not.

    >>> layer = nn.Conv2d(2, 3, kernel_size=3, stride=2)
    >>> layer.weight.data = layer.weight.data[:, :0]
    >>> layer.__class__ = empty_class(layer)
    >>> y = layer(layer.weight.new_ones(4, 0, 9, 9))
    >>> type(layer).__name__, y.shape, bool((y == layer.bias[:, None, None]).all())
    ('EmptyConv2d', torch.Size([4, 3, 4, 4]), True)
    """
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    return _EMPTY.get(type(layer)) if any(tensor.ndim and not tensor.numel() for tensor in tensors) else None
