"""Quality of a pruned model: the user's scores, agreement with the dense model, and fresh BatchNorm statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.engine.batches import count_examples, first_of, tensors_of
from ispasp.engine.team import Team
from ispasp.errors import InputError, SurgeryError, failing_as
from ispasp.graph.trace import Batch, evaluating, run_and_restore
from ispasp.surgery.remove import Undo, set_data

Evaluate = Callable[[nn.Module], Any]
_EXAMPLES = 256  # most examples whose predictions are compared
_SAMPLE = 1 << 20  # values of a batch's output that are kept for the relative difference
_ENTRIES = 1 << 20  # values whose logarithms are taken at a time
_MASKS = ("decoder_attention_mask", "attention_mask")
_FEATURES = ("last_hidden_state", "pooler_output", "image_embeds", "text_embeds")  # outputs of Hugging Face models


@dataclass(frozen=True)
class Scores:
    """Scores of the dense model and the pruned one by the user's `evaluate`, by name."""

    before: Mapping[str, float]
    after: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} {number(self.before.get(name))} -> {number(self.after[name])}" for name in self.after)


@dataclass(frozen=True)
class Agreement:
    """Agreement of the pruned model's outputs with the dense model's on calibration data, without labels.

    `rate` is the fraction of equal predictions (the largest class of every example, token or pixel); None where outputs
    are not classes. `difference` is ||y' - y|| / ||y|| over the outputs. Tokens that an attention mask marks as padding
    are left out. Without `held_out` the network was fitted to these examples, so both numbers look too good.
    """

    rate: float | None
    difference: float | None
    predictions: int
    examples: int
    held_out: bool

    def __str__(self) -> str:
        kind = "held-out examples" if self.held_out else "calibration examples (in-sample: too few to hold some out)"
        parts = [f"{self.rate:.1%} of {self.predictions:,} predictions"] if self.rate is not None else []
        parts += [f"outputs differ by {self.difference:.1%}"] if self.difference is not None else []
        return f"{', '.join(parts) or 'nothing to compare'} on {self.examples:,} {kind}"


def scored(evaluate: Evaluate | None, model: nn.Module, team: Team) -> dict[str, float]:
    """Call the user's function, if there is one, on the model in eval mode; all ranks take rank 0's numbers."""
    if evaluate is None:
        return {}
    with team.together("the evaluation"):
        with evaluating(model):
            found = evaluate(model)
        model.eval()  # the user's function may train
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
        remedy = "return a number, or a dict of numbers such as {'accuracy': 0.93}"
        raise InputError(f"evaluate(model) returned a {type(found).__name__}: {remedy}") from None


def number(value: float | None) -> str:
    """Format a score."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def first_examples(batches: Iterable[Batch]) -> list[Batch]:
    """The first 256 examples of some batches."""
    found, left = list[Batch](), _EXAMPLES
    for batch in batches:
        found.append(first_of(batch, left))
        left -= count_examples(batch)
        if left <= 0:
            break
    return found


class Judge:
    """The dense model's predictions on some batches, to compare the pruned model's with."""

    def __init__(self, model: nn.Module, held: Sequence[Batch], first: Batch) -> None:
        """Run the dense model on at most 256 held-out examples, or on the first batch if none are held out."""
        self._held_out = bool(held)
        self._batches = first_examples(held or [first])
        self.examples = sum(map(count_examples, self._batches))
        remedy = "pass batches that the model takes, or hold_out=False"
        with failing_as(InputError, "the model does not run on a held-out batch", remedy):
            self._dense = self._predictions(model)

    def agreement(self, model: nn.Module, team: Team) -> Agreement:
        """Compare the pruned model's predictions with the dense model's, on the batches of all ranks."""
        with team.together("the comparison of predictions"):
            remedy = "the model is as it was; check that its forward does the same on every call"
            with failing_as(SurgeryError, "the pruned model fails on a batch that the dense one ran on", remedy):
                pruned = self._predictions(model)
            mine = torch.zeros(6, dtype=torch.float64)
            for a, b in zip(self._dense, pruned, strict=True):
                mine[:4] += _compared(a, b)
            mine[4], mine[5] = self.examples, not self._held_out
        same, entries, wrong, size, examples, inside = team.sum_tensors({"agreement": mine})["agreement"].tolist()
        rate = same / entries if entries else None
        difference = math.sqrt(wrong / size) if size > 0 else None
        return Agreement(rate, difference, int(entries), int(examples), not inside)

    def _predictions(self, model: nn.Module) -> list[_Predicted]:
        with evaluating(model):
            return [_predicted(run_and_restore(model, batch), batch) for batch in self._batches]


def check_runs(model: nn.Module, batch: Batch) -> None:
    """Raise if the pruned model fails on a whole batch of which calibration used a part."""
    remedy = "its size or its values take another path than a part of it; the model is as it was; pass hold_out=False"
    with failing_as(SurgeryError, "the pruned model fails on a whole batch", remedy), evaluating(model):
        run_and_restore(model, batch)


# Model outputs --------------------------------------------------------------------------------------------------
class _Output(NamedTuple):
    """The main tensor of a model's output, its class axis if it has one, and its values without padding."""

    tensor: Tensor
    axis: int | None
    values: Tensor


