"""`ispasp.mask`: the dense model, computing as if units were gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ispasp.api.survey import survey
from ispasp.calibrate.batches import one_batch
from ispasp.errors import InputError, SurgeryError
from ispasp.graph.analyse import Analysis
from ispasp.graph.atoms import resolve
from ispasp.graph.interrupts import uninterrupted
from ispasp.graph.process import one_at_a_time
from ispasp.graph.trace import Batch
from ispasp.graph.wrappers import plain
from ispasp.surgery.attempt import Failure, attempt
from ispasp.surgery.remove import Undo, fitting, remove_, row_norms, set_data
from ispasp.surgery.verify import relative_error, tolerance
from ispasp.types.layout import kept_mask, names_in
from ispasp.types.plan import Plan

Axes = dict[str, set[int]]  # tensor -> axes that are summed over with activations


@contextmanager
def mask(model: nn.Module, plan: Plan, batch: Batch) -> Iterator[nn.Module]:
    """Within the block the model computes as if the units that the plan does not keep were gone; shapes stay.

    Weights that read removed units are zero, which is exact; it is compared with the surgery's output on the `batch`
    (one, as for `survey`), and refused with `SurgeryError` where it cannot be done by weights. Afterwards, also after
    an exception, every tensor is what it was. Train a copy instead: `copy.deepcopy(masked)` inside the block stays
    masked.

    >>> from ispasp.api.survey import survey
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4)
    >>> with mask(model, survey(model, x).plan({"0": [1, 2, 5]}), x) as masked:
    ...     masked[2].weight.count_nonzero().item(), masked[2].weight.shape
    (6, torch.Size([2, 8]))
    >>> model[2].weight.count_nonzero().item()
    16
    """
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}: pass an ispasp.Plan, e.g. survey.plan(0.5) or result.plan")
    undo = Undo()
    try:
        with one_at_a_time(), plain(model) as inner:
            _mask(inner, plan, one_batch(inner, batch), undo)
        yield model
    finally:
        with uninterrupted():
            undo.run()


def _mask(model: nn.Module, plan: Plan, batch: Batch, undo: Undo) -> None:
    analysis = survey(model, batch, scope="all", check=False).analysis
    with fitting(model):
        expected = _removed(model, plan, batch)
        for name, axes in _reading(analysis).items():
            _zero(model, name, axes, plan, undo)
    found = attempt(model, batch)
    error = float("inf") if isinstance(found, Failure) else relative_error(found, expected)
    if not error <= tolerance(analysis.trace):
        raise SurgeryError(
            f"zeros in the weights of {type(model).__name__} do not mask these units (relative error {error:.1e}): "
            "something else than a weight reads them; use ispasp.apply_ on a copy, which removes them"
        )


def _removed(model: nn.Module, plan: Plan, batch: Batch) -> list[Tensor]:
    """What the model gives without these units; they are put back."""
    undo = Undo()
    try:
        remove_(model, plan, undo)
        outcome = attempt(model, batch)
    finally:
        with uninterrupted():
            undo.run()
    if isinstance(outcome, Failure):
        raise SurgeryError(f"the forward fails without these units ({outcome.error}): leave some out of the plan")
    return outcome


def _reading(analysis: Analysis) -> Axes:
    """Axes of parameters that contractions sum over."""
    found: Axes = {}
    for contraction in (c for walk in analysis.walks for c in walk.contractions):
        atoms = {atom for axis in contraction.contracted for segment in resolve(axis) for atom in segment}
        for name, value in analysis.tensors.items():
            if value.parameters & contraction.parameters:
                axes = (k for k, axis in enumerate(value.axes) if any(a in atoms for s in resolve(axis) for a in s))
                found.setdefault(name, set()).update(axes)
    return found


@torch.no_grad()
def _zero(model: nn.Module, name: str, axes: set[int], plan: Plan, undo: Undo) -> None:
    layout = plan.structure.tensors.get(name)
    gone = {
        axis: ~kept_mask(extent, plan.kept)
        for axis, extent in (layout.axes if layout else {}).items()
        if axis in axes and names_in(extent) & set(plan.kept)
    }
    norm = next((norm for norm in plan.structure.weight_norms if norm.v == name), None)
    if norm is not None:
        gone.pop(norm.dim, None)  # g is zero there; v would be 0 / 0
    if not gone:
        return
    tensor = _tensor(model, name)
    masked = tensor.detach().clone()
    for axis, positions in gone.items():
        masked.movedim(axis, 0)[positions.to(masked.device)] = 0
    if norm is not None:
        g = _tensor(model, norm.g)
        set_data(g, g.detach() * row_norms(masked, norm.dim) / row_norms(tensor, norm.dim), g.grad, undo)
    set_data(tensor, masked, tensor.grad, undo)


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), leaf)
    return found
