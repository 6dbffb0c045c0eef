"""Ops that make tensors out of nothing.

Where all positions hold the same number, any of them may go: surgery then has to correct the size that the forward
reads, which it finds by trial. Where they differ (arange), the axes are frozen.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ispasp.graph.atoms import Reason, new_axis
from ispasp.graph.rules.pointwise import overloads
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import Value, fresh

UNIFORM = "zeros ones full new_zeros new_ones new_full".split()
MAKERS = """
arange empty eye linspace scalar_tensor rand randn randint new_empty tril_indices triu_indices hann_window
""".split()


@rule(*overloads(UNIFORM))
def uniform(t: Tracker, node: fx.Node, **arguments: Any) -> Value:
    """A tensor of one number."""
    return Value(tuple(new_axis(size) for size in t.shape(node)))


@rule(*overloads(MAKERS))
def made(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    """A tensor of fixed size."""
    return fresh(node, Reason("has a size written in the forward", node.name))
