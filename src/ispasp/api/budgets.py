"""Error curves of every hidden dimension from one pass, and the widths that a budget allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import dropwhile

import torch
from torch import Tensor

from ispasp.api.job import Job
from ispasp.api.oneshot import collect, stops
from ispasp.api.task import with_sensitivities, with_task
from ispasp.budget import Budget, Curve, Params, allocate, error_curve
from ispasp.budget.sample import sampled_energy
from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.readers import products
from ispasp.graph.tails import scale
from ispasp.graph.trace import Batch
from ispasp.types.layout import Extent, kept_length


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


def _new_biases(job: Job) -> list[Extent]:
    """The outputs of every layer that may gain a bias by compensation: they count as well."""
    analysis, found = job.survey.analysis, []
    behind = dropwhile(lambda reader: not reader.names, job.stations)  # nothing is lost before the first consumer
    for reader in behind if job.compensate else ():
        if job.slot(reader).into == "new bias":
            (made,) = reader.contraction.made
            found.append(analysis.extent(made))
    return found


def budget_widths(job: Job, curves: Mapping[str, Curve], budget: Budget, round_to: int | None = None) -> dict[str, int]:
    """How many units each hidden dimension keeps; dimensions that lose nothing are left out."""
    limit = budget.limit(job.survey.cost())
    if budget.count(job.survey.costs, {}) <= limit:
        return {}
    gained = _new_biases(job) if isinstance(budget, Params) else []

    def count(widths: Mapping[str, int]) -> int:
        kept = {name: range(width) for name, width in widths.items()}
        return budget.count(job.survey.costs, widths) + sum(kept_length(extent, kept) for extent in gained)

    counts = allocate(curves, count, limit, round_to=round_to)
    shared = job.team.same({name: torch.tensor(count, device="cpu") for name, count in counts.items()})
    return {name: int(count) for name, count in shared.items() if int(count) < job.units[name]}
