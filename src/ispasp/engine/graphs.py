"""Traced graphs, ready to run: one for every kind of batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ispasp.engine.batches import signature
from ispasp.errors import InputError
from ispasp.graph.analyse import Analysis, matches, retracked
from ispasp.graph.ops import Tail, output_channels, tail
from ispasp.graph.trace import Batch, Source, Trace, call_arguments, trace, writes

Values = dict[fx.Node, Any]


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """The traced graph of batches of one shape. `contractions` maps the numbers of the analysis to its nodes."""

    trace: Trace
    contractions: Mapping[int, fx.Node]

    @classmethod
    def of(cls, analysis: Analysis) -> TracedGraph:
        return cls(analysis.trace, {number: c.node for number, c in enumerate(analysis.tracker.contractions)})

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return [node for node in self.trace.graph.nodes if node.op != "placeholder"]

    @cached_property
    def sources(self) -> dict[fx.Node, Source]:
        return {node: self.trace.sources[node.name] for node in self.trace.graph.find_nodes(op="placeholder")}

    @cached_property
    def placeholders(self) -> dict[str, fx.Node]:
        """The node of each parameter, buffer and constant."""
        return {source.name: node for node, source in self.sources.items() if source.kind != "input"}

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        return {node: k for k, node in enumerate(self.nodes)}

    @cached_property
    def numbers(self) -> dict[fx.Node, list[int]]:
        """Contractions of a node; a bilinear layer has two."""
        found: dict[fx.Node, list[int]] = {}
        for number, node in self.contractions.items():
            found.setdefault(node, []).append(number)
        return found

    @cached_property
    def last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Values that can be freed after a node."""
        found: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(self.trace.graph.nodes):
            for used in (node, *node.all_input_nodes):
                if used not in seen:
                    seen.add(used)
                    found.setdefault(node, []).append(used)
        return found

    @cached_property
    def tails(self) -> dict[int, Tail]:
        """The BatchNorm, factors and skip connection after each contraction."""
        return {
            number: Tail() if (channel := output_channels(node)) is None else tail(node, channel, self.trace.sources)
            for number, node in self.contractions.items()
        }

    @cached_property
    def writes(self) -> dict[fx.Node, list[fx.Node]]:
        """In-place ops that change the memory of a node's value, or of one it is a view of."""
        return writes(self.trace.graph)

    def parameters(self, tensors: Mapping[str, Tensor]) -> Values:
        fixed = ((node, source) for node, source in self.sources.items() if source.kind != "input")
        return {n: (self.trace.constants if s.kind == "constant" else tensors)[s.name] for n, s in fixed}

    def inputs(self, batch: Batch, tensors: Mapping[str, Tensor]) -> Values:
        """Values of the inputs, and copies of buffers and constants that ops write into."""
        leaves = iter(pytree.tree_leaves(call_arguments(batch)))
        known, values = {**self.trace.constants, **tensors}, Values()
        for node, source in self.sources.items():
            if source.kind == "input":
                given = next(leaves)
                value = self.trace.laid_out(given)
                if value is given and isinstance(given, Tensor) and not self.trace.any_layout:
                    value = given.contiguous()  # as the trace saw it
                values[node] = value.clone() if value is given and node in self.writes else value
            elif node in self.writes and source.name in known:
                values[node] = known[source.name].detach().clone()
        return values


class TracedGraphs:
    """One traced graph for every kind of batch, the analysed contractions found again in each.

    torch.export fixes shapes, and a forward may branch on them, so a smaller last batch or a longer sequence has its
    own trace.
    """

    def __init__(self, model: nn.Module, analysis: Analysis, example: Batch, also: Sequence[Batch] = ()) -> None:
        """Start with the analysed traces: of the example, and of batches of other kinds."""
        self._model = model
        self._analysis = analysis
        self.first = TracedGraph.of(analysis)
        self._known: dict[Any, TracedGraph] = {signature(example): self.first}
        self.kinds: list[tuple[Batch, TracedGraph]] = []  # one batch of each kind but the example's
        for batch, walk in zip(also, analysis.others, strict=bool(also)):  # a trial needs the example only
            self._add(batch, TracedGraph(walk.trace, matches(analysis.tracker, walk)))

    def of(self, batch: Batch) -> TracedGraph:
        """The graph for batches of this kind, traced if it is new."""
        key = signature(batch)
        if key not in self._known:
            traced = trace(self._model, batch)
            old, new = self._analysis.tracker, retracked(self._model, traced)
            found = matches(old, new)
            if not len(found) == len(old.contractions) == len(new.contractions):
                raise InputError(_another_path(batch))
            self._add(batch, TracedGraph(traced, found))
        return self._known[key]

    @property
    def every(self) -> list[TracedGraph]:
        return [self.first, *(graph for _, graph in self.kinds)]

    def _add(self, batch: Batch, graph: TracedGraph) -> None:
        met = [graph.order[node] for _, node in sorted(graph.contractions.items()) if node in graph.order]
        if met != sorted(met):  # all batches go through the layers in one order
            raise InputError(_another_path(batch))
        self._known[signature(batch)] = graph
        self.kinds.append((batch, graph))


def _another_path(batch: Batch) -> str:
    return f"a batch of {signature(batch)[1:]} takes another path through the model than the first: use one shape"


def same_path(a: Trace, b: Trace) -> bool:
    """Whether two traces have the same ops on the same tensors, up to numbers such as the sizes of a view."""

    def described(node: fx.Node, traced: Trace) -> Any:
        source = traced.sources.get(node.name) if node.op == "placeholder" else None
        return node.op, source or str(node.target), [used.name for used in node.all_input_nodes]

    return [described(node, a) for node in a.graph.nodes] == [described(node, b) for node in b.graph.nodes]


def caller(node: fx.Node, model: nn.Module) -> nn.Module | None:
    """The module whose own forward a node was traced in."""
    paths = [path.partition("@")[0] for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return model.get_submodule(paths[-1]) if paths else None
