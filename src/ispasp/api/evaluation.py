"""Quality of a pruned model: the user's own score, and agreement with the dense model without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.calibrate.rows import count_examples, first_of
from ispasp.calibrate.team import Team
from ispasp.errors import InputError, SurgeryError
from ispasp.graph.trace import Batch, evaluating, run_and_restore

Evaluate = Callable[[nn.Module], Any]
_EXAMPLES = 256  # of which predictions are compared
_SAMPLE = 1 << 20  # values of a batch's output that are kept for the relative difference
_MASKS = ("decoder_attention_mask", "attention_mask")
_FEATURES = ("last_hidden_state", "pooler_output", "image_embeds", "text_embeds")  # of Hugging Face models


@dataclass(frozen=True)
class Scores:
    """What the user's `evaluate` gave for the dense model and for the pruned one, by name."""

    before: Mapping[str, float]
    after: Mapping[str, float]

    def __str__(self) -> str:
        """One line: name before -> after."""
        return ", ".join(f"{name} {number(self.before.get(name))} -> {number(self.after[name])}" for name in self.after)


@dataclass(frozen=True)
class Agreement:
    """How much the pruned model's outputs are like the dense model's on calibration data. No labels are needed.

    `rate` is the fraction of predictions (the largest class of every example, token or pixel) that are the same; None
    where outputs are not classes. `difference` is ||y' - y|| / ||y|| over the outputs themselves. Padding, where an
    attention mask tells it, counts for neither. Without `held_out`
    the network was fitted to these very examples, and both look better than they are.
    """

    rate: float | None
    difference: float | None
    predictions: int
    examples: int
    held_out: bool

    def __str__(self) -> str:
        """One sentence."""
        rows = f"{self.examples:,} held-out examples" if self.held_out else f"{self.examples:,} calibration examples"
        where = rows if self.held_out else f"{rows} (in-sample: too few to hold some out)"
        parts = [f"{self.rate:.1%} of {self.predictions:,} predictions"] if self.rate is not None else []
        parts += [f"outputs differ by {self.difference:.1%}"] if self.difference is not None else []
        return f"{', '.join(parts) or 'nothing to compare'} on {where}"


def scored(evaluate: Evaluate, model: nn.Module, team: Team) -> dict[str, float]:
    """Call the user's function on a model in eval mode; all machines take rank 0's numbers."""
    with team.together("the evaluation"):
        with evaluating(model):
            found = evaluate(model)
        model.eval()  # a function that trains leaves it otherwise
        scores = _numbers(evaluate, found)
    shared = team.same({name: torch.tensor(value, dtype=torch.float64) for name, value in scores.items()})
    return {name: float(value) for name, value in shared.items()}


def _numbers(evaluate: Evaluate, found: Any) -> dict[str, float]:
    name = str(getattr(evaluate, "__name__", "score")).strip("_")
    rows = found if isinstance(found, Mapping) else {"score" if name in ("<lambda>", "evaluate") else name: found}
    try:
        if not rows or any(isinstance(value, (str, bytes)) for value in rows.values()):
            raise TypeError
        return {str(key): float(value) for key, value in rows.items()}
    except (TypeError, ValueError, RuntimeError):
        kind = type(found).__name__
        raise InputError(
            f"evaluate(model) returned a {kind}: return a number, or a dict of numbers such as {{'accuracy': 0.93}}"
        ) from None


