"""`order="global"`: units of all hidden dimensions are ranked together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ispasp.api.job import Job
from ispasp.errors import InputError
from ispasp.select.ordering import descending
from ispasp.types import Selection, Statistics


def ranked_together(job: Job, found: Mapping[str, Statistics]) -> dict[str, Selection]:
    """Keep as many units in all as the widths ask for, wherever they are; at least one in every hidden dimension.

    Scores are divided by their l2 norm in each hidden dimension, as Michel et al. (2019) do for heads.
    """
    choices = {name: job.selector.select(job.total(statistics), job.units[name]) for name, statistics in found.items()}
    if not all(choice.scores for choice in choices.values()):
        raise InputError(
            f"method {job.selector.name!r} does not score units one by one, and order='global' ranks scores: choose "
            "'taylor', 'topk', 'l1', 'l2', 'fpgm' or 'slimming', or another order"
        )
    scores = {name: torch.tensor(choice.scores, dtype=torch.float64, device="cpu") for name, choice in choices.items()}
    scores = {name: s / s.norm() if float(s.norm()) > 0 else s for name, s in scores.items()}
    scores = job.team.same(scores)
    best = {name: int(descending(s)[0]) for name, s in scores.items()}  # none may vanish
    free = [(name, unit) for name, s in scores.items() for unit in range(len(s)) if unit != best[name]]
    values = torch.stack([scores[name][unit] for name, unit in free])
    spare = sum(job.counts[name] for name in found) - len(best)
    kept: dict[str, list[int]] = {name: [unit] for name, unit in best.items()}
    for at in descending(values)[:spare].tolist():
        kept[free[at][0]].append(free[at][1])
    return {name: replace(choices[name], kept=tuple(sorted(units))) for name, units in kept.items()}
