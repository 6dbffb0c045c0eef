"""The plans that made a model what it is, kept with the model itself.

A private attribute: `copy.deepcopy` takes it along, and `state_dict`, `repr` and torch.export do not see it.
"""

from __future__ import annotations

from functools import reduce

from torch import nn

from ispasp.surgery.remove import Undo
from ispasp.types.plan import Plan

_PLANS = "_ispasp_plans"


def plans_of(model: nn.Module) -> tuple[Plan, ...]:
    """Every plan that was applied to the model, the first one first."""
    found: tuple[Plan, ...] = vars(model).get(_PLANS, ())
    return found


def remember_(model: nn.Module, plan: Plan, undo: Undo) -> None:
    """Note that the plan was applied to the model."""
    record_(model, (*plans_of(model), plan), undo)


def record_(model: nn.Module, plans: tuple[Plan, ...], undo: Undo) -> None:
    """Put these plans in the place of the ones on record."""
    before = plans_of(model)

    def restore() -> None:
        vars(model).pop(_PLANS, None)
        if before:
            vars(model)[_PLANS] = before

    undo(restore)
    vars(model)[_PLANS] = plans


def plan_from_dense(model: nn.Module) -> Plan | None:
    """All plans of the model as one, from the dense model to what it is now; None if it was never pruned."""
    plans = plans_of(model)
    return reduce(Plan.then, plans) if plans else None
