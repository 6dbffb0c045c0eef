"""What training makes small: a task loss, the distance to a teacher, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ispasp.errors import InputError
from ispasp.graph.trace import run
from ispasp.train.batch import Batch, inputs_of, labels_of

Loss = Callable[[Any, Batch], Tensor]  # (output of the model, batch) -> mean over the examples of the batch


@dataclass(frozen=True, eq=False)
class Teacher:
    """A dense model to learn from: the loss is (1 - weight) x task loss + weight x distance to its outputs.

    The distance is Hinton's (2015): `temperature`^2 x KL divergence of the softmaxes at that temperature. With weight 1
    the batches need no labels.

    >>> Teacher(nn.Identity(), temperature=4.0).weight
    0.5
    """

    model: nn.Module
    temperature: float = 2.0
    weight: float = 0.5

    def __post_init__(self) -> None:
        """Refuse what cannot teach."""
        if not isinstance(self.model, nn.Module):
            raise InputError(f"the teacher is a {type(self.model).__name__}: pass a torch.nn.Module")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InputError(f"temperature={self.temperature}: pass a number above 0")
        if not 0 < self.weight <= 1:
            raise InputError(f"weight={self.weight}: pass the teacher's part of the loss, above 0 and at most 1")


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss of a model on a batch.

    >>> objective = Objective()
    >>> round(objective(nn.Identity(), (torch.tensor([[2.0, 0.0]]), torch.tensor([0]))).item(), 4)   # log(1 + e^-2)
    0.1269
    """

    loss: Loss | None = None
    input_of: Callable[[Batch], Any] = inputs_of
    label_smoothing: float = 0.0
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        """Refuse settings that would go unused."""
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing={self.label_smoothing}: pass a number of at least 0 and below 1")
        if self.loss is not None and self.label_smoothing:
            raise InputError("label_smoothing is for the built-in cross entropy: smooth the labels in your loss")

    def __call__(
        self, model: nn.Module, batch: Batch, precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Tensor:
        """One number, the mean over the examples; the teacher runs under `precision` and without gradients."""
        alone = self.teacher is not None and self.teacher.weight == 1
        if self.loss is None and not alone:
            _check_labelled(batch)
        inputs = self.input_of(batch)
        output = run(model, inputs)
        value = torch.zeros((), device="cpu") if alone else _scalar(self._task(output, batch))
        if self.teacher is not None:
            with torch.no_grad(), precision():
                target = run(self.teacher.model, inputs)
            apart = distance(logits_of(output), logits_of(target), self.teacher.temperature)
            value = apart if alone else (1 - self.teacher.weight) * value + self.teacher.weight * apart
        return value

    def _task(self, output: Any, batch: Batch) -> Any:
        if self.loss is not None:
            return self.loss(output, batch)
        if isinstance(batch, Mapping):
            own = getattr(output, "loss", None)
            if own is not None and not self.label_smoothing:
                return own
            if logits_of(output).ndim != 2:  # which position predicts which label is the model's secret
                raise InputError(
                    f"the built-in loss needs logits (batch, classes), the model gives {tuple(logits_of(output).shape)}"
                    ": pass loss=lambda output, batch: ..."
                )
        return _cross_entropy(logits_of(output), labels_of(batch), self.label_smoothing)


def logits_of(output: Any) -> Tensor:
    """The scores of the classes in a model's output: a tensor, its `logits`, or the first of a tuple.

    >>> logits_of({"logits": torch.ones(2)})
    tensor([1., 1.])
    """
    found = output
    if not isinstance(found, Tensor):
        found = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", found)
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, Tensor):
        raise InputError(
            f"the model gives a {type(output).__name__} without logits: pass loss=lambda output, batch: ..."
        )
    return found


def distance(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Temperature^2 x KL divergence of the teacher's softmax and the student's, the mean over examples and positions.

    Classes are along axis 1 of (batch, classes) and (batch, classes, h, w), and along the last one of
    (batch, positions, classes).

    >>> distance(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]]), temperature=2.0)
    tensor(0.)
    """
    if student.shape != teacher.shape or student.ndim < 2:
        raise InputError(
            f"the model gives {tuple(student.shape)}, the teacher {tuple(teacher.shape)}: both must give the same "
            "(batch, classes)"
        )
    axis = 2 if student.ndim == 3 else 1
    if student.shape[axis] == 1:
        raise InputError("the model gives one number per example, whose softmax is always 1: pass a loss, no teacher")
    q = functional.log_softmax(student.float() / temperature, axis)
    p = functional.log_softmax(teacher.float() / temperature, axis)
    return temperature**2 * (p.exp() * (p - q)).sum(axis).mean()


def _check_labelled(batch: Batch) -> None:
    if labels_of(batch) is None:
        keys = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise InputError(
            f"a batch ({type(batch).__name__}{keys}) has no labels: yield (inputs, labels) or a dict with 'labels', "
            "or pass loss=lambda output, batch: ..., or teacher=ispasp.train.Teacher(dense_model, weight=1)"
        )


def _cross_entropy(logits: Tensor, labels: Any, smoothing: float) -> Tensor:
    if logits.ndim > 1 and logits.shape[1] == 1:
        raise InputError(
            "the model gives one number per example, whose cross entropy is always 0: pass loss=lambda output, batch: "
            "..., such as a mean squared error"
        )
    try:
        return functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError) as error:
        what = f"{tuple(labels.shape)} {labels.dtype}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        why = str(error).rstrip(".")
        raise InputError(
            f"the model gives {tuple(logits.shape)}, the labels are {what} ({why}): yield one whole number from 0 to "
            "classes - 1 per example (int64), or pass loss=lambda output, batch: ..."
        ) from error


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the loss is {what}: it must be one number, the mean over the examples of the batch")
    return value.reshape(())
