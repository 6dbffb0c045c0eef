"""Early-bird tickets: stop training when the units that would be kept no longer change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ispasp._finetune import finetune
from ispasp._survey import Survey, survey
from ispasp.engine.batches import first_in
from ispasp.engine.sites import units_along
from ispasp.errors import InputError
from ispasp.select import sum_by_unit
from ispasp.train.objective import inputs_of, labels_of, logits_of
from ispasp.train.recipe import Recipe, Sgd
from ispasp.types.dimension import names_in
from ispasp.types.plan import Plan
from ispasp_lab.procedures.scores import plan_by

_SGD = Sgd(lr=0.1, schedule="constant")


@dataclass(frozen=True, eq=False)
class EarlyBird:
    """The ticket: its plan, the epoch it was drawn at, and the largest distance among the last masks of each epoch.

    `found` says whether the masks have come to rest, rather than the epochs to an end.
    """

    plan: Plan
    epoch: int
    found: bool
    distances: tuple[float, ...] = field(default=())


class _AtRest(Exception):  # noqa: N818  # not an error
    """The masks no longer change."""


def early_bird(
    model: nn.Module,
    loader: Iterable[Any],
    keep: float,
    *,
    epochs: int = 30,
    recipe: Recipe = _SGD,
    penalty: float = 1e-4,
    window: int = 5,
    epsilon: float = 0.1,
    seed: int = 0,
    progress: bool = True,
) -> EarlyBird:
    """Train the model in place until the mask of its units is at rest, and return the plan of that mask.

    You, Li, Xu, Fu, Wang, Chen, Baraniuk, Wang, Lin (2020), Drawing Early-Bird Tickets: Toward More Efficient Training
    of Deep Networks. After every epoch the units with the largest BatchNorm weights stay, all layers in one ranking.
    The distance of two masks is the part of all units in which they differ. Training stops when no two of the last
    `window` masks are further apart than `epsilon`. The loss has `penalty` times the l1 norm of the BatchNorm weights,
    as in network slimming. `loader` yields (inputs, labels).

    Where we leave the paper: at least one unit of every hidden dimension stays, and residual streams stay whole.
    """
    found = survey(model, inputs_of(first_in(loader)))
    masks: deque[Tensor] = deque(maxlen=window)
    plans: list[Plan] = []
    distances: list[float] = []
    gammas_of(model, found)  # raises where no BatchNorm is
    gammas = [m.weight for m in model.modules() if isinstance(m, _BatchNorm) and m.weight is not None]

    def loss(output: Any, batch: Any) -> Tensor:
        task = functional.cross_entropy(logits_of(output), labels_of(batch))
        return task + penalty * torch.stack([gamma.abs().sum() for gamma in gammas]).sum()

    def look(now: nn.Module) -> float:
        plans.append(plan_by(found, gammas_of(now, found), keep, together=True))
        masks.append(mask_of(found, plans[-1]))
        distances.append(largest_distance(masks))
        if len(masks) == window and distances[-1] < epsilon:
            raise _AtRest
        return distances[-1]

    try:
        options: dict[str, Any] = {"evaluate": look, "seed": seed, "progress": progress}
        finetune(model, loader, epochs=epochs, recipe=recipe, loss=loss, **options)
    except _AtRest:
        return EarlyBird(plans[-1], len(plans), True, tuple(distances))
    return EarlyBird(plans[-1], len(plans), False, tuple(distances))


def gammas_of(model: nn.Module, found: Survey) -> dict[str, Tensor]:
    """|gamma| of the BatchNorms on each hidden dimension, by unit."""
    norms = {f"{path}.weight": m.weight for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
    scores = {}
    for d in found.dimensions:
        parts = [
            sum_by_unit(norms[name].detach().abs(), units_along(layout.axes[0], d.name), d.units)
            for name, layout in found.structure.tensors.items()
            if name in norms and 0 in layout.axes and d.name in names_in(layout.axes[0])
        ]
        if not parts:
            raise InputError(f"no BatchNorm follows what makes {d.name!r}: early-bird tickets rank its weights")
        scores[d.name] = torch.stack(parts).sum(0)
    return scores


def mask_of(found: Survey, plan: Plan) -> Tensor:
    """Which units stay, of all hidden dimensions one after the other. (units,)"""
    parts = []
    for d in found.dimensions:
        part = torch.zeros(d.units, dtype=torch.bool)
        part[list(plan.kept.get(d.name, range(d.units)))] = True
        parts.append(part)
    return torch.cat(parts)


def largest_distance(masks: Sequence[Tensor]) -> float:
    """The largest part of units in which two of the masks differ; 1 for a single mask.

    >>> a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    >>> largest_distance([a, a]), largest_distance([a, b, a]), largest_distance([a])
    (0.0, 0.5, 1.0)
    """
    pairs = [float((a != b).double().mean()) for a, b in combinations(masks, 2)]
    return max(pairs, default=1.0)