def number(value: float | None) -> str:
    """A score as people read it.

    >>> number(0.92954), number(12.345678), number(None)
    ('0.9295', '12.35', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


class Judge:
    """The dense model's predictions on some batches, to be compared with the pruned model's."""

    def __init__(self, model: nn.Module, held: Sequence[Batch], first: Batch) -> None:
        """Run the dense model over at most 256 held-out examples, or over the first batch where there are none."""
        self._held_out = bool(held)
        self._batches: list[Batch] = []
        self.examples = 0
        for batch in held or [first]:
            if self.examples < _EXAMPLES:
                part = first_of(batch, _EXAMPLES - self.examples)
                self._batches.append(part)
                self.examples += count_examples(part)
        try:
            with evaluating(model):
                self._dense = [_predicted(run_and_restore(model, batch), batch) for batch in self._batches]
        except Exception as error:
            raise InputError(f"the model does not run on a held-out batch: {type(error).__name__}: {error}") from error

    def agreement(self, model: nn.Module, team: Team) -> Agreement:
        """Run the pruned model over the same batches and compare, with the batches of all machines."""
        with team.together("the comparison of predictions"), evaluating(model):
            try:
                pruned = [_predicted(run_and_restore(model, batch), batch) for batch in self._batches]
            except Exception as error:
                raise SurgeryError(
                    f"the pruned model fails on a batch that the dense one ran on ({type(error).__name__}: {error}): "
                    "the model is as it was; check that its forward does the same on every call"
                ) from error
            mine = torch.zeros(6, dtype=torch.float64)
            for a, b in zip(self._dense, pruned, strict=True):
                mine[:4] += _compared(a, b)
            mine[4], mine[5] = self.examples, not self._held_out
        same, entries, wrong, size, examples, inside = team.sum_tensors({"agreement": mine})["agreement"].tolist()
        rate = same / entries if entries else None
        difference = math.sqrt(wrong / size) if size > 0 else None
        return Agreement(rate, difference, int(entries), int(examples), not inside)


def check_runs(model: nn.Module, batch: Batch) -> None:
    """The pruned model runs on a batch as it was given, of which only a part was calibrated with."""
    try:
        with evaluating(model):
            run_and_restore(model, batch)
    except Exception as error:
        raise SurgeryError(
            f"the pruned model fails on a whole batch ({type(error).__name__}: {error}): its forward takes another way "
            "for more examples; the model is as it was; pass hold_out=False"
        ) from error


@dataclass(frozen=True, eq=False)
class _Predicted:
    """The classes that an output names, where it does, and a sample of its values."""

    classes: Tensor | None
    values: Tensor | None


def _predicted(output: Any, batch: Batch) -> _Predicted:
    tensor, named = _main(output)
    if tensor is None:
        return _Predicted(None, None)
    if not tensor.is_floating_point():
        return _Predicted(tensor.flatten().cpu(), None)
    features = isinstance(output, Mapping) and not named and any(name in output for name in _FEATURES)
    axis, mask = None if features else _class_axis(tensor, batch, named), _mask(batch, tensor)
    classes = None
    if axis is not None:
        classes = tensor.argmax(axis)
        classes = (classes[mask] if mask is not None and mask.shape == classes.shape else classes.flatten()).cpu()
    return _Predicted(classes, _sampled(tensor if mask is None else tensor[mask]))


def _main(output: Any) -> tuple[Tensor | None, bool]:
    """The tensor that holds predictions, and whether its name says so: `logits`, else the first one of numbers."""
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return output["logits"], True
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    leaves = [t for t in tensors if not (t.is_complex() or t.is_quantized) and t.layout is torch.strided]
    return next((t for t in leaves if t.is_floating_point() and t.ndim), next(iter(leaves), None)), False


def _class_axis(output: Tensor, batch: Batch, named: bool) -> int | None:
    """Which axis counts classes: the last of (examples, tokens, classes), the second of images; None for no classes.

    An output as large as an input is a signal.
    """
    shapes = [leaf.shape for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if output.ndim < 2 or (not named and output.shape in shapes):
        return None
    axis = 1 if output.ndim > 3 else output.ndim - 1
    return axis if output.shape[axis] > 1 else None


def _mask(batch: Batch, output: Tensor) -> Tensor | None:
    """The tokens that are no padding, where the output has a row for every token. (examples, tokens)"""
    found = (batch.get(name) for name in _MASKS) if isinstance(batch, Mapping) else ()
    fitting = (m for m in found if isinstance(m, Tensor) and m.ndim == 2 and m.shape == output.shape[:2])
    mask = next(fitting, None)
    return None if mask is None else mask.bool().to(output.device)


def _sampled(output: Tensor) -> Tensor:
    flat = output.detach().flatten()
    if flat.numel() <= _SAMPLE:
        return flat.float().cpu()
    at = torch.randint(flat.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(0))
    return flat[at.to(flat.device)].float().cpu()


def _compared(dense: _Predicted, pruned: _Predicted) -> Tensor:
    """Equal predictions, predictions, squared difference and squared size of the outputs. (4,)"""
    found = torch.zeros(4, dtype=torch.float64)
    a, b = dense.classes, pruned.classes
    if a is not None and b is not None and a.shape == b.shape:
        found[0], found[1] = int((a == b).sum()), a.numel()
    x, y = dense.values, pruned.values
    if x is not None and y is not None and x.shape == y.shape:
        x, y = x.double(), y.double()
        finite = torch.isfinite(x) & torch.isfinite(y)
        found[2], found[3] = (x - y)[finite].square().sum(), x[finite].square().sum()
    return found
