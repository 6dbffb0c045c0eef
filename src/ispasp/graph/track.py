"""Walk the graph and apply the rule of each op."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ispasp.errors import InputError
from ispasp.graph.atoms import UNKNOWN, Axis, Reason, freeze, new_axis, unite
from ispasp.graph.ops import Operand
from ispasp.graph.trace import Source, Trace
from ispasp.graph.values import Contraction, Value, fresh, shape_of

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}

_SILENT = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
)
_INLINED = ("wrap_with_autocast", "wrap_with_set_grad_enabled")


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register what these ATen overloads do to axes; ops of optional packages are given by name.

    A rule is called as rule(tracker, node, **arguments): the arguments by their names in the op's schema (`self` and
    `input` are called `x`), tensors as `Value`s. It returns a Value, a list of them, or None for what is no tensor.
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        return function

    return register


class Tracker:
    """The state of one walk: a value for every node, and the contractions met on the way."""

    def __init__(self, trace: Trace, tensors: Mapping[str, Value]) -> None:
        """Start with the parameters' and buffers' axes, keyed by name."""
        self.trace = trace
        self.tensors = tensors
        self.contractions: list[Contraction] = []
        self.values: dict[fx.Node, Any] = {}
        self.unknown: set[str] = set()
        self.sizes: list[tuple[str, str, Axis]] = []  # parameter, attribute of its module, what it counts
        self.products: list[tuple[fx.Node, tuple[Axis, ...]]] = []  # MACs of a node: the product of these lengths
        self.weight_norms: list[tuple[str, str, int]] = []  # v, g, dim
        self.unread = _unread(trace.graph)
        self._depth = 0

    def walk(self) -> None:
        """Visit every node of the graph."""
        inputs = {node: self._placeholder(node) for node in self.trace.graph.find_nodes(op="placeholder")}
        for value in self._walk(self.trace.module, inputs):
            _freeze_all(value, Reason("reaches the model output"))

    def _placeholder(self, node: fx.Node) -> Any:
        source = self.trace.sources.get(node.name, Source("input", node.name))
        if source.kind in ("parameter", "buffer") and source.name in self.tensors:
            return self.tensors[source.name]
        what = "is an axis of the model input" if source.kind == "input" else "belongs to a constant in the forward"
        return fresh(node, Reason(what, node.name))

    def _walk(self, module: fx.GraphModule, inputs: dict[fx.Node, Any]) -> list[Any]:
        self.values.update(inputs)
        outputs: list[Any] = []
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._call(module, node)
            elif node.op == "get_attr":
                self.values[node] = fresh(node, Reason("belongs to a constant in the forward", node.name))
            elif node.op == "output":
                outputs = [self._value(argument) for argument in _leaves(node.args[0])]
        return outputs

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values.get(argument)
        if isinstance(argument, (list, tuple)):
            return [self._value(item) for item in argument]
        return argument

    def _call(self, module: fx.GraphModule, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            container = self._value(node.args[0])
            return container[node.args[1]] if isinstance(container, list) else None  # type: ignore[index]
        name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        if name in _INLINED:
            return self._inline(module, node)
        if name in _SILENT or not (_makes_tensors(node.meta.get("val")) or _writes(node)):
            return None
        known = RULES.get(node.target) or RULES.get(str(node.target))
        if known is None:
            return self._no_rule(node)
        value = known(self, node, **self._arguments(node))
        _check_shape(node, value)
        return value

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
            given = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get(argument.name, argument.default_value)
            )
            arguments["x" if argument.name in ("self", "input") else argument.name] = self._value(given)
        return arguments

    def _no_rule(self, node: fx.Node) -> Any:
        reason = Reason(f"no rule for {node.target}", node.name)
        self.unknown.add(str(node.target))
        for argument in _leaves([*node.args, *node.kwargs.values()]):
            _freeze_all(self._value(argument), reason)
        return fresh(node, reason)

    def _inline(self, module: fx.GraphModule, node: fx.Node) -> Any:
        at = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        inner = getattr(module, str(node.args[at].target))  # type: ignore[union-attr]
        given = [self._value(argument) for argument in node.args[at + 1 :]]
        names = inner.graph.find_nodes(op="placeholder")
        self._depth += 1
        try:
            return self._walk(inner, dict(zip(names, given, strict=True)))
        finally:
            self._depth -= 1

    # What rules use ---------------------------------------------------------------------------------------------

    def unite(self, node: fx.Node, x: Axis, y: Axis) -> Axis:
        """Make two axes lose the same positions."""
        return unite(x, y, Reason("cannot be matched with the axis it meets", node.name))

    def freeze(self, node: fx.Node, value: Value, dims: Sequence[int], why: str) -> None:
        """Freeze some dimensions of a value."""
        for dim in dims:
            freeze(value.axes[dim], Reason(why, node.name))

    def new(self, node: fx.Node, size: int, why: str) -> Axis:
        """A frozen axis that this node makes."""
        return new_axis(size, Reason(why, node.name))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Shape of the tensor that the node returns."""
        shape = shape_of(node.meta["val"])
        assert shape is not None  # noqa: S101  # only asked of nodes that return a tensor
        return shape

    def contract(
        self,
        node: fx.Node,
        kind: str,
        data: tuple[Operand, Value, Sequence[int]],
        parameter: Value,
        contracted: Sequence[Axis],
        made: Sequence[Axis],
    ) -> None:
        """Note that a parameter reads these dimensions of the activations."""
        operand, _, dims = data
        if self._depth:  # masks are put on the outer graph only
            for axis in contracted:
                freeze(axis, Reason("is read inside a higher-order op", node.name))
        self.contractions.append(
            Contraction(node, kind, operand, tuple(dims), tuple(contracted), tuple(made), parameter.parameters)
        )

    def counts(self, parameter: Value | None, attribute: str, axis: Axis) -> None:
        """Note that an attribute of the parameter's module is the length of an axis."""
        if parameter is not None:
            self.sizes += [(name, attribute, axis) for name in sorted(parameter.parameters)]

    def multiplies(self, node: fx.Node, axes: Sequence[Axis]) -> None:
        """Note that the node takes as many multiply-accumulates as the product of these axes' lengths."""
        self.products.append((node, tuple(axes)))


