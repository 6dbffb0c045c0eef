"""Circuits: the graph of a call, run node by node.

A `Circuit` is the traced graph of batches of one shape. A `Passage` is one batch on its way through it: it can be
stopped in front of any node, asked what that node is about to read, and sent on. With a dense twin the same batch goes
through the network as it was, side by side with the one that is being pruned.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ispasp.errors import InputError, TraceError
from ispasp.graph.analyse import Analysis
from ispasp.graph.ops import Operand, output_channels
from ispasp.graph.tails import Tail, tail
from ispasp.graph.trace import Batch, Trace, call_arguments

Values = dict[fx.Node, Any]
_ASSERTIONS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg)
_MAY_RETURN_INPUT = (operator.getitem, torch.ops.aten.dropout.default)  # without saying so in a schema


@dataclass(frozen=True, eq=False)
class Circuit:
    """A traced graph, and in it the nodes that read or make hidden dimensions, by their number in the analysis."""

    trace: Trace
    contractions: Mapping[int, fx.Node]

    @classmethod
    def of(cls, analysis: Analysis) -> Circuit:
        """The graph that was analysed."""
        return cls(analysis.trace, {number: c.node for number, c in enumerate(analysis.tracker.contractions)})

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        """Position of every node that is executed."""
        return {node: k for k, node in enumerate(n for n in self.trace.graph.nodes if n.op != "placeholder")}

    @cached_property
    def numbers(self) -> dict[fx.Node, list[int]]:
        """Contractions of a node; a bilinear form is two in one node."""
        found: dict[fx.Node, list[int]] = {}
        for number, node in self.contractions.items():
            found.setdefault(node, []).append(number)
        return found

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The nodes that are executed, in order."""
        return list(self.order)

    @cached_property
    def dying(self) -> dict[fx.Node, list[fx.Node]]:
        """Values that nobody needs after a node."""
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
        """What follows each contraction."""
        return {
            number: Tail() if (channel := output_channels(node)) is None else tail(node, channel, self.trace.sources)
            for number, node in self.contractions.items()
        }

    @cached_property
    def mutating(self) -> bool:
        """Whether some op changes its argument: then twins must not share memory."""
        return any(mutates(node) for node in self.order)

    @cached_property
    def writes(self) -> dict[fx.Node, list[fx.Node]]:
        """Ops that change the memory of a node's value, or of one it is a view of."""
        if not self.mutating:
            return {}
        memory: dict[fx.Node, fx.Node] = {}  # node -> the one whose memory its value lies in
        written: dict[fx.Node, list[fx.Node]] = {}
        for node in self.trace.graph.nodes:
            memory[node] = next((memory[n] for n in _shared(node)), node)
            if mutates(node):
                written.setdefault(memory[node], []).append(node)
        return {node: written[at] for node, at in memory.items() if at in written}

    def parameters(self, tensors: Mapping[str, Tensor]) -> Values:
        """Values of all placeholders that are not inputs."""
        values: Values = {}
        for node in self.trace.graph.find_nodes(op="placeholder"):
            source = self.trace.sources[node.name]
            if source.kind == "constant":
                values[node] = self.trace.constants[source.name]
            elif source.kind != "input":
                values[node] = tensors[source.name]
        return values

    def written(self, tensors: Mapping[str, Tensor]) -> Values:
        """Copies of buffers and constants that ops write into, such as moving averages: each passage has its own."""
        nodes = [node for node in self.trace.graph.find_nodes(op="placeholder") if node in self.writes]
        names = {node: self.trace.sources[node.name].name for node in nodes}
        known = {**self.trace.constants, **tensors}
        return {node: known[name].detach().clone() for node, name in names.items() if name in known}

    def inputs(self, batch: Batch) -> Values:
        """Values of the placeholders that are inputs."""
        leaves = iter(pytree.tree_leaves(call_arguments(batch)))
        nodes = self.trace.graph.find_nodes(op="placeholder")
        values = {node: next(leaves) for node in nodes if self.trace.sources[node.name].kind == "input"}
        return {node: value.clone() if self._copies(node, value) else value for node, value in values.items()}

    def _copies(self, node: fx.Node, value: Any) -> bool:
        """Whether an input is copied: the graph writes into it, or its memory is laid out unlike in the trace."""
        return node in self.writes or (isinstance(value, Tensor) and not value.is_contiguous())


def caller(node: fx.Node, model: nn.Module) -> nn.Module | None:
    """The module in whose own forward a node was traced."""
    paths = [path.partition("@")[0] for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return model.get_submodule(paths[-1]) if paths else None


@dataclass(frozen=True, eq=False)
class Cut:
    """Positions that stay on one axis of the activations that a contraction reads."""

    data: Operand
    dim: int
    stays: Tensor  # bool (positions,)


@dataclass(eq=False)
class Edits:
    """How the pruned network differs from the dense one: what consumers do not read, and new values.

    `cuts[number]`: what contraction `number` still reads.
    `tensors`: new values of parameters and buffers by name, in the dense shape. `biases`: for a contraction that has no
    bias in the graph.
    """

    cuts: dict[int, list[Cut]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def execute(module: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run one node."""
    if node.op == "get_attr":
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value
    if node.op == "output":
        return args[0]
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if node.target not in _ASSERTIONS:
            raise TraceError(
                f"the traced graph fails at {node.name} ({type(error).__name__}: {str(error)[:300]}): check that the "
                "model runs on every batch, and does the same on every call"
            ) from error
        raise InputError(
            f"a batch takes another way through the model than the first one ({error}): its forward branches on the "
            "values of tensors; calibrate with batches that go the same way"
        ) from error


def mutates(node: fx.Node) -> bool:
    """Whether an op changes one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _shared(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory a node returns, or may return: views and changes in place."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    shared = [arg for arg, a in zip(node.args, arguments, strict=False) if a.alias_info is not None]
    shared += node.args[:1] if node.target in _MAY_RETURN_INPUT else []
    return [arg for arg in shared if isinstance(arg, fx.Node)]


def copied(values: Values) -> Values:
    """The same values in memory of their own; what shared memory shares it again."""
    storages: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(storages[storage.data_ptr()], value.storage_offset(), value.shape, value.stride())

    return {node: pytree.tree_map(copy, value) for node, value in values.items()}


def bytes_in(values: Values) -> int:
    """Memory that these values take, shared memory counted once."""
    storages = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for value in values.values()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    }
    return sum(storages.values())
