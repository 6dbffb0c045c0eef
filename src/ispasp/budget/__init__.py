"""Budgets: how wide every hidden dimension may be when the whole network has a limit."""

from ispasp.budget.allocate import allocate
from ispasp.budget.curve import Curve, error_curve
from ispasp.budget.latency import Latency
from ispasp.budget.limits import Budget, Macs, Params
from ispasp.budget.search import WidthProblem, register_search

__all__ = ["Budget", "Curve", "Latency", "Macs", "Params", "WidthProblem", "allocate", "error_curve", "register_search"]
