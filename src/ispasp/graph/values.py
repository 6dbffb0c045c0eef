"""What the tracker knows of each value in the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ispasp.graph.atoms import UNKNOWN, Axis, Reason, freeze, new_axis
from ispasp.graph.ops import Operand


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor: its axes, and the parameters it was computed from if from nothing else."""

    axes: tuple[Axis, ...]
    parameters: frozenset[str] = frozenset()

    @property
    def is_parameter(self) -> bool:
        """Whether it depends on parameters and buffers only."""
        return bool(self.parameters)

    def freeze(self, reason: Reason) -> Value:
        """Freeze every axis; returns the value."""
        for axis in self.axes:
            freeze(axis, reason)
        return self


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Sizes of a fake tensor, UNKNOWN where they depend on the data; None for what is not a tensor."""
    if not hasattr(value, "shape"):
        return None
    return tuple(size if isinstance(size, int) else UNKNOWN for size in value.shape)


def fresh(node: fx.Node, reason: Reason) -> Any:
    """A value (or a list of values) of the node's shape with frozen axes."""
    return _fresh(node.meta.get("val"), reason)


def _fresh(example: Any, reason: Reason) -> Any:
    if isinstance(example, (list, tuple)):
        return [_fresh(item, reason) for item in example]
    shape = shape_of(example)
    return None if shape is None else Value(tuple(new_axis(size, reason) for size in shape))


@dataclass(frozen=True, eq=False)
class Contraction:
    """A node that sums over an axis with a parameter: where a hidden dimension is read, and another made.

    `data` is the argument that holds the activations; `dims` their contracted dimensions; `contracted` and
    `made` are the parameter's axes on either side.
    """

    node: fx.Node
    kind: str  # "linear" | "conv" | "matmul"
    data: Operand
    dims: tuple[int, ...]
    contracted: tuple[Axis, ...]
    made: tuple[Axis, ...]
    parameters: frozenset[str]
