"""The error of every choice of units, from a Gram matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types import Consumer, ConvConsumer, Gram, Statistics
from ispasp.types.checks import check_sum


def energy(consumer: Consumer, gram: Gram, units: int) -> Tensor:
    """E with E_ij = sum over data of <A H_i, A H_j>, H_i unit i alone. (units, units)

    For any set R of removed units ||A H_R||_F^2 = 1_R^T E 1_R, so one matrix gives the error of every choice.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> A = LinearConsumer(torch.tensor([[1.0, 2.0]])); H = torch.tensor([[1.0, 1.0], [0.0, 3.0]])
    >>> energy(A, measure(A, H, ["gram"]).gram, 2)
    tensor([[ 1.,  2.],
            [ 2., 40.]], dtype=torch.float64)
    """
    W, unit_of = columns(consumer)  # (g, O/g, K), (g, K)
    check_sum("the Gram matrix", gram.total, gram.examples, (W.shape[0], W.shape[2], W.shape[2]))
    if consumer.count_units() > units:
        raise InputError(f"units={units}, but the consumer reads {consumer.count_units()}: pass the number it reads")
    E = (W.mT @ W).mul_(gram.total)  # (g, K, K)
    g, K, _ = E.shape
    row = unit_of + 1  # 0 for channels outside
    place = row + (units + 1) * torch.arange(g, device=row.device)[:, None]
    half = E.new_zeros(g * (units + 1), K).index_add_(0, place.flatten(), E.flatten(0, 1))  # rows: they lie together
    half = half.reshape(g, units + 1, K).mT.flatten(0, 1)  # (g K, units + 1): E is symmetric
    whole = E.new_zeros(units + 1, units + 1).index_add_(0, row.flatten(), half)
    return whole[1:, 1:]


def columns(consumer: Consumer) -> tuple[Tensor, Tensor]:
    """The consumer as one matrix per group, which multiplies patches, and the unit of each of its columns.

    Returns W (groups, outputs / groups, K) with the scale in it, in float64, and units (groups, K), -1 outside;
    K = channels / groups x taps, as in a `Gram`.

    >>> from ispasp.types import LinearConsumer
    >>> columns(LinearConsumer(torch.ones(1, 4), units=torch.tensor([0, 0, 1, 1]), scale=torch.tensor([3.0])))
    (tensor([[[3., 3., 3., 3.]]], dtype=torch.float64), tensor([[0, 0, 1, 1]]))
    """
    if isinstance(consumer, ConvConsumer):
        W = consumer.grouped_weight().double()  # (g, O/g, C/g, *kernel)
        taps = math.prod(consumer.kernel)
    else:
        W, taps = consumer.weight.double()[None], 1
    if consumer.scale is not None:
        W = W * consumer.scale.double().reshape(W.shape[0], -1, *(1,) * (W.ndim - 2))
    unit_of = consumer.unit_of().reshape(W.shape[0], -1).repeat_interleave(taps, dim=1)
    return W.flatten(2), unit_of


def total_energy(statistics: Statistics) -> Tensor | None:
    """Energy of all consumers together, or None unless every one of them has a Gram matrix. (units, units)

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> reading = measure(LinearConsumer(torch.eye(2)), torch.tensor([[1.0, 3.0]]), ["gram"])
    >>> total_energy(Statistics(2, (reading, reading)))   # two consumers, E each
    tensor([[ 2.,  0.],
            [ 0., 18.]], dtype=torch.float64)
    """
    parts = [
        energy(reading.consumer, reading.gram, statistics.units)
        for reading in statistics.readings
        if reading.gram is not None
    ]
    return torch.stack(parts).sum(0) if len(parts) == len(statistics.readings) else None
