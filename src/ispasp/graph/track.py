"""Walk the graph and apply the rule of each op: every tensor becomes a `Value`, its axes made of atoms."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ispasp.errors import InputError
from ispasp.graph.atoms import UNKNOWN, Axis, Reason, freeze, length, new_axis, unite
from ispasp.graph.ops import Operand, given_to, overloads
from ispasp.graph.trace import Trace, mutates
from ispasp.types.dimension import WeightNorm

Rule = Callable[..., Any]
Data = tuple[Operand, Sequence[int]]  # an argument of an op, and the dimensions of it that are contracted
RULES: dict[Any, Rule] = {}

_CHECKS = ("_assert_", "sym_constrain_range")  # ops that only check their arguments
_CONSTANT = "belongs to a constant in the forward"


def rule(ops: str) -> Callable[[Rule], Rule]:
    """Register what ATen ops do to axes, by their names as `overloads` reads them.

    A rule is called as rule(tracker, node, **arguments): the arguments by their names in the op's schema (`self` and
    `input` are called `x`), tensors as `Value`s. It returns a Value, a list of them, or None for what is no tensor.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads(ops), function))
        return function

    return register


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

    def with_axes(self, axes: Iterable[Axis]) -> Value:
        return Value(tuple(axes), self.parameters)

    def with_axis(self, dim: int, *axis: Axis) -> Value:
        """The same value with another axis, or none, at one dimension."""
        dim %= len(self.axes)
        return self.with_axes((*self.axes[:dim], *axis, *self.axes[dim + 1 :]))

    def without(self, dim: int) -> Value:
        return self.with_axis(dim)


def common_parameters(values: Sequence[Value]) -> frozenset[str]:
    """The parameters that a result of these values is computed from, if from nothing else."""
    return frozenset().union(*(v.parameters for v in values)) if all(v.is_parameter for v in values) else frozenset()


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Sizes of a fake tensor, UNKNOWN where they depend on the data; None for what is not a tensor."""
    if not hasattr(value, "shape"):
        return None
    return tuple(size if isinstance(size, int) else UNKNOWN for size in value.shape)


def fresh(node: fx.Node, reason: Reason) -> Any:
    """A value (or a list of values) of the node's shape with frozen axes."""

    def build(example: Any) -> Any:
        if isinstance(example, (list, tuple)):
            return [build(item) for item in example]
        shape = shape_of(example)
        return None if shape is None else Value(tuple(new_axis(size, reason) for size in shape))

    return build(node.meta.get("val"))


def listed(node: fx.Node, value: Value) -> Any:
    """The same value for each of the node's results."""
    return [value] * len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else value


