"""What a survey tells of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HiddenDimension:
    """An axis of units inside the network, made by producers and read by consumers (module paths).

    `channels` is the number of positions that one unit takes at its first consumer's input; `parameters` and `macs` are
    what one unit costs, with everything else dense.
    """

    name: str
    kind: str  # "neuron" | "filter" | "head"
    units: int
    channels: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    parameters: int
    macs: int
    stream: bool = False  # an axis on which producers are added: part of a residual stream


@dataclass(frozen=True)
class FrozenAxis:
    """Something that could not be pruned: the module that makes it, why, and the graph node that says so."""

    name: str
    reason: str
    node: str = ""

    def __str__(self) -> str:
        """One line."""
        return f"{self.name}: {self.reason}" + (f" ({self.node})" if self.node else "")


@dataclass(frozen=True)
class Cost:
    """Parameters and multiply-accumulates (for one example), before and after."""

    params: int
    macs: int
    dense_params: int
    dense_macs: int

    def __str__(self) -> str:
        """Both, with the fraction that is left."""
        return (
            f"parameters {self.dense_params:,} -> {self.params:,} ({self.params / max(self.dense_params, 1):.1%}), "
            f"MACs {self.dense_macs:,} -> {self.macs:,} ({self.macs / max(self.dense_macs, 1):.1%})"
        )
