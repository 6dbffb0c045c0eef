"""`ispasp.finetune`: train a pruned model with labels, to win back accuracy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ispasp._apply import apply_
from ispasp._heal import check_student
from ispasp._keep import Recipe as PruningRecipe, widths
from ispasp._survey import Survey, survey
from ispasp.engine.batches import batches_in, first_in
from ispasp.engine.sites import units_along
from ispasp.engine.team import joined_team
from ispasp.errors import InputError
from ispasp.files import folder_path
from ispasp.graph.analyse import owner
from ispasp.graph.state import plain
from ispasp.graph.trace import evaluating
from ispasp.report import Column, render
from ispasp.select import sum_by_unit
from ispasp.select.evidence import descending
from ispasp.surgery.remove import tensor_of
from ispasp.train.devices import need_accelerate
from ispasp.train.loop import NO_SCORE, Run, train
from ispasp.train.objective import Batch, Loss, Objective, Teacher, inputs_for, loss_of
from ispasp.train.recipe import Recipe, Sgd, Soft, check_counts, check_number
from ispasp.types.dimension import Extent, kept_mask, names_in
from ispasp.types.plan import Plan

_SGD = Sgd()
_ROWS = 5


@dataclass(frozen=True, eq=False)
class FinetuneResult:
    """A fine-tuned model and the loss of every step. Print it.

    `losses` are means over the examples of each step, before that step. `resumed` is how many steps came from a
    checkpoint, `plan` what `soft` has removed. `scores` maps the number of steps done to what `evaluate` returned.
    """

    model: nn.Module = field(repr=False)
    recipe: Recipe
    epochs: float
    steps: int
    losses: tuple[float, ...] = field(repr=False)
    resumed: int
    scores: Mapping[int, float] = field(default_factory=dict)
    plan: Plan | None = None

    def __str__(self) -> str:
        title = f"{type(self.model).__name__}: {self.steps:,} steps, {self.epochs:g} epochs"
        columns = [Column("steps", "steps"), Column("lr", "learning rate", "{:.3g}".format)]
        columns += [Column("loss", "mean loss", "{:.4f}".format)]
        columns += [Column("score", "score after", "{:.4g}".format)] if self.scores else []
        stops = sorted(self.scores) or range(1, self.steps + 1)
        rows = min(_ROWS, len(stops))
        edges = [0, *(stops[round(len(stops) * row / rows) - 1] for row in range(1, rows + 1))]
        table: list[dict[str, Any]] = []
        for a, b in pairwise(edges):
            steps, loss = f"{a + 1}-{b}" if b > a + 1 else f"{b}", math.fsum(self.losses[a:b]) / (b - a)
            lr, score = self.recipe.lr_at(a, self.steps), self.scores.get(b)
            table.append({"steps": steps, "lr": lr, "loss": loss, "score": score})
        resumed = f"\nsteps 1-{self.resumed} from a checkpoint" if self.resumed else ""
        return f"{render(title, columns, table)}\n{self.recipe}{resumed}"


def finetune(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    epochs: float = 1.0,
    recipe: Recipe = _SGD,
    loss: Loss | None = None,
    input_of: Callable[[Batch], Any] | None = None,
    label_smoothing: float = 0.0,
    teacher: nn.Module | Teacher | None = None,
    mixed_precision: str | None = None,
    accumulate: int = 1,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    evaluate: Callable[[nn.Module], float] | None = None,
    soft: Soft | None = None,
    seed: int = 0,
    progress: bool = True,
) -> FinetuneResult:
    """Train the model in place, with labels.

    Batches are as for `prune`, with labels: `(inputs, labels)`, called as model(inputs) and compared by cross entropy;
    or dicts with "labels" (or "label"), called as model(**batch) (without the labels if the model takes none), whose
    output is a `loss` (Hugging Face), `logits` or a tensor. For anything else pass `loss(output, batch)`, the mean over
    the examples of a batch, and `input_of(batch)`, what the model is called with.

    - `epochs`: passes over the loader, 0.5 for half of one.
    - `recipe`: `Sgd(lr=0.01)` (momentum, cosine) or `AdamW(lr=5e-5)` (linear decay).
    - `teacher`: the dense model, or `Teacher(dense, temperature=2, weight=0.5)`: learn from its outputs as well.
    - `accumulate`: batches per step, weighted by their examples: two halves equal one whole batch, except in BatchNorm.
    - `mixed_precision`: "bf16", "fp16" (GPU), or None: the setting of `accelerate launch`, else full precision.
    - `checkpoint`: a folder. Call again with the same arguments to resume an interrupted run from its last checkpoint,
      written every `checkpoint_every` steps. It ends in the same parameters, on a CPU with as many threads to the bit.
      A finished run does not run again.
    - `evaluate`: evaluate(model) -> number, called after every epoch in eval mode without gradients; see
      `result.scores`.
    - `soft`: `ispasp.train.Soft(keep=0.7)` prunes while training: after every epoch, before `evaluate`, the units of
      smallest norm are set to zero; at the end they are removed. A new model may be trained so from scratch.

    Resuming needs a loader with a length that gives as many batches every time, and draws random numbers only from the
    generators of torch, NumPy and Python or from those of its DataLoader or sampler. Workers must not be persistent.
    A checkpoint cannot compare `loss` and the outputs of `teacher`. Random numbers depend on `seed`; the caller's are
    left alone.

    Runs on the device that accelerate finds. With torchrun or accelerate launch every batch is split over the
    processes: their number does not change the result, except in BatchNorm and random layers. The model ends on the
    device and in the modes it came in.

    >>> import torch
    >>> torch.manual_seed(0); x = torch.randn(64, 4); y = (x[:, 0] > 0).long()     # doctest: +ELLIPSIS
    <...>
    >>> batches = list(zip(x.split(16), y.split(16)))
    >>> result = finetune(nn.Linear(4, 2), batches, epochs=5, recipe=Sgd(lr=0.5))
    >>> result.steps, result.losses[-1] < result.losses[0] / 2
    (20, True)
    """
    with joined_team() as ranks, ranks.together("the start of fine-tuning"):
        need_accelerate()
        if not isinstance(model, nn.Module):
            raise InputError(f"the model is a {type(model).__name__}: pass a torch.nn.Module")
        if teacher is not None and not isinstance(teacher, Teacher):
            teacher = Teacher(teacher)
        check_student(model, None if teacher is None else teacher.model)
        _check(epochs, recipe, accumulate, checkpoint_every, seed)
        loader = _checked_loader(loader, model, resumable=checkpoint is not None)
        for name, function in (("loss", loss), ("input_of", input_of), ("evaluate", evaluate)):
            if function is not None and not callable(function):
                raise InputError(f"{name} is a {type(function).__name__}: pass a function")
        objective = Objective(loss_of(loss), input_of or inputs_for(model), label_smoothing, teacher)
        units = None if soft is None else _soft_units(soft, model, objective.input_of(first_in(loader)))
        taught = None if teacher is None else f"temperature {teacher.temperature}, weight {teacher.weight}"
        facts = {"label_smoothing": label_smoothing, "own_loss": loss is not None, "teacher": taught}
        facts |= {} if soft is None else {"soft": repr(soft)}
    steps = recipe, objective, float(epochs), accumulate, seed, mixed_precision
    saves = None if checkpoint is None else folder_path(checkpoint), checkpoint_every
    after = evaluate if units is None else units.after_epoch(evaluate)
    run = Run(*steps, *saves, progress, after, () if teacher is None else (teacher.model,), facts)
    losses, resumed, scores = train(run, model, loader)
    plan = None if units is None else units.remove_(model)
    return FinetuneResult(model, recipe, epochs, len(losses), losses, resumed, scores, plan)


def _check(epochs: float, recipe: Recipe, accumulate: int, every: int, seed: int) -> None:
    remedy = "pass ispasp.train.Sgd(lr=...) or ispasp.train.AdamW(lr=...)"
    if isinstance(recipe, PruningRecipe):
        raise InputError(f"recipe={recipe.name!r} is for keep= of ispasp.prune: {remedy}")
    if not isinstance(recipe, Recipe):
        raise InputError(f"recipe is a {type(recipe).__name__}: {remedy}")
    check_number("epochs", epochs, lambda epochs: epochs > 0, "a number above 0, such as 0.5")
    check_counts(accumulate=accumulate, checkpoint_every=every)
    check_counts(0, seed=seed)


def _checked_loader(loader: Any, model: nn.Module, resumable: bool) -> Any:
    """The batches of a loader, as for `prune`. They must have a length."""
    if hasattr(loader, "__len__"):
        loader = batches_in(loader, model)
    try:
        batches = len(loader)
    except TypeError as error:
        remedy = "pass a DataLoader over a dataset with a length, or a list of batches"
        raise InputError(f"the loader is a {type(loader).__name__} without a length: {remedy}") from error
    if batches == 0:
        raise InputError("the loader is empty: pass at least one batch (drop_last may have dropped the only one)")
    if resumable and getattr(loader, "persistent_workers", False):
        raise InputError("persistent workers cannot resume: pass persistent_workers=False, or no checkpoint")
    return loader


# Soft filter pruning ------------------------------------------------------------------------------------------
def _soft_units(soft: Soft, model: nn.Module, batch: Batch) -> _SoftUnits:
    """Find the hidden dimensions that shrink."""
    if not isinstance(soft, Soft):
        raise InputError(f"soft is a {type(soft).__name__}: pass ispasp.train.Soft(keep=0.7)")
    found = survey(model, batch)
    skip = (soft.skip,) if isinstance(soft.skip, str) else soft.skip
    counts = dict(widths(found.dimensions, soft.keep, skip).counts)
    if not counts:
        raise InputError(f"{soft} removes nothing: pass a smaller keep, or skip less")
    structure = found.plan(counts).structure
    makers = {path for d in found.dimensions if d.name in counts for path in d.producers}
    computed = {*structure.folded, *(owner(norm.v) for norm in structure.weight_norms)} & makers
    if computed:
        wrong = f"{min(computed)!r} computes its weight (weight_norm, spectral_norm)"
        remedy = "remove the parametrization, or skip what it makes"
        raise InputError(f"{wrong}, so its units cannot be set to zero: {remedy}")
    return _SoftUnits(found, counts, batch, float(soft.norm))


@dataclass(frozen=True, eq=False)
class _SoftUnits:
    """The hidden dimensions that shrink: `counts[name]` of their units stay."""

    survey: Survey
    counts: dict[str, int]
    batch: Batch
    norm: float

    @torch.no_grad()
    def zero_(self, model: nn.Module) -> Plan:
        """Set the units of smallest norm to zero. Returns the plan that removes them."""
        with plain(model) as inner:
            made = {name: self._made(inner, name) for name in self.counts}
            kept = {name: self._largest(name, parts) for name, parts in made.items()}
            for name, parts in made.items():
                for rows, extent in parts:
                    rows[~kept_mask(extent, {name: kept[name]}).to(rows.device)] = 0
        return self.survey.plan(kept)

    def remove_(self, model: nn.Module) -> Plan:
        """Remove the units of smallest norm: those that are zero."""
        plan = self.zero_(model)
        with evaluating(model):
            apply_(model, plan, self.batch, checked_by=self.survey)
        return plan

    def after_epoch(self, evaluate: Callable[[nn.Module], Any] | None) -> Callable[[nn.Module], Any]:
        def step(model: nn.Module) -> Any:
            self.zero_(model)
            return NO_SCORE if evaluate is None else evaluate(model)

        return step

    def _made(self, model: nn.Module, name: str) -> list[tuple[Tensor, Extent]]:
        """The weights that make a hidden dimension, as views whose first axis holds it, and the extent of that axis."""
        producers = next(d.producers for d in self.survey.dimensions if d.name == name)
        return [
            (tensor_of(model, tensor).detach().movedim(axis, 0), extent)
            for tensor, layout in self.survey.structure.tensors.items()
            for axis, extent in layout.axes.items()
            if (owner(tensor) or tensor) in producers and len(layout.shape) > 1 and name in names_in(extent)
        ]

    def _largest(self, name: str, parts: list[tuple[Tensor, Extent]]) -> tuple[int, ...]:
        units = self.survey.structure.units[name]
        score = torch.zeros(units, dtype=torch.float64, device="cpu")
        for rows, extent in parts:
            powers = rows.double().abs().pow(self.norm).flatten(1).sum(1)
            score += sum_by_unit(powers.cpu(), units_along(extent, name), units)
        return tuple(sorted(descending(score)[: self.counts[name]].tolist()))
