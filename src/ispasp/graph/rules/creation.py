"""Ops that make tensors out of nothing: their sizes are written in the forward, so their axes are frozen."""

from __future__ import annotations

from typing import Any

from torch import fx

from ispasp.graph.atoms import Reason
from ispasp.graph.rules.pointwise import overloads
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import fresh

MAKERS = """
arange zeros ones full empty eye linspace scalar_tensor rand randn randint new_zeros new_ones new_full new_empty
tril_indices triu_indices hann_window
""".split()


@rule(*overloads(MAKERS))
def made(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    """A tensor of fixed size."""
    return fresh(node, Reason("has a size written in the forward", node.name))
