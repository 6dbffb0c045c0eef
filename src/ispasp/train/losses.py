"""Losses of every form as loss(output, batch)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ispasp.errors import InputError
from ispasp.train.batch import labels_of
from ispasp.train.objective import logits_of

_LABELS = ("target", "targets", "label", "labels")


@dataclass(frozen=True)
class LabelLoss:
    """A loss(output, labels) as loss(output, batch).

    >>> import torch
    >>> LabelLoss(nn.MSELoss())(torch.ones(2), (None, torch.zeros(2)))
    tensor(1.)
    """

    loss: Callable[[Any, Any], Tensor]

    def __call__(self, output: Any, batch: Any) -> Tensor:
        """The loss of the logits against the labels of the batch."""
        self.check(batch)
        return self.loss(logits_of(output), labels_of(batch))

    def check(self, batch: Any) -> None:
        """Refuse a batch without labels."""
        if labels_of(batch) is None:
            name = getattr(self.loss, "__name__", type(self.loss).__name__)
            raise InputError(
                f"{name} compares an output with labels, and a batch is a {type(batch).__name__} without: pass batches "
                "(inputs, labels), or loss=lambda output, batch: ..."
            )


def loss_of(loss: Callable[[Any, Any], Tensor] | None) -> Callable[[Any, Any], Tensor] | None:
    """The loss as loss(output, batch); modules and functions such as `functional.cross_entropy` take labels instead.

    >>> loss_of(nn.CrossEntropyLoss())
    LabelLoss(loss=CrossEntropyLoss())
    """
    if loss is None or isinstance(loss, LabelLoss):
        return loss
    return LabelLoss(loss) if isinstance(loss, nn.Module) or _second(loss) in _LABELS else loss


def _second(function: Callable[..., Any]) -> str:
    """The name of a function's second parameter, where Python can tell."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ""
    return names[1] if len(names) > 1 else ""
