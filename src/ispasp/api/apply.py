"""`ispasp.apply_`: surgery alone."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ispasp.api.evidence import Setting
from ispasp.api.history import remember_
from ispasp.api.proof import Proof
from ispasp.api.survey import Survey, survey_kinds
from ispasp.calibrate.batches import one_batch
from ispasp.calibrate.circuit import Edits, named_tensors
from ispasp.calibrate.readers import readers
from ispasp.calibrate.traces import Circuits
from ispasp.errors import InputError, SurgeryError
from ispasp.graph.analyse import Analysis
from ispasp.graph.process import one_at_a_time
from ispasp.graph.trace import Batch, evaluating
from ispasp.graph.wrappers import plain
from ispasp.surgery.attempt import Failure, attempt
from ispasp.surgery.fold import Folding, folding
from ispasp.surgery.masking import masked_output
from ispasp.surgery.remove import all_or_nothing, check_optimizer, fitting, remove_
from ispasp.surgery.verify import relative_error, tolerance
from ispasp.types.plan import Plan


def apply_(
    model: nn.Module,
    plan: Plan,
    batch: Batch = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    checked_by: Survey | None = None,
) -> nn.Module:
    """Remove from the model, in place, every unit that the plan does not keep; returns the model.

    With a `batch` the result is verified: the pruned model must give what the dense one gives with removed units
    masked where they are read, else `SurgeryError` names the guilty dimension. On any failure the model is exactly as
    before. An `optimizer` has its state (momentum, moments) cut alike. `checked_by`: the survey of this very model, if
    you have it, saves tracing it again.

    >>> from ispasp.api.survey import survey
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4)
    >>> apply_(model, survey(model, x).plan({"0": [1, 2, 5]}), x)[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    if not isinstance(plan, Plan):
        raise InputError(
            f"plan is a {type(plan).__name__}: pass an ispasp.Plan, e.g. survey.plan(0.5) or Plan.from_json(text)"
        )
    check_optimizer(optimizer, model)
    with one_at_a_time(), plain(model) as inner, folding(inner) as layers:
        with fitting(inner):
            layers.fold(plan.structure.folded)
        layers.check(optimizer, plan.structure.folded)
        if batch is None:
            with fitting(inner), all_or_nothing() as undo:
                remove_(inner, plan, undo, optimizer)
                remember_(inner, plan, undo)
        else:
            batch = one_batch(inner, batch)
            _apply_and_verify(inner, plan, batch, optimizer, _analysis(inner, batch, checked_by, layers))
        layers.restore(but=plan.structure.folded)
    return model


def _analysis(model: nn.Module, batch: Batch, checked_by: Survey | None, layers: Folding) -> Analysis:
    """The analysis of the model with all layers folded that a survey folds."""
    if checked_by is None:
        return survey_kinds(model, batch, (), scope="all", check=False, folds=layers).analysis
    with fitting(model):
        layers.fold(checked_by.structure.folded)
    return checked_by.analysis


def _apply_and_verify(
    model: nn.Module,
    plan: Plan,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    analysis: Analysis,
) -> None:
    with fitting(model), evaluating(model):
        proof = Proof(_setting(model, plan, batch, analysis), batch)
    with all_or_nothing() as undo:
        with fitting(model):
            remove_(model, plan, undo, optimizer)
        remember_(model, plan, undo)
        what = _what_is_wrong(model, plan, batch, proof)
        if what:
            undo.run()
            raise SurgeryError(_guilty(model, plan, batch, analysis, what))


def _setting(model: nn.Module, plan: Plan, batch: Batch, analysis: Analysis) -> Setting:
    found = readers(analysis, plan.kept)
    edits = Edits({reader.number: reader.cuts(plan.kept) for reader in found})
    circuits = Circuits(model, analysis, batch, ())
    return Setting(model, analysis, circuits, found, edits, plan.kept, named_tensors(model))


def _what_is_wrong(model: nn.Module, plan: Plan, batch: Batch, proof: Proof) -> str:
    outcome = attempt(model, batch)
    if isinstance(outcome, Failure):
        return f"the forward fails: {outcome.error}"
    evidence = proof.compare(model, plan)
    if not evidence.holds:
        return f"relative error {evidence.error:.1e}"
    for name, why in evidence.unproved.items():
        warnings.warn(f"{name}: not proved that removing equals masking: {why}", stacklevel=4)
    return ""


def _guilty(model: nn.Module, plan: Plan, batch: Batch, analysis: Analysis, what: str) -> str:
    names = list(plan.kept)
    while len(names) > 1:
        half = names[: len(names) // 2]
        names = half if _wrong(model, plan, half, batch, analysis) else names[len(half) :]
    return (
        f"removing units of {names[0]!r} does not equal masking them ({what}): the model is as it was; "
        "leave this dimension out of the plan"
    )


def _wrong(model: nn.Module, plan: Plan, names: list[str], batch: Batch, analysis: Analysis) -> bool:
    part = Plan({name: plan.kept[name] for name in names}, plan.structure)
    expected = masked_output(analysis, model, batch, part.kept)
    with all_or_nothing() as undo:
        remove_(model, part, undo)
        outcome = attempt(model, batch)
        undo.run()
    return isinstance(outcome, Failure) or not relative_error(outcome, expected) <= tolerance(analysis.trace)
