"""Labelled batches of the command line: what the model gets of them, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from ispasp.train.batch import labels_of
from ispasp.train.objective import logits_of


def input_of(batch: Any) -> Any:
    """The input of (inputs, labels), or of a dict with "labels".

    >>> input_of((1, 2)), input_of({"x": 1, "labels": 2})
    (1, {'x': 1})
    """
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}
    return batch[0]


def loss(output: Any, batch: Any) -> Tensor:
    """Cross entropy, the mean over the batch.

    >>> import torch
    >>> round(loss(torch.tensor([[2.0, 0.0]]), (None, torch.tensor([0]))).item(), 4)   # log(1 + e^-2)
    0.1269
    """
    scores = logits_of(output)
    return functional.cross_entropy(scores, labels_of(batch).to(scores.device))