def _output(output: Any, batch: Batch) -> _Output | None:
    """The `logits` of an output, else its first tensor of numbers; None if there is none."""
    named = isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor)
    leaves = [t for t in tensors_of(output) if not (t.is_complex() or t.is_quantized) and t.layout is torch.strided]
    leaves = [output["logits"]] if named else leaves
    tensor = next((t for t in leaves if t.is_floating_point() and t.ndim), next(iter(leaves), None))
    if tensor is None:
        return None
    features = isinstance(output, Mapping) and not named and any(name in output for name in _FEATURES)
    axis = None if features or not tensor.is_floating_point() else _class_axis(tensor, batch, named)
    mask = _mask(batch, tensor) if tensor.is_floating_point() else None
    values = tensor if mask is None else tensor[mask]
    if mask is None or tensor.ndim < 3:  # then tokens are the classes
        return _Output(tensor, axis, values)
    return _Output(values, None if axis is None else -1, values)


def _class_axis(output: Tensor, batch: Batch, named: bool) -> int | None:
    """The class axis: the second of images, else the last; None if the output has the shape of an input."""
    if output.ndim < 2 or (not named and output.shape in [leaf.shape for leaf in tensors_of(batch)]):
        return None
    axis = 1 if output.ndim > 3 else output.ndim - 1
    return axis if output.shape[axis] > 1 else None


def _mask(batch: Batch, output: Tensor) -> Tensor | None:
    """The tokens that are not padding, if the output has a row for every token. (examples, tokens)"""
    found = (batch.get(name) for name in _MASKS) if isinstance(batch, Mapping) else ()
    fitting = (m for m in found if isinstance(m, Tensor) and m.ndim == 2 and m.shape == output.shape[:2])
    mask = next(fitting, None)
    return None if mask is None else mask.bool().to(output.device)


