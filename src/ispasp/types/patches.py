"""Patches: the columns that a convolution's flattened weight multiplies."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ispasp.types.consumer import Consumer, ConvConsumer


def patches(consumer: Consumer, H: Tensor) -> Tensor:
    """Unfold the input so that the consumer is one matrix product per group.

    Returns X (groups, K, N), K = channels / groups x taps (channel-major), N = examples x output positions, so that
    `weight.flatten(1) @ X` is the layer's output. Works for linear (one tap) and for plain and transposed
    convolutions of one to three dimensions.

    >>> import torch
    >>> from ispasp.types import LinearConsumer
    >>> patches(LinearConsumer(torch.ones(1, 2)), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[[1., 3.],
             [2., 4.]]])
    """
    if not isinstance(consumer, ConvConsumer):
        return H.reshape(-1, H.shape[-1]).T[None]
    geometry, groups = consumer.geometry, consumer.geometry.groups
    if len(consumer.kernel) == 2 and not geometry.transposed and geometry.padding_mode == "zeros":
        return _unfolded(consumer, H)
    X = H.reshape(H.shape[0], groups, -1, *H.shape[2:])  # (B, g, C/g, *size)
    for axis, (size, kernel) in enumerate(zip(H.shape[2:], consumer.kernel, strict=True)):
        source = geometry.sources(axis, size, kernel).to(H.device)  # (kernel, out)
        at = 3 + 2 * axis  # every axis done so far has become two: tap and output position
        before, after = X.shape[:at], X.shape[at + 1 :]
        X = X.index_select(at, source.clamp(min=0).flatten()).reshape(*before, *source.shape, *after)
        X = X * (source >= 0).reshape(*source.shape, *(1,) * len(after)).to(X.dtype)
    taps = list(range(3, X.ndim, 2))
    positions = list(range(4, X.ndim, 2))
    X = X.permute(1, 2, *taps, 0, *positions)  # (g, C/g, *taps, B, *out)
    return X.flatten(1 + 1 + len(taps)).flatten(1, -2)


def _unfolded(consumer: ConvConsumer, H: Tensor) -> Tensor:
    """The usual case by torch's own unfold, several times faster."""
    geometry, kernel = consumer.geometry, consumer.kernel
    (top, bottom), (left, right) = (geometry.pads(axis, kernel[axis]) for axis in (0, 1))
    if (top, left) != (bottom, right):
        H, top, left = F.pad(H, (left, right, top, bottom)), 0, 0
    step, spread = geometry.stride or (1, 1), geometry.dilation or (1, 1)
    if kernel == (1, 1) and (top, left) == (0, 0):
        X = H[:, :, :: step[0], :: step[1]].flatten(2)  # (B, C, L)
    else:
        X = F.unfold(H, kernel, spread, (top, left), step)  # (B, C x taps, L)
    return X.reshape(X.shape[0], geometry.groups, -1, X.shape[-1]).permute(1, 2, 0, 3).flatten(2)
