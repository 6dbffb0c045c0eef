"""Labels in calibration batches: recognised on the first batch, and not given to the model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.calibrate.rows import count_examples, first_of, is_rows
from ispasp.graph.trace import Batch, evaluating, run_and_restore
from ispasp.graph.wrappers import unwrapped

NAMES = ("labels", "label")  # of labels in a dict
_PARAMETERS = (*NAMES, "targets", "target", "y")  # arguments of a forward that are labels
_TRIALS = (2, 3)  # examples; a shape that fits by chance fits one of these numbers at most
_LOG = logging.getLogger("ispasp")


@dataclass(frozen=True)
class Labels:
    """Where the labels are in every batch: at the end of a tuple of that `length`, under `names` of a dict, or nowhere.

    >>> Labels(length=2).without(("x", "y")), Labels(length=3).without(("x", "mask", "y"))
    ('x', ('x', 'mask'))
    >>> Labels(names=("labels",)).without({"input_ids": 1, "labels": 2})
    {'input_ids': 1}
    """

    length: int = 0
    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are labels."""
        return bool(self.length or self.names)

    def __str__(self) -> str:
        """One clause.

        >>> print(Labels(length=2))
        batches are (inputs, labels): the model gets the inputs only
        """
        if self.names:
            return f"batches have {' and '.join(map(repr, self.names))}: the model gets the rest only"
        what = "(inputs, labels)" if self.length == 2 else f"tuples of {self.length} that end with labels"
        return f"batches are {what}: the model gets the inputs only" if self.length else "batches have no labels"

    def without(self, batch: Batch) -> Batch:
        """What the model gets of a batch."""
        if self.names:
            return {name: value for name, value in batch.items() if name not in self.names}
        if self.length:
            return batch[0] if self.length == 2 else tuple(batch[:-1])
        return batch


_NONE = Labels()


def find_labels(model: nn.Module, batch: Batch) -> Labels:
    """Find out what in a batch are labels, by what the model takes. Nothing is left out that the model may need.

    - `(inputs, labels)`: the last element is labels where the forward has no argument left for it. Where an optional
      argument is left, the model must fail with the last element and run without it.
    - A dict: `labels` or `label` are left out where the model runs without them.

    >>> import torch
    >>> x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    >>> find_labels(nn.Linear(3, 2), (x, y)), find_labels(nn.Bilinear(3, 3, 2), (x, x))
    (Labels(length=2, names=()), Labels(length=0, names=()))
    """
    found = Labels()
    if isinstance(batch, Mapping):
        found = Labels(names=tuple(name for name in NAMES if name in batch))
        if found and not runs(model, batch, found):
            found = Labels()
    elif isinstance(batch, (tuple, list)) and len(batch) > 1 and can_be_labels(batch):
        found = _at_the_end(model, batch)
    if found:
        _LOG.info("%s", found)
    return found


def can_be_labels(batch: tuple[Any, ...] | list[Any]) -> bool:
    """Whether the last element can be labels: a row for every example, and not one more input like the first one."""
    first, last = batch[0], batch[-1]
    if not isinstance(last, Tensor):
        return isinstance(last, (tuple, list, Mapping))
    if last.ndim == 0 or not is_rows(batch, len(last)):
        return False
    return not isinstance(first, Tensor) or (first.dtype, first.shape) != (last.dtype, last.shape)


def _at_the_end(model: nn.Module, batch: tuple[Any, ...] | list[Any]) -> Labels:
    labels = Labels(length=len(batch))
    argument = parameter_for(model, len(batch))
    if argument is None and (not isinstance(batch[-1], Tensor) or _is_target(batch[0], batch[-1])):
        return labels
    if argument is None:
        return labels if runs(model, batch, labels) else Labels()
    required = argument.default is argument.empty and argument.kind is not argument.VAR_POSITIONAL
    if required or not _is_target(batch[0], batch[-1]):
        return Labels()
    if argument.name not in _PARAMETERS and runs(model, batch):
        return Labels()
    return labels if runs(model, batch, labels) else Labels()


def _is_target(inputs: Any, last: Any) -> bool:
    """Whether the last element is no mask: tokens and a mask look like tokens and labels for every token."""
    if not isinstance(last, Tensor) or last.dtype == torch.bool:
        return False
    if not isinstance(inputs, Tensor):
        return True
    return last.ndim < inputs.ndim or (inputs.is_floating_point() and not last.is_floating_point())


def parameter_for(model: nn.Module, number: int) -> inspect.Parameter | None:
    """The parameter of the forward that the last of so many positional arguments goes to; None where there is none."""
    try:
        parameters = list(inspect.signature(unwrapped(model).forward).parameters.values())
    except (TypeError, ValueError):  # no Python function: it may take anything
        return inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)
    by_position = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    if by_position and by_position[-1].kind is inspect.Parameter.VAR_POSITIONAL and number >= len(by_position):
        return by_position[-1]
    return by_position[number - 1] if number <= len(by_position) else None


def runs(model: nn.Module, batch: Batch, labels: Labels = _NONE) -> bool:
    """Whether the model runs without the labels on two and on three examples, or on the batch where it is small."""
    size = count_examples(batch)
    few = [first_of(batch, number) for number in _TRIALS if number < size and is_rows(batch, size)]
    return all(_tried(model, labels.without(part)) for part in few or [batch])


def _tried(model: nn.Module, inputs: Batch) -> bool:
    try:
        with evaluating(model):
            run_and_restore(model, inputs)
    except Exception:  # a model may raise anything; it is told where the model is run in earnest
        return False
    return True
