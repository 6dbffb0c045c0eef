"""Budgets: how wide every hidden dimension may be when the whole network has a limit."""

from ispasp.budget.allocate import allocate
from ispasp.budget.curve import Curve, error_curve
from ispasp.budget.latency import Latency
from ispasp.budget.limits import Budget, Macs, Params

__all__ = ["Budget", "Curve", "Latency", "Macs", "Params", "allocate", "error_curve"]
