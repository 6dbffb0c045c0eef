"""Factors that a method gives its kept units, put into what a consumer reads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ispasp.calibrate.passage import Passage
from ispasp.calibrate.readers import Reader, products
from ispasp.types import ConvConsumer
from ispasp.types.layout import Kept


def rescaled(reader: Reader, passage: Passage, factors: Mapping[str, Sequence[float]], kept: Kept) -> Tensor:
    """The weight in which what is read of each kept unit is multiplied by its factor; in the layer's own shape."""
    arguments = passage.arguments(reader.number)
    (form,) = reader.forms(arguments)
    consumer = form.consumer
    ((_, seen),) = products(reader, list(factors), arguments, None)
    by_channel = torch.ones(consumer.channels, dtype=torch.float64, device=consumer.weight.device)
    for name, values in factors.items():
        unit_of = seen[name].unit_of()
        by_unit = torch.ones(int(unit_of.max()) + 1, dtype=torch.float64, device=unit_of.device)
        by_unit[list(kept[name])] = by_unit.new_tensor(values)
        by_channel *= torch.where(unit_of >= 0, by_unit[unit_of.clamp(min=0)], 1.0)
    by_channel = by_channel.to(consumer.weight.dtype)
    if isinstance(consumer, ConvConsumer):
        whole = consumer.grouped_weight()  # (g, O/g, C/g, *kernel)
        whole = whole * by_channel.reshape(len(whole), 1, -1, *(1,) * len(consumer.kernel))
        whole = whole.transpose(1, 2) if consumer.geometry.transposed else whole
        weight = whole.reshape(consumer.weight.shape)
    else:
        weight = consumer.weight * by_channel
    assert form.restore is not None  # noqa: S101  # a slot was found
    return form.restore(weight).contiguous()
