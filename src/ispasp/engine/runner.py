"""The one engine that runs traced graphs: with edits, beside a dense twin, stopping in front of any node.

torch.fx.Interpreter runs a graph from start to end. Pruning waits in front of a layer until it is decided, looks ahead
at the inputs of later nodes, and keeps a dense twin beside, so nodes run one by one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ispasp.engine.batches import count_examples, padding_masks
from ispasp.engine.graphs import TracedGraph, TracedGraphs, Values
from ispasp.errors import InputError, TraceError
from ispasp.graph.ops import Arguments, Operand, along, call, named_arguments, op_of, some_of
from ispasp.graph.trace import Batch, call_op, mutates

T = TypeVar("T")
_ASSERTIONS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg)
_WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_WIDE |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)


@dataclass(frozen=True, eq=False)
class Cut:
    """The positions that stay on one axis of the activations that a contraction reads."""

    data: Operand
    dim: int
    stays: Tensor  # bool (positions,)


@dataclass(frozen=True, eq=False)
class Edits:
    """Differences of the pruned network from the dense one. `a | b` merges two; those of b win.

    `cuts[number]` are the positions that contraction `number` still reads. `tensors` are new values of parameters and
    buffers, in the dense shape. `biases[number]` is the new bias of a contraction that has none.
    """

    cuts: Mapping[int, Sequence[Cut]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    biases: Mapping[int, Tensor] = field(default_factory=dict)

    def __or__(self, other: Edits) -> Edits:
        return Edits({**self.cuts, **other.cuts}, {**self.tensors, **other.tensors}, {**self.biases, **other.biases})


class Probe(NamedTuple):
    """A zero that was added to a value, in a contraction that was given these arguments."""

    value: Tensor
    zero: Tensor
    given: Arguments


class Runner:
    """One batch in front of a node. The pruned network has `edits`; with `twin` the dense one runs beside it.

    Both share their values up to the first edited node. `slicing=False` zeroes removed channels, instead of slicing.
    `precise` computes in float64 throughout. `probed` maps contractions to the argument that gets a zero added, to take
    gradients for, or to None for their output; `probes` has the zeros.
    """

    def __init__(
        self,
        graph: TracedGraph,
        batch: Batch,
        tensors: Mapping[str, Tensor],
        edits: Edits,
        *,
        twin: bool = False,
        slicing: bool = True,
        precise: bool = False,
        probed: Mapping[int, Operand | None] | None = None,
    ) -> None:
        self.graph = graph
        self.edits = edits
        self.fixed = graph.parameters(tensors)
        self.padding = padding_masks(batch)
        self.probes: dict[int, Probe] = {}
        self._probed = probed or {}
        self._twin = twin
        self._slicing = slicing
        self._precise = precise
        self._at = 0
        inputs = graph.inputs(batch, {**tensors, **edits.tensors})
        self._pruned: Values = widened(inputs) if precise else inputs
        self._dense: Values | None = None

    # Going on ---------------------------------------------------------------------------------------------------
    def advance(self, to: fx.Node | None = None) -> Any:
        """Run every node in front of `to`. Without one, run to the end and return the flat outputs."""
        end = len(self.graph.nodes) if to is None else self.graph.order[to]
        result = None
        while self._at < end:
            node = self.graph.nodes[self._at]
            if self._dense is None and self._twin and self._is_edited(node):
                self._dense = self._copied()
            for values, edited in self._networks():
                if node not in values:  # `value` may have run it already
                    values[node] = self._run(node, values, edited=edited)
            result = self._pruned[node]
            for values, _ in self._networks():
                for gone in self.graph.last_uses.get(node, ()):
                    values.pop(gone, None)
            self._at += 1
        return result

    def output(self) -> Any:
        return pytree.tree_unflatten(list(self.advance()), self.graph.trace.output)

    def branch(self, edits: Edits) -> Runner:
        """A second runner at the same node, which goes on with other edits."""
        other = copy(self)
        other.edits, other._twin, other._dense = edits, False, None
        other._pruned = self._copied()
        return other

    def named(self, name: str) -> Tensor:
        """The present value of a parameter or buffer in the pruned network."""
        found: Tensor = self.edits.tensors.get(name, self.fixed[self.graph.placeholders[name]])
        return found

    @property
    def bytes(self) -> int:
        """Memory of the live activations, shared memory counted once."""
        leaves = [leaf for values, _ in self._networks() for leaf in pytree.tree_leaves(list(values.values()))]
        strided = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
        return sum({s.data_ptr(): s.nbytes() for s in (leaf.untyped_storage() for leaf in strided)}.values())

    def _networks(self) -> list[tuple[Values, bool]]:
        pruned = (self._pruned, True)
        return [pruned] if self._dense is None else [pruned, (self._dense, False)]

    def _copied(self) -> Values:
        """Copy the live values; into memory of their own if ops write in place."""
        return _cloned(self._pruned) if self.graph.writes else dict(self._pruned)

    def _is_edited(self, node: fx.Node) -> bool:
        if any(n in self.edits.cuts or n in self.edits.biases for n in self.graph.numbers.get(node, ())):
            return True
        read = (self.graph.sources[n].name for n in node.all_input_nodes if n.op == "placeholder")
        return any(name in self.edits.tensors for name in read)

    # Looking ahead ----------------------------------------------------------------------------------------------
    def arguments(self, number: int, *, dense: bool = False) -> Arguments:
        """The arguments of a contraction by name, before any cut. Runs ahead as far as needed."""
        node = self.graph.contractions[number]
        args, kwargs = self._fetch(node, self._ahead(node, dense=dense), edited=not dense)
        return named_arguments(node, args, kwargs)

    def magnitude(self, number: int) -> float:
        """Norm of a contraction's output if nothing cancelled: rounding errors are relative to that."""
        node = self.graph.contractions[number]
        given = self.arguments(number)
        for each in self.graph.numbers[node]:
            given = _cut(node, given, self.edits.cuts.get(each, []), slicing=False)
        y = call(node, pytree.tree_map_only(Tensor, Tensor.abs, given))
        return float(torch.where(torch.isfinite(y), y, torch.zeros_like(y)).double().norm())

    def value(self, node: fx.Node, *, dense: bool = False, cut: bool = True) -> Any:
        """The value of a node. With `cut=False` a contraction of the pruned network still reads everything."""
        live = self._live(dense=dense)
        if node in live:
            return live[node]
        value = self._run(node, self._ahead(node, dense=dense), edited=not dense, cut=cut)
        if live is self._dense and node is self.graph.nodes[self._at]:
            live[node] = value  # it is the next node to run
        return value

    def _live(self, *, dense: bool) -> Values:
        return self._dense if dense and self._dense is not None else self._pruned

    def _ahead(self, target: fx.Node, *, dense: bool) -> Values:
        """The values at the time when a later node reads its inputs."""
        live, order = self._live(dense=dense), self.graph.order
        missing: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = list(target.all_input_nodes)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            # in-place ops on the way change this value, even without an edge in the graph
            stack += [w for w in self.graph.writes.get(node, ()) if self._at <= order[w] < order[target]]
            if node.op != "placeholder" and node not in live:
                missing.add(node)
                stack += node.all_input_nodes
        if not missing:
            return live
        ordered = sorted(missing, key=order.__getitem__)
        values = _cloned(live) if any(mutates(node) for node in ordered) else dict(live)
        for node in ordered:
            values[node] = self._run(node, values, edited=not dense)
        return values

    # Running one node -------------------------------------------------------------------------------------------
    def _fetch(self, node: fx.Node, values: Values, *, edited: bool) -> tuple[Any, Any]:
        def look_up(n: fx.Node) -> Any:
            if n.op == "placeholder" and n in self.fixed and n not in values:
                return self.edits.tensors.get(self.graph.sources[n].name, self.fixed[n]) if edited else self.fixed[n]
            return values[n]

        args, kwargs = fx.node.map_arg(node.args, look_up), fx.node.map_arg(node.kwargs, look_up)
        return (widened(args), widened(kwargs)) if self._precise else (args, kwargs)

    def _run(self, node: fx.Node, values: Values, *, edited: bool, cut: bool = True) -> Any:
        args, kwargs = self._fetch(node, values, edited=edited)
        changed = (self.edits.cuts, self.edits.biases, self._probed) if edited else ()
        numbers = [n for n in self.graph.numbers.get(node, ()) if any(n in each for each in changed)]
        if not numbers:
            value = execute(self.graph.trace.module, node, args, kwargs)
            return widened(value) if self._precise else value
        given = named_arguments(node, args, kwargs)
        for number in numbers:
            if operand := self._probed.get(number):
                given = operand.put(given, self._add_zero(number, operand.get(given), given))
            if cut:
                given = _cut(node, given, self.edits.cuts.get(number, []), slicing=self._slicing)
            if number in self.edits.biases:
                given["bias"] = self.edits.biases[number].to(given["weight"])  # also to float64
        value = call(node, given)
        for number in numbers:
            if number in self._probed and self._probed[number] is None:
                value = self._add_zero(number, value, given)
        return value

    def _add_zero(self, number: int, x: Tensor, given: Arguments) -> Tensor:
        zero = torch.zeros_like(x, requires_grad=True)
        self.probes[number] = Probe(x.detach(), zero, given)
        return x + zero


