"""What a plan saves, counted without applying it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from ispasp.graph.analyse import Analysis
from ispasp.graph.atoms import UNKNOWN
from ispasp.graph.trace import Batch, call_arguments
from ispasp.graph.values import shape_of
from ispasp.types.dimension import Cost
from ispasp.types.layout import Extent, Kept, full_length, kept_length


@dataclass(frozen=True)
class CostModel:
    """Parameters as shapes, multiply-accumulates as products of axes: both as functions of the kept units."""

    parameters: tuple[tuple[int, tuple[Extent, ...]], ...]  # factor x product of extents, one for each tensor
    products: tuple[tuple[int, tuple[Extent, ...]], ...]
    examples: int
    folded: tuple[tuple[int, frozenset[str]], ...] = ()  # parameters that go with the first unit of these dimensions

    def params(self, kept: Kept) -> int:
        """Number of parameters that stay."""
        extra = sum(count for count, names in self.folded if not names & set(kept))
        return _total(self.parameters, kept) + extra

    def macs(self, kept: Kept) -> int:
        """Multiply-accumulates for one example."""
        return _total(self.products, kept) // self.examples

    def cost(self, kept: Kept) -> Cost:
        """Before and after."""
        return Cost(self.params(kept), self.macs(kept), self.params({}), self.macs({}))


def _total(rows: Iterable[tuple[int, tuple[Extent, ...]]], kept: Kept) -> int:
    return sum(factor * math.prod(kept_length(extent, kept) for extent in extents) for factor, extents in rows)


def cost_model(analysis: Analysis, model: nn.Module, batch: Batch) -> CostModel:
    """Collect every parameter and every product of the graph."""
    parameters = []
    for name, parameter in model.named_parameters():  # tied parameters count once
        if name in analysis.tensors:
            parameters.append(_row([analysis.extent(axis) for axis in analysis.tensors[name].axes]))
        else:
            parameters.append((parameter.numel(), ()))
    products = [
        _row(extents)
        for _, axes in analysis.tracker.products
        if (extents := [analysis.extent(axis) for axis in axes]) and all(_known(e) for e in extents)
    ]
    return CostModel(tuple(parameters), tuple(products), _examples(batch))


def _known(extent: Extent) -> bool:
    return all(size != UNKNOWN for segment in extent for _, size in segment)


def _row(extents: list[Extent]) -> tuple[int, tuple[Extent, ...]]:
    """Axes without units become one factor."""
    factor = math.prod(full_length(e) for e in extents if not _named(e))
    return factor, tuple(e for e in extents if _named(e))


def _named(extent: Extent) -> bool:
    return any(name is not None for segment in extent for name, _ in segment)


def _examples(batch: Batch) -> int:
    args, kwargs = call_arguments(batch)
    shapes = [shape_of(value) for value in (*args, *kwargs.values())]
    return next((shape[0] for shape in shapes if shape), 1)


def unit_cost(model: CostModel, units: Mapping[str, int], name: str) -> tuple[int, int]:
    """Parameters and MACs that go with one unit of a dimension, everything else dense."""
    if units[name] < 2:
        return 0, 0
    kept = {name: range(units[name] - 1)}
    return model.params({}) - model.params(kept), model.macs({}) - model.macs(kept)
