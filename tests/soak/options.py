"""Random options of `prune`, of those that go together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ispasp
from ispasp.select import ISpaSP
from soak.case import Case

SCALING = ("thinet", "gfs-local")  # methods with factors of their own: weights change even without compensation
SCORING = ("taylor", "topk", "l1", "l2", "fpgm", "slimming")  # methods that order="global" takes


def squares(output: Any, batch: Any) -> Tensor:
    """A task loss that needs no labels."""
    leaves = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum((leaf.float().square().mean() for leaf in leaves), torch.zeros(()))


def random_options(case: Case, plain: float = 0.4) -> dict[str, Any]:
    """Options for `prune`; with probability `plain` without compensation, for which there is the strictest oracle."""
    order = case.pick("sequential", "sequential", "oneshot", "global")
    method = case.pick(*ispasp.methods(), "minibatches") if order != "global" else case.pick(*SCORING)
    options: dict[str, Any] = {
        "method": ISpaSP(minibatches=True) if method == "minibatches" else method,
        "compensate": None if case.chance(plain) else case.pick("local", "dense"),
        "order": order,
        "scope": case.pick("blocks", "all"),
        "loss": squares,
        "progress": False,
    }
    if case.chance(0.2) and options["order"] != "global":
        options["round_to"] = case.pick(1, 2, 4, 8)
    if case.chance(0.1):
        options["recalibrate"] = True
    if case.chance(0.15):
        options["memory"] = case.pick(1, 10_000)
    if case.chance(0.1) and options["compensate"] == "dense":
        options["refit"] = "all"
    if case.chance(0.1):
        options["curves"] = True
    if case.chance(0.1):
        options["kinds"] = case.pick(("neuron",), ("filter", "head"), ("neuron", "filter"))
    case.options.update({name: value for name, value in options.items() if name not in ("loss", "progress")})
    return options


def random_keep(case: Case, survey: ispasp.Survey, options: dict[str, Any]) -> Any:
    """A fraction, a number, a mapping, units or a budget."""
    kind = case.pick("fraction", "fraction", "number", "mapping", "units", "budget")
    kind = "fraction" if kind == "budget" and options["order"] == "global" else kind
    smallest = min(d.units for d in survey.dimensions)
    keep: Any = round(case.rng.uniform(0.05, 1.0), 3)
    if kind == "number":
        keep = case.rng.randint(1, smallest)
    elif kind == "mapping":
        names = [d.name for d in survey.dimensions if case.chance(0.6)] or ["*"]
        keep = {name: case.pick(0.25, 0.5, 0.75, 1) for name in names}
    elif kind == "units":
        keep = {d.name: random_units(case, d.units) for d in survey.dimensions if case.chance(0.7)} or 0.5
    elif kind == "budget":
        keep = case.pick(ispasp.Macs, ispasp.Params)(round(case.rng.uniform(0.2, 0.95), 3))
    case.options["keep"] = keep
    return keep


def random_units(case: Case, units: int) -> list[int]:
    return sorted(case.rng.sample(range(units), case.rng.randint(1, units)))
