"""Error curves of every hidden dimension from one pass, and the widths that a budget allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ispasp.api.job import Job
from ispasp.api.oneshot import collect, stops
from ispasp.api.task import with_sensitivities, with_task
from ispasp.budget import Budget, Curve, allocate, error_curve
from ispasp.budget.sample import sampled_energy
from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.readers import products
from ispasp.graph.tails import scale
from ispasp.graph.trace import Batch


def error_curves(job: Job, batches: Iterable[Batch], first: Batch) -> dict[str, Curve]:
    """Predicted error against kept units, without compensation, for every hidden dimension of the job.

    What the selector would choose at each width comes from the statistics of all batches, what that choice loses from
    a sample of positions of the first one.
    """
    energies = job.team.sum_tensors(_energies(job, first))
    found = with_sensitivities(job, collect(job, batches, job.data_needs), Edits())
    whole = {name: job.total(with_task(job, name, part, Edits())) for name, part in found.items()}
    return {name: error_curve(job.selector, part, energy=energies[name]) for name, part in whole.items()}


def _energies(job: Job, batch: Batch) -> dict[str, Tensor]:
    with job.team.together("the error curves"):
        found: dict[str, Tensor] = {}
        for reader, passage in stops(job, batch):
            arguments = passage.arguments(reader.number)
            factor = scale(passage.circuit.tails[reader.number], passage.fixed)
            for H, consumers in products(reader, sorted(reader.names), arguments, factor):
                for name, consumer in consumers.items():
                    E = sampled_energy(consumer, H, job.units[name])
                    found[name] = found[name] + E if name in found else E
    return found


def budget_widths(job: Job, curves: Mapping[str, Curve], budget: Budget, round_to: int | None = None) -> dict[str, int]:
    """How many units each hidden dimension keeps; dimensions that lose nothing are left out."""
    limit = budget.limit(job.survey.cost())
    counts = allocate(curves, lambda w: budget.count(job.survey.costs, w), limit, round_to=round_to)
    shared = job.team.same({name: torch.tensor(count) for name, count in counts.items()})
    return {name: int(count) for name, count in shared.items() if int(count) < job.units[name]}
