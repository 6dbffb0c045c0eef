"""The weights that make a hidden dimension, as selectors see them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from ispasp.calibrate.circuit import execute
from ispasp.calibrate.readers import units_along
from ispasp.graph.analyse import Analysis, owner
from ispasp.graph.ops import output_channels
from ispasp.graph.tails import tail
from ispasp.graph.values import Contraction, Value
from ispasp.types import Producer
from ispasp.types.layout import names_in


def producers(analysis: Analysis, name: str, tensors: Mapping[str, Tensor]) -> tuple[Producer, ...]:
    """Every layer that makes the hidden dimension: one row of weights for each channel."""
    found = []
    for contraction in analysis.tracker.contractions:
        made = {n for axis in contraction.made for n in names_in(analysis.extent(axis))}
        if name in made:
            producer = _producer(analysis, contraction, name, tensors)
            if producer is not None:
                found.append(producer)
    return tuple(found) or _tables(analysis, name, tensors)


def _tables(analysis: Analysis, name: str, tensors: Mapping[str, Tensor]) -> tuple[Producer, ...]:
    """The embeddings that make a hidden dimension which no product makes."""
    (paths,) = (item.producers for item in analysis.found if item.name == name)
    in_products = {parameter for contraction in analysis.tracker.contractions for parameter in contraction.parameters}
    found = []
    for parameter, value in analysis.tensors.items():
        if parameter in in_products or (owner(parameter) or parameter) not in paths or len(value.axes) < 2:
            continue
        for dim, axis in enumerate(value.axes):
            extent = analysis.extent(axis)
            if name in names_in(extent):
                rows = tensors[parameter].detach().movedim(dim, 0).flatten(1)
                found.append(Producer(rows, units_along(extent, name).to(rows.device)))
    return tuple(found)


def _producer(
    analysis: Analysis, contraction: Contraction, name: str, tensors: Mapping[str, Tensor]
) -> Producer | None:
    for node in contraction.node.all_input_nodes:
        value = analysis.tracker.values.get(node)
        if not isinstance(value, Value) or value.parameters != contraction.parameters or len(value.axes) < 2:
            continue
        for dim, axis in enumerate(value.axes):
            extent = analysis.extent(axis)
            if name in names_in(extent):
                weight = _evaluate(analysis, node, tensors).detach()
                rows = weight.movedim(dim, 0).flatten(1)
                units = units_along(extent, name).to(rows.device)
                return Producer(rows, units, _gamma(analysis, contraction, tensors, len(rows)))
    return None


def _evaluate(analysis: Analysis, node: fx.Node, tensors: Mapping[str, Tensor]) -> Tensor:
    """The value of a node that depends on parameters only, such as a normalised weight."""
    if node.op == "placeholder":
        return tensors[analysis.trace.sources[node.name].name]

    def look_up(n: fx.Node) -> Tensor:
        return _evaluate(analysis, n, tensors)

    args, kwargs = fx.node.map_arg(node.args, look_up), fx.node.map_arg(node.kwargs, look_up)
    value: Tensor = execute(analysis.trace.module, node, args, kwargs)
    return value


def _gamma(analysis: Analysis, contraction: Contraction, tensors: Mapping[str, Tensor], channels: int) -> Tensor | None:
    """Weight of the BatchNorm right after the layer."""
    channel = output_channels(contraction.node)
    if channel is None:
        return None
    norm = tail(contraction.node, channel, analysis.trace.sources).norm
    if norm is None or not isinstance(norm.args[1], fx.Node) or norm.args[1].op != "placeholder":
        return None
    gamma = tensors[analysis.trace.sources[norm.args[1].name].name]
    return gamma.detach() if len(gamma) == channels else None
