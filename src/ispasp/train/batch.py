"""What a batch is: what the model gets of it, its labels, and how many examples it holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ispasp.calibrate.labels import NAMES, Labels
from ispasp.errors import InputError
from ispasp.graph.wrappers import unwrapped

Batch = Any  # Tensor: inputs only; tuple or list: inputs, then labels; mapping: keyword arguments, with "labels"


def inputs_of(batch: Batch) -> Any:
    """What the model is called with: all but the labels at the end of a tuple, or the whole mapping.

    >>> inputs_of(("x", "y")), inputs_of({"x": 1, "labels": 2})
    (('x',), {'x': 1, 'labels': 2})
    """
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return batch
    inputs = tuple(batch[:-1])
    return inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Mapping) else inputs


def inputs_for(model: nn.Module) -> Callable[[Batch], Any]:
    """`inputs_of`, without the labels of a mapping where the model's forward does not take any.

    >>> inputs_for(nn.Linear(1, 1))({"input": 1, "labels": 2})
    {'input': 1}
    """
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    takes = {p.name for p in parameters}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    left_out = tuple(name for name in NAMES if name not in takes and not (anything and name == "labels"))

    def inputs(batch: Batch) -> Any:
        return Labels(names=left_out).without(batch) if isinstance(batch, Mapping) else inputs_of(batch)

    return inputs


def labels_of(batch: Batch) -> Any:
    """The labels: the end of a tuple of two or more, or "labels" of a mapping; None where there are none.

    >>> labels_of(("x", "y")), labels_of({"x": 1, "labels": 2}), labels_of(("x",))
    ('y', 2, None)
    """
    if isinstance(batch, Mapping):
        return next((batch[name] for name in NAMES if name in batch), None)
    return batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None


def examples_in(batch: Batch) -> int:
    """How many examples: the length of the first tensor.

    >>> import torch
    >>> examples_in({"ids": torch.zeros(4, 7), "labels": torch.zeros(4)})
    4
    """
    for tensor in _tensors(batch):
        if tensor.ndim:
            return len(tensor)
    raise InputError(f"a batch is a {type(batch).__name__} without tensors: pass batches of tensors")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
