"""Labelled batches of the command line: what the model gets of them, the loss, how often it is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ispasp.graph.trace import evaluating, run
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

    >>> round(loss(torch.tensor([[2.0, 0.0]]), (None, torch.tensor([0]))).item(), 4)   # log(1 + e^-2)
    0.1269
    """
    scores = logits_of(output)
    return functional.cross_entropy(scores, labels_of(batch).to(scores.device))


def accuracy(model: nn.Module, batches: Iterable[Any]) -> float:
    """Percent of the examples whose largest output is that of their label.

    >>> accuracy(nn.Identity(), [(torch.eye(2), torch.tensor([0, 0]))])
    50.0
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    right = total = 0
    with evaluating(model), torch.no_grad():
        for batch in batches:
            x, y = input_of(batch), labels_of(batch)
            x = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in x.items()} if isinstance(x, dict) else x
            scores = logits_of(run(model, x.to(device) if isinstance(x, Tensor) else x))
            right += int((scores.argmax(1).cpu() == y).sum())
            total += len(y)
    return 100 * right / max(total, 1)
