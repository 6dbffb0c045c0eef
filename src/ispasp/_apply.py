"""`ispasp.apply_` removes units by a plan, `ispasp.mask` makes the dense model compute as if they were gone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from ispasp._proof import MaskedNetwork, compared, expect
from ispasp._survey import Survey, survey, survey_kinds
from ispasp.engine.batches import one_batch, tensors_of
from ispasp.engine.graphs import TracedGraphs
from ispasp.engine.runner import Edits
from ispasp.engine.sites import sites
from ispasp.errors import InputError, SurgeryError
from ispasp.graph.analyse import Analysis
from ispasp.graph.atoms import atoms_of
from ispasp.graph.state import one_at_a_time, plain
from ispasp.graph.trace import Batch, cache_on, evaluating
from ispasp.surgery.fold import folding
from ispasp.surgery.remove import Undo, all_or_nothing, check_optimizer, fitting, remove_, removed, undone, zero_
from ispasp.surgery.verify import Failure, attempt, masked_output, relative_error, shared, tolerance
from ispasp.types.plan import Plan


def apply_(
    model: nn.Module,
    plan: Plan,
    batch: Batch = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    checked_by: Survey | None = None,
) -> nn.Module:
    """Remove every unit that the plan does not keep, in place. Returns the model.

    With a `batch` the result is verified: the pruned model must give what the dense one gives with removed units
    masked where they are read, else `SurgeryError` names the guilty dimension. On any failure the model is exactly as
    before. The state of an `optimizer` (momentum, moments) is cut too. `checked_by`: the survey of this model on this
    batch, which saves tracing it again.

    >>> from ispasp import survey
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4)
    >>> apply_(model, survey(model, x).plan({"0": [1, 2, 5]}), x)[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    _check_plan(plan)
    check_optimizer(optimizer, model)
    with one_at_a_time(), plain(model) as inner, folding(inner) as layers:
        with fitting(inner):
            layers.fold(plan.structure.folded)
        layers.check(optimizer, plan.structure.folded)
        if batch is None:
            with fitting(inner), all_or_nothing() as undo:
                remove_(inner, plan, undo, optimizer)
        else:
            batch = _proving(inner, batch)
            if checked_by is None:  # it folds what a survey folds
                checked_by = survey_kinds(inner, batch, (), scope="all", check=False, folds=layers)
            else:
                with fitting(inner):
                    layers.fold(checked_by.structure.folded)
            _apply_and_verify(inner, plan, batch, optimizer, checked_by.analysis)
        layers.restore(but=plan.structure.folded)
    return model


def _proving(model: nn.Module, given: object) -> Batch:
    """The inputs of one batch; raises where they could not prove anything."""
    batch = one_batch(model, given)
    if any(t.is_floating_point() and t.numel() and not bool(t.double().isfinite().any()) for t in tensors_of(batch)):
        raise InputError("a tensor of the batch has NaN or Inf only, which proves nothing: pass a batch of real data")
    return batch


def _check_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}: pass an ispasp.Plan, as survey.plan(0.5) or result.plan")


def _apply_and_verify(
    model: nn.Module, plan: Plan, batch: Batch, optimizer: torch.optim.Optimizer | None, analysis: Analysis
) -> None:
    with fitting(model), evaluating(model):
        found = sites(analysis, plan.kept)
        edits = Edits({site.number: site.cuts(plan.kept) for site in found})
        graphs = TracedGraphs(model, analysis, batch)
        expected = expect(MaskedNetwork(model, analysis, graphs, batch, found, edits, plan.kept))
    with all_or_nothing() as undo:
        with fitting(model):
            remove_(model, plan, undo, optimizer)
        try:
            evidence = compared(expected, model, plan)
            problem = "" if evidence.holds else f"relative error {evidence.error:.1e}"
        except SurgeryError as error:
            problem = f"the forward fails: {error.__cause__}"
        if problem:
            undo.close()
            with cache_on() if expected.cached else nullcontext():
                guilty = _guilty(model, plan, batch, analysis)
            raise SurgeryError(
                f"removing units of {guilty!r} does not equal masking them ({problem}): the model is as it was; "
                "leave this dimension out of the plan"
            )
    for name, why in expected.unproved.items():
        warnings.warn(f"{name}: not proved that removing equals masking: {why}", stacklevel=3)


def _guilty(model: nn.Module, plan: Plan, batch: Batch, analysis: Analysis) -> str:
    """Find a hidden dimension whose removal alone does not equal masking."""

    def wrong(names: list[str]) -> bool:
        part = Plan({name: plan.kept[name] for name in names}, plan.structure)
        expected = masked_output(analysis, model, batch, part.kept)
        with removed(model, part):
            outcome = attempt(model, batch)
        error = float("inf") if isinstance(outcome, Failure) else relative_error(shared(outcome, expected), expected)
        return not error <= tolerance(analysis.trace)

    names = list(plan.kept)
    while len(names) > 1:
        half = names[: len(names) // 2]
        names = half if wrong(half) else names[len(half) :]
    return names[0]


@contextmanager
def mask(model: nn.Module, plan: Plan, batch: Batch) -> Iterator[nn.Module]:
    """Mask the units that the plan does not keep: the model computes as if they were gone. Shapes stay.

    Weights that read removed units are zero inside the block, which is exact. The output on the `batch` (one, as for
    `survey`) is compared with that of surgery; `SurgeryError` is raised where zero weights do not mask the units.
    Afterwards, also after an exception, every tensor is what it was. To train a masked model, train a copy:
    `copy.deepcopy(masked)` inside the block stays masked.

    >>> from ispasp import survey
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4)
    >>> with mask(model, survey(model, x).plan({"0": [1, 2, 5]}), x) as masked:
    ...     masked[2].weight.count_nonzero().item(), masked[2].weight.shape
    (6, torch.Size([2, 8]))
    >>> model[2].weight.count_nonzero().item()
    16
    """
    _check_plan(plan)
    with undone() as undo:
        with one_at_a_time(), plain(model) as inner:
            _mask(inner, plan, _proving(inner, batch), undo)
        yield model


def _mask(model: nn.Module, plan: Plan, batch: Batch, undo: Undo) -> None:
    analysis = survey(model, batch, scope="all", check=False).analysis
    with fitting(model):
        with removed(model, plan):
            expected = attempt(model, batch)
        if isinstance(expected, Failure):
            raise SurgeryError(f"the forward fails without these units ({expected.error}): leave some out of the plan")
        for name, axes in _reading(analysis).items():
            zero_(model, name, axes, plan, undo)
    found = attempt(model, batch)
    error = float("inf") if isinstance(found, Failure) else relative_error(found, expected)
    if not error <= tolerance(analysis.trace):
        raise SurgeryError(
            f"zeros in the weights of {type(model).__name__} do not mask these units (relative error {error:.1e}): "
            "something else than a weight reads them; use ispasp.apply_ on a copy, which removes them"
        )


def _reading(analysis: Analysis) -> dict[str, set[int]]:
    """The axes of parameters that contractions sum over."""
    found: dict[str, set[int]] = {}
    for contraction in (c for walk in analysis.walks for c in walk.contractions):
        summed = {atom for axis in contraction.contracted for atom in atoms_of(axis)}
        for name, value in analysis.tensors.items():
            if value.parameters & contraction.parameters:
                reads = (k for k, axis in enumerate(value.axes) if summed & {*atoms_of(axis)})
                found.setdefault(name, set()).update(reads)
    return found
