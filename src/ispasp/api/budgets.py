"""Widths for a budget: error curves from one pass, then the best allocation."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ispasp.api.job import Job
from ispasp.api.oneshot import collect
from ispasp.budget import Budget, allocate, error_curve
from ispasp.graph.trace import Batch


def budget_widths(job: Job, batches: Iterable[Batch], budget: Budget, round_to: int | None) -> dict[str, int]:
    """How many units each hidden dimension keeps, dimensions that lose nothing left out."""
    needs = set(job.selector.needs) - {"producers"}
    found = collect(job, batches, needs | {"gram"})
    curves = {name: error_curve(job.selector, job.team.sum(statistics)) for name, statistics in found.items()}
    limit = budget.limit(job.survey.cost())
    counts = allocate(curves, lambda w: budget.count(job.survey.costs, w), limit, round_to=round_to)
    shared = job.team.same({name: torch.tensor(count) for name, count in counts.items()})
    return {name: int(count) for name, count in shared.items() if int(count) < job.units[name]}
