"""From numbers per weight to scores per unit, and from scores to a plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ispasp._keep import widths
from ispasp._survey import Survey
from ispasp.engine.sites import units_along
from ispasp.errors import InputError
from ispasp.graph.analyse import owner
from ispasp.select import sum_by_unit
from ispasp.select.evidence import descending
from ispasp.types.dimension import names_in
from ispasp.types.plan import Plan

Scores = Mapping[str, Tensor]
"""Hidden dimension -> one number per unit; the largest stay."""


def sum_over_makers(found: Survey, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum the values of all weights that make each unit. Parameter -> its shape, hidden dimension -> (units,)

    >>> from torch import nn
    >>> from ispasp import survey
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sum_over_makers(survey(net, torch.ones(1, 2)), {name: torch.ones_like(p) for name, p in net.named_parameters()})
    {'0': tensor([2., 2., 2.], dtype=torch.float64)}
    """
    totals = {}
    for d in found.dimensions:
        totals[d.name] = torch.zeros(d.units, dtype=torch.float64)
        for name, layout in found.structure.tensors.items():
            if (owner(name) or name) not in d.producers or len(layout.shape) < 2:
                continue
            for axis, extent in layout.axes.items():
                if d.name in names_in(extent):
                    rows = values[name].detach().double().movedim(axis, 0).flatten(1).sum(1)
                    totals[d.name] += sum_by_unit(rows, units_along(extent, d.name), d.units)
    return totals


def plan_by(found: Survey, scores: Scores, keep: float, *, together: bool = False) -> Plan:
    """Keep the units of largest score in each hidden dimension; with `together` in one ranking, at least one of each.

    >>> from torch import nn
    >>> from ispasp import survey
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> scores = {"0": torch.tensor([1.0, 4.0]), "2": torch.tensor([3.0, 2.0])}
    >>> plan_by(survey(net, torch.ones(1, 2)), scores, 0.5).kept
    {'0': (1,), '2': (0,)}
    >>> plan_by(survey(net, torch.ones(1, 2)), {**scores, "2": torch.tensor([8.0, 9.0])}, 0.75, together=True).kept
    {'0': (1,)}
    """
    if not 0 < keep <= 1:
        raise InputError(f"keep={keep}: pass a fraction above 0 and at most 1")
    if not together:
        counts = widths(found.dimensions, keep).counts
        return found.plan({name: _largest(scores[name], count) for name, count in counts.items()})
    ranked = torch.cat([scores[d.name].double() for d in found.dimensions])
    best = {d.name: int(descending(scores[d.name].double())[0]) for d in found.dimensions}
    offset, must = 0, torch.zeros_like(ranked, dtype=torch.bool)
    for d in found.dimensions:
        must[offset + best[d.name]] = True
        offset += d.units
    order = descending(torch.where(must, torch.inf, ranked.clamp(max=torch.finfo(torch.float64).max)))
    stays = torch.zeros_like(must)
    stays[order[: max(int(must.sum()), round(keep * len(ranked)))]] = True
    parts = torch.split(stays, [d.units for d in found.dimensions])
    kept = {d.name: torch.nonzero(part).flatten().tolist() for d, part in zip(found.dimensions, parts, strict=True)}
    return found.plan(kept)


def _largest(scores: Tensor, count: int) -> list[int]:
    return sorted(descending(scores.double())[:count].tolist())
