"""The dense network with units masked where they are read: what surgery has to equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ispasp.graph.analyse import Analysis
from ispasp.graph.atoms import resolve
from ispasp.graph.trace import Batch, evaluating, placeholders
from ispasp.graph.values import Contraction, Value
from ispasp.types.layout import Extent, Kept, kept_mask, names_in

Masks = dict[fx.Node, list[tuple[str, int, Tensor]]]  # node -> argument, dimension, mask of positions


def masked_output(analysis: Analysis, model: nn.Module, batch: Batch, kept: Kept) -> list[Tensor]:
    """Tensors that the dense model returns when removed units are zero at the input of every consumer."""
    runner = _Masked(analysis.trace.module, _masks(analysis, kept))
    values = placeholders(analysis.trace, model, batch)
    order = analysis.trace.graph.find_nodes(op="placeholder")
    with evaluating(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tensors_in(runner.run(*(values[node.name] for node in order)))


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors of a nested output, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _masks(analysis: Analysis, kept: Kept) -> Masks:
    masks: Masks = {}
    for contraction in analysis.tracker.contractions:
        for dim, extent in _read_extents(analysis, contraction):
            if names_in(extent) & set(kept):
                masks.setdefault(contraction.node, []).append((contraction.data, dim, kept_mask(extent, kept)))
    return masks


def _read_extents(analysis: Analysis, contraction: Contraction) -> list[tuple[int, Extent]]:
    """Extents of the contracted dimensions of the activations; what is not contracted there is not masked there."""
    argument = _fetch(contraction, contraction.node.args, contraction.node.kwargs)
    value = analysis.tracker.values[argument]
    assert isinstance(value, Value)  # noqa: S101  # the rule put it there
    read = {analysis.names.get(atom) for axis in contraction.contracted for s in resolve(axis) for atom in s} - {None}
    found = []
    for dim in contraction.dims:
        extent = analysis.extent(value.axes[dim])
        found.append((dim, tuple(tuple((n if n in read else None, size) for n, size in seg) for seg in extent)))
    return found


def _position(node: fx.Node, name: str) -> int:
    schema = node.target._schema  # type: ignore[union-attr]
    return next(i for i, argument in enumerate(schema.arguments) if argument.name == name)


def _fetch(contraction: Contraction, args: Any, kwargs: Any) -> Any:
    name, _, index = contraction.data.partition(".")
    position = _position(contraction.node, name)
    value = args[position] if position < len(args) else kwargs[name]
    return value[int(index)] if index else value


class _Masked(fx.Interpreter):
    """Runs the graph, multiplying the activations that consumers read with masks."""

    def __init__(self, module: fx.GraphModule, masks: Masks) -> None:
        super().__init__(module)
        self._masks = masks

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._masks:
            return super().run_node(n)
        given, named = self.fetch_args_kwargs_from_env(n)
        args, kwargs = list(given), dict(named)
        for data, dim, mask in self._masks[n]:
            name, _, index = data.partition(".")
            position = _position(n, name)
            holder: Any = args if position < len(args) else kwargs
            key: Any = position if position < len(args) else name
            if index:
                holder[key] = list(holder[key])
                holder, key = holder[key], int(index)
            holder[key] = _apply(holder[key], dim, mask)
        return self.call_function(n.target, tuple(args), kwargs)


def _apply(x: Tensor, dim: int, mask: Tensor) -> Tensor:
    shape = [1] * x.ndim
    shape[dim] = len(mask)
    return x.masked_fill(~mask.to(x.device).reshape(shape), 0)  # also clears NaN and Inf, which removal does