@dataclass(eq=False)
class Lockstep:
    """All calibration batches, waiting in front of the same layer: pruning then costs one forward pass.

    Where the waiting activations exceed `memory`, or the memory there is, batches run from the start for every layer
    instead (`rerunning`); both give the same result.
    """

    graphs: TracedGraphs
    batches: Sequence[Batch]
    tensors: Mapping[str, Tensor]
    twin: bool
    memory: int | None = None
    rerunning: bool = field(default=False, init=False)
    _runners: list[Runner] = field(default_factory=list, init=False)

    @cached_property
    def examples(self) -> int:
        """Number of examples in all batches."""
        return sum(map(count_examples, self.batches))

    def over(self, number: int, edits: Edits, gather: Callable[[Iterator[Runner]], T]) -> T:
        """Bring every batch in front of contraction `number`, and call `gather` with them."""
        if not self.rerunning:
            try:
                return gather(self._in_front(number, edits))
            except (MemoryError, torch.OutOfMemoryError):
                pass  # handled outside: the exception holds the waiting activations
            self._runners, self.rerunning = [], True
        return gather(self._in_front(number, edits))

    def _in_front(self, number: int, edits: Edits) -> Iterator[Runner]:
        new = (Runner(self.graphs.of(b), b, self.tensors, edits, twin=self.twin) for b in self.batches)
        try:
            if not self.rerunning:
                self._runners = self._runners or list(new)
            for runner in self._runners or new:
                runner.edits = edits
                runner.advance(runner.graph.contractions[number])
                if self.memory is not None and runner.bytes * len(self._runners) > self.memory:
                    raise MemoryError
                yield runner
        except RuntimeError as error:  # the CPU's allocator has no exception of its own
            if "not enough memory" in str(error) or "can't allocate memory" in str(error):
                raise MemoryError from error
            raise


