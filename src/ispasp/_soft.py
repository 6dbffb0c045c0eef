"""Soft filter pruning: units that are zeroed after every epoch, trained on, and removed at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ispasp._apply import apply_
from ispasp._keep import widths
from ispasp._survey import Survey, survey
from ispasp.engine.sites import units_along
from ispasp.errors import InputError
from ispasp.graph.analyse import owner
from ispasp.graph.state import plain
from ispasp.graph.trace import Batch, evaluating
from ispasp.select import sum_by_unit
from ispasp.select.evidence import descending
from ispasp.surgery.remove import tensor_of
from ispasp.train.loop import NO_SCORE
from ispasp.train.recipe import Soft
from ispasp.types.dimension import Extent, kept_mask, names_in
from ispasp.types.plan import Plan


def soft_units(soft: Soft, model: nn.Module, batch: Batch) -> SoftUnits:
    """Find the units of a model that shrink."""
    found = survey(model, batch)
    skip = (soft.skip,) if isinstance(soft.skip, str) else soft.skip
    counts = dict(widths(found.dimensions, soft.keep, skip).counts)
    if not counts:
        raise InputError(f"{soft} removes nothing: pass a smaller keep, or skip less")
    structure = found.plan(counts).structure
    makers = {path for d in found.dimensions if d.name in counts for path in d.producers}
    computed = {*structure.folded, *(owner(norm.v) for norm in structure.weight_norms)} & makers
    if computed:
        raise InputError(
            f"{min(computed)!r} computes its weight (weight_norm, spectral_norm), so its units cannot be set to zero: "
            "remove the parametrization, or skip what it makes"
        )
    return SoftUnits(found, counts, batch, float(soft.norm))


@dataclass(frozen=True, eq=False)
class SoftUnits:
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
        """Zero the units, then evaluate."""

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
