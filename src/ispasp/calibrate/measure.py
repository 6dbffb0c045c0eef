"""Statistics of one batch at the input of one consumer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types import Consumer, ConvConsumer, Reading
from ispasp.types.checks import checked_tensor
from ispasp.types.statistic import STATISTICS, measurable


def measure(consumer: Consumer, H: Tensor, needs: Collection[str] = ("moment",)) -> Reading:
    """Take statistics of a batch: sums in float64, whatever the dtype of H.

    H is what the consumer gets: (..., channels) for a linear one, (batch, channels, *size) for a convolution.
    `needs` names the statistics: "moment" sum of H over the data (positions too where the consumer treats them
    alike), "magnitude" sum of |H|, "gram" sum of X X^T over the patches X that meet the weight, and those added with
    `register_statistic`.

    >>> from ispasp.types import LinearConsumer
    >>> r = measure(LinearConsumer(torch.ones(1, 2)), torch.tensor([[1.0, -2.0], [3.0, -4.0]]), ["moment", "gram"])
    >>> r.moment.maps[()], r.gram.total
    (tensor([ 4., -6.], dtype=torch.float64),
     tensor([[[ 10., -14.], [-14.,  20.]]], dtype=torch.float64))
    """
    _check(consumer, H, needs)
    H = H.detach() if H.is_floating_point() else H.double()  # a graph would keep all activations; |-128| is no int8
    taken = [kind.measure(consumer, H) for name, kind in STATISTICS.items() if name in needs]
    for statistic in taken:
        for total in statistic.tensors().values():
            _check_sum(total)
    return Reading(consumer, *taken)


def _check(consumer: Consumer, H: Tensor, needs: Collection[str]) -> None:
    if not isinstance(consumer, Consumer):
        raise InputError(f"the consumer is a {type(consumer).__name__}: pass a LinearConsumer or a ConvConsumer")
    checked_tensor("H", H)
    if isinstance(needs, str) or not isinstance(needs, Collection):
        raise InputError(f"needs={needs!r}: pass a list of statistics, such as ['moment']")
    unknown = set(needs) - set(measurable())
    if unknown:
        raise InputError(f"unknown statistic {sorted(unknown)}: choose from {measurable()}")
    conv = isinstance(consumer, ConvConsumer)
    axes = consumer.weight.ndim if conv else max(H.ndim, 1)
    if H.ndim != axes or H.shape[1 if conv else -1] != consumer.channels:
        expected = f"(batch, {consumer.channels}, *size)" if conv else f"(..., {consumer.channels})"
        raise InputError(
            f"activations of shape {tuple(H.shape)} do not fit a consumer that reads {expected}: "
            "pass the tensor that enters the layer"
        )
    if H.numel() == 0:
        raise InputError(f"activations of shape {tuple(H.shape)} hold no data: pass at least one example")


def _check_sum(total: Tensor) -> None:
    # One NaN or Inf anywhere in the data shows in the sum, so the activations need no pass of their own.
    bad = ~torch.isfinite(total)
    if bool(bad.any()):
        raise InputError(
            f"activations hold NaN or Inf ({int(bad.sum())} of {total.numel()} sums are not finite): "
            "check the calibration data and the layers before, or run them in float32"
        )