def _unread(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that no output depends on, such as attention weights averaged for nobody: they run, but do not matter."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed or node.is_impure():
            needed.add(node)
            needed.update(node.all_input_nodes)
    return set(graph.nodes) - needed


def _leaves(tree: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, fx.Node)))


def _freeze_all(value: Any, reason: Reason) -> None:
    if isinstance(value, Value):
        value.freeze(reason)
    elif isinstance(value, list):
        for item in value:
            _freeze_all(item, reason)


def _makes_tensors(example: Any) -> bool:
    if isinstance(example, (list, tuple)):
        return any(_makes_tensors(item) for item in example)
    return hasattr(example, "shape")


def _writes(node: fx.Node) -> bool:
    """Whether an op writes into its arguments, as a custom op without a result does."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _check_shape(node: fx.Node, value: Any) -> None:
    """Refuse a rule whose axes do not fit the tensor: it is wrong."""
    example = node.meta.get("val")
    for item, ex in zip(*(((value,), (example,)) if not isinstance(value, list) else (value, example)), strict=True):
        shape = shape_of(ex)
        if isinstance(item, Value) and shape is not None and UNKNOWN not in shape:
            found = tuple(sum(_size(segment) for segment in axis) for axis in item.axes)
            if found != shape and not any(size < 0 for size in found):
                raise InputError(
                    f"the rule for {node.target} gave axes of lengths {found} for a tensor of shape {shape}: correct it"
                )


def _size(segment: Sequence[Any]) -> int:
    total = 1
    for atom in segment:
        total = total * atom.size if total >= 0 and atom.size >= 0 else UNKNOWN
    return total
