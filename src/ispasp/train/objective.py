"""The loss of a batch: its inputs and labels, the task loss, and the distance to a teacher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ispasp.engine.batches import NAMES, Labels, described
from ispasp.errors import InputError
from ispasp.graph.state import unwrapped
from ispasp.graph.trace import run
from ispasp.train.recipe import check_number

Batch = Any  # Tensor: inputs only; tuple or list: inputs, then labels; mapping: keyword arguments, with "labels"
Loss = Callable[[Any, Batch], Tensor]  # (output of the model, batch) -> mean over the examples of the batch
Autocast = Callable[[], AbstractContextManager[Any]]
_OWN_LOSS = "pass loss=lambda output, batch: ..."
_LABEL_ARGUMENTS = ("target", "targets", "label", "labels")


def inputs_of(batch: Batch) -> Any:
    """The inputs of the model: a tuple without the labels at its end, or the whole mapping."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return batch
    inputs = tuple(batch[:-1])
    return inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Mapping) else inputs


def inputs_for(model: nn.Module) -> Callable[[Batch], Any]:
    """`inputs_of`, which also drops the labels of a mapping if the model's forward does not take them."""
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    takes = {p.name for p in parameters}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes.add("labels")
    unwanted = Labels(names=tuple(name for name in NAMES if name not in takes))
    return lambda batch: unwanted.without(batch) if isinstance(batch, Mapping) else inputs_of(batch)


def labels_of(batch: Batch) -> Any:
    """The labels: the end of a tuple of two or more, or "labels" of a mapping; None if there are none."""
    if isinstance(batch, Mapping):
        return next((batch[name] for name in NAMES if name in batch), None)
    return batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None


def logits_of(output: Any) -> Tensor:
    """The class scores in a model's output: a tensor, its `logits`, or the first of a tuple."""
    found = output
    if not isinstance(found, Tensor):
        found = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", found)
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, Tensor):
        raise InputError(f"the model returns a {type(output).__name__} without logits: {_OWN_LOSS}")
    return found


@dataclass(frozen=True)
class LabelLoss:
    """A loss(output, labels), called as loss(output, batch)."""

    loss: Callable[[Any, Any], Tensor]

    def __call__(self, output: Any, batch: Any) -> Tensor:
        self.check(batch)
        return self.loss(logits_of(output), labels_of(batch))

    def check(self, batch: Any) -> None:
        """Raise InputError if the batch has no labels."""
        if labels_of(batch) is None:
            name, kind = getattr(self.loss, "__name__", type(self.loss).__name__), type(batch).__name__
            raise InputError(f"{name} takes labels, and a {kind} has none: yield (inputs, labels), or {_OWN_LOSS}")


def loss_of(loss: Callable[[Any, Any], Tensor] | None) -> Loss | None:
    """The loss as loss(output, batch). Modules and functions such as `functional.cross_entropy` take labels instead."""
    if loss is None or isinstance(loss, LabelLoss):
        return loss
    arguments: list[str] = []
    with suppress(TypeError, ValueError):  # not a Python function
        arguments = list(inspect.signature(loss).parameters)
    takes_labels = isinstance(loss, nn.Module) or any(name in _LABEL_ARGUMENTS for name in arguments[1:2])
    return LabelLoss(loss) if takes_labels else loss


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
        if not isinstance(self.model, nn.Module):
            raise InputError(f"the teacher is a {type(self.model).__name__}: pass a torch.nn.Module")
        check_number("temperature", self.temperature, lambda t: t > 0, "a number above 0")
        check_number("weight", self.weight, lambda w: 0 < w <= 1, "the teacher's part of the loss, above 0, at most 1")


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss of a model on a batch: a task loss, the distance to a teacher, or both.

    >>> batch = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(Objective()(nn.Identity(), batch).item(), 4)   # log(1 + e^-2)
    0.1269
    """

    loss: Loss | None = None
    input_of: Callable[[Batch], Any] = inputs_of
    label_smoothing: float = 0.0
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        check_number("label_smoothing", self.label_smoothing, lambda s: 0 <= s < 1, "a number from 0 to below 1")
        if self.loss is not None and self.label_smoothing:
            raise InputError("label_smoothing is for the built-in cross entropy: smooth the labels in your loss")

    def __call__(self, model: nn.Module, batch: Batch, autocast: Autocast = nullcontext) -> Tensor:
        """The mean over the examples. The teacher runs under `autocast`, without gradients."""
        teacher = self.teacher
        taught = 0.0 if teacher is None else teacher.weight
        if self.loss is None and taught < 1 and labels_of(batch) is None:
            keys = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            other = f"{_OWN_LOSS}, or teacher=ispasp.train.Teacher(dense_model, weight=1)"
            remedy = f"yield (inputs, labels) or a dict with 'labels', or {other}"
            raise InputError(f"a batch ({type(batch).__name__}{keys}) has no labels: {remedy}")
        inputs = self.input_of(batch)
        output = run(model, inputs)
        task = _scalar(self._task(output, batch)) if taught < 1 else torch.zeros((), device="cpu")
        if teacher is None:
            return task
        with torch.no_grad(), autocast():
            target = run(teacher.model, inputs)
        apart = distance(logits_of(output), logits_of(target), teacher.temperature)
        return (1 - taught) * task + taught * apart if taught < 1 else apart

    def _task(self, output: Any, batch: Batch) -> Any:
        if self.loss is not None:
            return self.loss(output, batch)
        if isinstance(batch, Mapping):
            own = getattr(output, "loss", None)
            if own is not None and not self.label_smoothing:
                return own
            if logits_of(output).ndim != 2:  # only the model knows which position predicts which label
                shape = tuple(logits_of(output).shape)
                raise InputError(f"the built-in loss needs logits (batch, classes), not {shape}: {_OWN_LOSS}")
        return _cross_entropy(logits_of(output), labels_of(batch), self.label_smoothing)


def distance(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Temperature^2 x KL divergence of the teacher's and the student's softmax, the mean over examples and positions.

    Classes are along axis 1 of (batch, classes) and (batch, classes, h, w), and along axis 2 of
    (batch, positions, classes).
    """
    here, there = tuple(student.shape), tuple(teacher.shape)
    if here != there or len(here) < 2:
        raise InputError(f"the model gives {here}, the teacher {there}: both need (batch, classes)")
    axis = 2 if student.ndim == 3 else 1
    if student.shape[axis] == 1:
        raise InputError("the model gives one number per example, whose softmax is always 1: pass a loss, no teacher")
    q = functional.log_softmax(student.float() / temperature, axis)
    p = functional.log_softmax(teacher.float() / temperature, axis)
    return temperature**2 * (p.exp() * (p - q)).sum(axis).mean()


def _cross_entropy(logits: Tensor, labels: Any, smoothing: float) -> Tensor:
    if logits.ndim > 1 and logits.shape[1] == 1:
        raise InputError(f"the cross entropy of one number per example is 0: {_OWN_LOSS}, such as mean squared error")
    try:
        return functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError) as error:
        wrong = f"the model gives {tuple(logits.shape)}, the labels are {described(labels)} ({str(error).rstrip('.')})"
        remedy = f"yield one whole number from 0 to classes - 1 per example (int64), or {_OWN_LOSS}"
        raise InputError(f"{wrong}: {remedy}") from error


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(f"the loss is {described(value)}: it must be one number, the mean over the batch's examples")
    return value.reshape(())