def divergence(output: Any, dense: Any, batch: Batch) -> float:
    """Divergence of an output from the dense one: KL for classes, else the relative squared error.

    >>> y = torch.tensor([[2.0, 0.0]])
    >>> divergence(y, y, torch.ones(1, 3)), round(divergence(-y, y, torch.ones(1, 3)), 4)
    (0.0, 1.5232)
    """
    found, wanted = _output(output, batch), _output(dense, batch)
    if found is None or wanted is None or not wanted.tensor.is_floating_point():
        return 0.0
    if wanted.axis is None:
        a, b = found.values.double(), wanted.values.double()
        return float((a - b).square().sum() / b.square().sum().clamp(min=1e-300))
    classes = wanted.tensor.shape[wanted.axis]
    rows = [each.tensor.movedim(wanted.axis, -1).reshape(-1, classes) for each in (wanted, found)]
    total = 0.0
    for a, b in zip(*(torch.split(each, max(1, _ENTRIES // classes)) for each in rows), strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        total += float(p.exp().mul_(p - q).sum())
    return max(total / max(1, len(rows[0])), 0.0)


def divergences(output: Any, dense: Any, batch: Batch) -> list[float]:
    """`divergence` of every example of a batch.

    >>> y = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    >>> [round(d, 4) for d in divergences(y * torch.tensor([[1.0], [-1.0]]), y, torch.ones(2, 3))]
    [0.0, 1.5232]
    """
    size = count_examples(batch)

    def row(value: Any, k: int) -> Any:
        leaf = lambda t: t[k : k + 1] if isinstance(t, Tensor) and t.ndim and len(t) == size else t  # noqa: E731
        return pytree.tree_map(leaf, value)

    return [divergence(row(output, k), row(dense, k), row(batch, k)) for k in range(size)]


def own_labels(output: Any, batch: Batch) -> Tensor:
    """A loss without labels: cross entropy with classes drawn from the model's own predictions.

    Its gradients are those of the Fisher information. An output without classes is compared with itself plus noise.

    >>> own_labels(torch.tensor([[9.0, 0.0]]), torch.ones(1, 3)).item() < 0.01
    True
    """
    found = _output(output, batch)
    if found is None or not found.tensor.is_floating_point():
        raise InputError("the model returns no numbers to draw labels from: pass loss=lambda output, batch: ...")
    (y, axis, values), draw = found, torch.Generator().manual_seed(0)
    if axis is None:
        noise = torch.randn(values.shape, generator=draw).to(values)
        return (values.detach() + noise - values).square().reshape(len(values), -1).sum(1).mean() / 2
    logp = y.movedim(axis, -1).flatten(0, -2).log_softmax(-1)
    labels = torch.multinomial(logp.detach().exp().cpu(), 1, generator=draw).to(y.device)
    return -logp.gather(1, labels).mean()


_Predicted = tuple[Tensor | None, Tensor | None]


def _predicted(output: Any, batch: Batch) -> _Predicted:
    """The predicted classes, if the output has classes, and a sample of its values."""
    found = _output(output, batch)
    if found is None:
        return None, None
    y, axis, values = found
    if not y.is_floating_point():
        return y.flatten().cpu(), None
    flat = values.detach().flatten()
    if flat.numel() > _SAMPLE:
        at = torch.randint(flat.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(0))
        flat = flat[at.to(flat.device)]
    return None if axis is None else y.argmax(axis).flatten().cpu(), flat.float().cpu()


def _compared(dense: _Predicted, pruned: _Predicted) -> Tensor:
    """Equal predictions, predictions, squared difference and squared size of the outputs. (4,)"""
    found = torch.zeros(4, dtype=torch.float64)
    (a, x), (b, y) = dense, pruned
    if a is not None and b is not None and a.shape == b.shape:
        found[0], found[1] = int((a == b).sum()), a.numel()
    if x is not None and y is not None and x.shape == y.shape:
        x, y = x.double(), y.double()
        finite = torch.isfinite(x) & torch.isfinite(y)
        found[2], found[3] = (x - y)[finite].square().sum(), x[finite].square().sum()
    return found


# BatchNorm ------------------------------------------------------------------------------------------------------
@torch.no_grad()
def recalibrate_(model: nn.Module, batches: Iterable[Batch], team: Team, undo: Undo) -> None:
    """Set the running statistics of every BatchNorm to their mean over all calls, on all ranks.

    Every BatchNorm sees inputs that the ones before it have normalised by the statistics of the same batch.
    """
    kind = nn.modules.batchnorm._BatchNorm
    norms = {n: m for n, m in model.named_modules() if isinstance(m, kind) and m.running_mean is not None}
    sums: dict[str, Tensor] = {}
    before = {(m, leaf): value.clone() for m in norms.values() for leaf, value in m.named_buffers(recurse=False)}
    for module in norms.values():
        module.training = True
    try:
        with team.together("the recalibration of BatchNorm"), ExitStack() as hooks:
            for name, module in norms.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(_add_moments, sums, name)))
            for number, batch in enumerate(batches):  # torch refuses a BatchNorm that gets one value for each channel
                what = f"BatchNorm cannot be recalibrated on batch {number}"
                with failing_as(InputError, what, "pass larger batches, or recalibrate=False"):
                    run_and_restore(model, batch)
    finally:
        for module in norms.values():
            module.training = False
        for (module, leaf), value in before.items():
            module.get_buffer(leaf).copy_(value)
    for name, (mean, var, calls) in team.sum_tensors(sums).items():
        for value, buffer in ((mean, norms[name].running_mean), (var, norms[name].running_var)):
            if buffer is not None:
                set_data(buffer, (value / calls).to(buffer), None, undo)


def _add_moments(sums: dict[str, Tensor], name: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Add mean, variance and a count of 1 for each channel. (3, C)"""
    x = args[0].double()
    over = [0, *range(2, x.ndim)]
    mean, var = x.mean(over), x.var(over, unbiased=True)
    found = torch.stack([mean, var, torch.ones_like(mean)])
    sums[name] = sums[name] + found if name in sums else found