def execute(module: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run one node."""
    if node.op == "get_attr":
        return attrgetter(str(node.target))(module)
    if node.op == "output":
        return args[0]
    try:
        return call_op(node, args, kwargs)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if node.target not in _ASSERTIONS:
            raise TraceError(
                f"the traced graph fails at {node.name} ({type(error).__name__}: {str(error)[:300]}): check that the "
                "model runs on every batch, and does the same on every call"
            ) from error
        raise InputError(
            f"a batch takes another path through the model than the first one ({error}): its forward branches on the "
            "values of tensors; calibrate with batches that take the same path"
        ) from error


def widened(value: Any) -> Any:
    """Convert tensors of lower precision, and dtype arguments of ops, to float64."""

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype in _WIDE:
            return leaf.to(_WIDE[leaf.dtype])
        return _WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    return pytree.tree_map(wide, value)


def _cut(node: fx.Node, given: Arguments, cuts: Sequence[Cut], *, slicing: bool) -> Arguments:
    """Cut the input of a contraction: slice it together with the weight if possible, else fill with zeros."""
    op = op_of(node)
    axis = op.sliced if op is not None and slicing and given.get("groups", 1) == 1 else None
    for each in cuts:
        x = each.data.get(given)
        some = bool(each.stays.any())  # torch's convolutions need one channel
        if axis is not None and some and each.dim % x.ndim == axis % x.ndim and each.data.name == "input":
            positions = torch.nonzero(each.stays.to(x.device)).flatten()
            weight = given["weight"].index_select(1, positions)
            given = {**given, "input": some_of(x, each.dim, positions), "weight": weight}
        else:
            gone = along(~each.stays.to(x.device), each.dim, x.ndim)
            given = each.data.put(given, x.masked_fill(gone, 0))  # also clears NaN and Inf, as removal does
    return given


def _cloned(values: Values) -> Values:
    """The same values in new memory; tensors that shared memory share it again."""
    storages: dict[int, Any] = {}

    def clone(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(storages[storage.data_ptr()], value.storage_offset(), value.shape, value.stride())

    return {node: pytree.tree_map(clone, value) for node, value in values.items()}