def freeze_all(value: Any, reason: Reason) -> None:
    """Freeze every `Value` in nested lists."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Value):
            leaf.freeze(reason)


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


class Tracker:
    """One walk: a value for every node, and the contractions met on the way."""

    def __init__(self, trace: Trace, tensors: Mapping[str, Value]) -> None:
        """Walk the graph with these axes of the parameters and buffers, keyed by name."""
        self.trace = trace
        self.contractions: list[Contraction] = []
        self.values: dict[fx.Node, Any] = {}
        self.sizes: list[tuple[str, str, Axis]] = []  # parameter, attribute of its module, what it counts
        self.products: list[tuple[Axis, ...]] = []  # the lengths whose product is the MACs of an op
        self.tables: list[Value] = []  # weights of embeddings
        self.weight_norms: list[WeightNorm] = []
        self.unread = _unread(trace.graph)
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                source = trace.sources[node.name]
                known = tensors.get(source.name) if source.kind in ("parameter", "buffer") else None
                what = "is an axis of the model input" if source.kind == "input" else _CONSTANT
                self.values[node] = known or fresh(node, Reason(what, node.name))
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "get_attr":
                self.values[node] = fresh(node, Reason(_CONSTANT, node.name))
            else:
                freeze_all(self._value(node.args[0]), Reason("reaches the model output"))

    def _value(self, argument: Any) -> Any:
        """The argument with values in the place of nodes."""
        return fx.node.map_arg(argument, self.values.get)

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            container = self._value(node.args[0])
            return container[node.args[1]] if isinstance(container, list) else None  # type: ignore[index]
        name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        makes_tensors = any(hasattr(leaf, "shape") for leaf in pytree.tree_leaves(node.meta.get("val")))
        if name.startswith(_CHECKS) or not (makes_tensors or mutates(node)):  # a custom op may just write
            return None
        known = RULES.get(node.target) or RULES.get(str(node.target))
        if known is None:
            reason = Reason(f"no rule for {node.target}", node.name)
            freeze_all([self.values[used] for used in node.all_input_nodes], reason)
            self.multiplies([new_axis(_macs(node), reason)])
            return fresh(node, reason)
        given = {"x" if name in ("self", "input") else name: self._value(v) for name, v in given_to(node).items()}
        value = known(self, node, **given)
        _check_shape(node, value)
        return value

    # What rules use ---------------------------------------------------------------------------------------------
    def unite(self, node: fx.Node, x: Axis, y: Axis) -> Axis:
        return unite(x, y, Reason("cannot be matched with the axis it meets", node.name))

    def freeze(self, node: fx.Node, value: Value, dims: Iterable[int], why: str) -> None:
        for dim in dims:
            freeze(value.axes[dim], Reason(why, node.name))

    def new(self, node: fx.Node, size: int, why: str) -> Axis:
        """A frozen axis that this node makes."""
        return new_axis(size, Reason(why, node.name))

    def remake(self, node: fx.Node, value: Value, dims: Iterable[int], why: str) -> Value:
        """Freeze some dimensions of a value; the node's result has new, frozen ones in their place."""
        for dim in list(dims):
            self.freeze(node, value, [dim], why)
            value = value.with_axis(dim, self.new(node, self.shape(node)[dim], why))
        return value

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Shape of the tensor that the node returns, of the first one if there are several."""
        example = node.meta["val"]
        shape = shape_of(example[0] if isinstance(example, (list, tuple)) else example)
        assert shape is not None  # noqa: S101  # only asked of nodes that return a tensor
        return shape

    def contract(
        self, node: fx.Node, kind: str, data: Data, parameter: Value, contracted: Sequence[Axis], made: Sequence[Axis]
    ) -> None:
        """Record that a parameter reads these dimensions of the activations, an argument of the op."""
        (operand, dims), axes = data, (tuple(contracted), tuple(made))
        self.contractions.append(Contraction(node, kind, operand, tuple(dims), *axes, parameter.parameters))

    def counts(self, parameter: Value | None, attribute: str, axis: Axis) -> None:
        """Record that an attribute of the parameter's module is the length of an axis."""
        if parameter is not None:
            self.sizes += [(name, attribute, axis) for name in sorted(parameter.parameters)]

    def multiplies(self, axes: Iterable[Axis]) -> None:
        """Count as many multiply-accumulates as the product of these axes' lengths."""
        self.products.append(tuple(axes))


def _unread(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value reaches no output, such as unused attention weights."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed or node.is_impure():
            needed.add(node)
            needed.update(node.all_input_nodes)
    return set(graph.nodes) - needed


def _macs(node: fx.Node) -> int:
    """Multiply-accumulates of an op without a rule, as torch counts them; 0 for ops that it cannot count."""

    def empty(operand: fx.Node) -> Any:
        return pytree.tree_map_only(Tensor, partial(torch.empty_like, device="meta"), operand.meta["val"])

    with suppress(Exception), torch.no_grad(), FlopCounterMode(display=False) as counter:
        node.target(*fx.map_arg(node.args, empty), **fx.map_arg(node.kwargs, empty))  # type: ignore[operator]
        return int(counter.get_total_flops()) // 2
    return 0


def _check_shape(node: fx.Node, value: Any) -> None:
    example = node.meta.get("val")
    for item, ex in zip(value, example or (), strict=True) if isinstance(value, list) else [(value, example)]:
        shape = shape_of(ex)
        if isinstance(item, Value) and shape is not None and UNKNOWN not in shape:
            found = tuple(length(axis) for axis in item.axes)
            if found != shape and UNKNOWN not in found:
                raise InputError(
                    f"the rule for {node.target} gives lengths {found}, the tensor has shape {shape}: correct it"
                )
