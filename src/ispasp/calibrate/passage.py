"""One batch on its way through the network, and through its dense twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ispasp.calibrate.circuit import Circuit, Cut, Edits, Values, bytes_in, copied, execute, mutates
from ispasp.graph.ops import Arguments, Operand, along, call, named_arguments, op_of
from ispasp.graph.trace import Batch


class Passage:
    """A batch in front of a node. `pruned` sees the edits made so far, `dense` (with `twin`) does not.

    Both are one until the first edited node is reached.
    """

    def __init__(
        self,
        circuit: Circuit,
        batch: Batch,
        tensors: Mapping[str, Tensor],
        edits: Edits,
        *,
        twin: bool = False,
        slicing: bool = True,
        precise: bool = False,
    ) -> None:
        """Start in front of the first node.

        `slicing=False` zeroes what is not read instead of leaving it out. `precise` computes in float64 throughout,
        whatever the dtypes of the model and in its forward.
        """
        self.circuit = circuit
        self._edits = edits
        self._tensors = tensors
        self._batch = batch
        self._probed: Mapping[int, Operand] = {}
        self.probes: dict[int, tuple[Tensor, Tensor]] = {}
        self._twin = twin
        self._slicing = slicing
        self._precise = precise
        self.fixed = circuit.parameters(tensors)
        self._at = 0
        inputs = {**circuit.inputs(batch), **circuit.written({**tensors, **edits.tensors})}
        self._pruned: Values = widened(inputs) if precise else inputs
        self._dense: Values | None = None

    # Going on ---------------------------------------------------------------------------------------------------

    def advance(self, to: fx.Node | None = None) -> Any:
        """Run every node before `to`; to the end without one, where it returns the model's output."""
        end = len(self.circuit.nodes) if to is None else self.circuit.order[to]
        result = None
        while self._at < end:
            node = self.circuit.nodes[self._at]
            if self._dense is None and self._twin and self._is_edited(node):
                self._dense = copied(self._pruned) if self.circuit.mutating else dict(self._pruned)
            for values, edited in self._twins():
                if node not in values:  # a dense twin may have been asked for it already
                    values[node] = self._run(node, values, edited=edited)
            result = self._pruned[node]
            for values, _ in self._twins():
                for gone in self.circuit.dying.get(node, ()):
                    values.pop(gone, None)
            self._at += 1
        return result

    def _twins(self) -> list[tuple[Values, bool]]:
        both = [(self._pruned, True)]
        if self._dense is not None:
            both.append((self._dense, False))
        return both

    def _is_edited(self, node: fx.Node) -> bool:
        if any(n in self._edits.cuts or n in self._edits.biases for n in self.circuit.numbers.get(node, ())):
            return True
        return any(self._name(n) in self._edits.tensors for n in node.all_input_nodes if n.op == "placeholder")

    def _name(self, placeholder: fx.Node) -> str:
        return self.circuit.trace.sources[placeholder.name].name

    def named(self, name: str) -> Tensor:
        """The present value of a parameter or buffer in the network that is being pruned."""
        return self._edits.tensors[name] if name in self._edits.tensors else self._tensors[name]

    @property
    def bytes(self) -> int:
        """Memory of the live activations."""
        return sum(bytes_in(values) for values, _ in self._twins())

    def probe(self, data: Mapping[int, Operand]) -> None:
        """From here on add a zero to what these contractions read (argument by number), to take gradients for.

        `probes[number]` is then what was read, and the zero.
        """
        self._probed = data

    def branch(self, edits: Edits) -> Passage:
        """The same batch at the same place, going on with other edits."""
        other = Passage(self.circuit, self._batch, self._tensors, edits, slicing=self._slicing)
        other._pruned = copied(self._pruned) if self.circuit.mutating else dict(self._pruned)
        other._at = self._at
        return other

    # Looking ahead ----------------------------------------------------------------------------------------------

    def arguments(self, number: int, *, dense: bool = False) -> Arguments:
        """What a contraction reads, by argument name, before any cut there; runs ahead as far as it depends on."""
        node = self.circuit.contractions[number]
        values = self._ahead(node, dense=dense)
        args, kwargs = self._fetch(node, values, edited=not dense)
        return named_arguments(node, args, kwargs)

    def magnitude(self, number: int) -> float:
        """Norm of what a contraction would return if nothing cancelled: rounding errors are relative to that."""
        node = self.circuit.contractions[number]
        given = self.arguments(number)
        for each in self.circuit.numbers[node]:
            given = _cut(node, given, self._edits.cuts.get(each, []), slicing=False)
        given = pytree.tree_map_only(Tensor, Tensor.abs, given)
        y = call(node, given)
        return float(torch.where(torch.isfinite(y), y, torch.zeros_like(y)).double().norm())

    def value(self, node: fx.Node, *, dense: bool = False, cut: bool = True) -> Any:
        """What a node returns; with `cut=False` a contraction in the pruned network still reads everything."""
        live = self._dense if dense and self._dense is not None else self._pruned
        if node in live:
            return live[node]
        values = self._ahead(node, dense=dense)
        value = self._run(node, values, edited=not dense, cut=cut)
        if dense and self._dense is not None and node is self.circuit.nodes[self._at]:
            self._dense[node] = value  # it is next anyway
        return value

    def _ahead(self, target: fx.Node, *, dense: bool) -> Values:
        """Values as they are when a later node reads its inputs."""
        live = self._dense if dense and self._dense is not None else self._pruned
        missing: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = list(target.all_input_nodes)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            stack += self._writes(node, target)
            if node.op != "placeholder" and node not in live:
                missing.add(node)
                stack += node.all_input_nodes
        if not missing:
            return live
        ordered = sorted(missing, key=self.circuit.order.__getitem__)
        values = copied(live) if any(mutates(node) for node in ordered) else dict(live)
        for node in ordered:
            values[node] = self._run(node, values, edited=not dense)
        return values

    def _writes(self, node: fx.Node, target: fx.Node) -> list[fx.Node]:
        """Nodes on the way that change the memory of a value in place, though no edge of the graph may say so."""
        order = self.circuit.order
        return [w for w in self.circuit.writes.get(node, ()) if self._at <= order[w] < order[target]]

    # Running ----------------------------------------------------------------------------------------------------

    def _fetch(self, node: fx.Node, values: Values, *, edited: bool) -> tuple[Any, Any]:
        def look_up(n: fx.Node) -> Any:
            if n.op == "placeholder" and n in self.fixed and n not in values:
                return self._edits.tensors.get(self._name(n), self.fixed[n]) if edited else self.fixed[n]
            return values[n]

        args, kwargs = fx.node.map_arg(node.args, look_up), fx.node.map_arg(node.kwargs, look_up)
        return (widened(args), widened(kwargs)) if self._precise else (args, kwargs)

    def _run(self, node: fx.Node, values: Values, *, edited: bool, cut: bool = True) -> Any:
        args, kwargs = self._fetch(node, values, edited=edited)
        numbers = [number for number in self.circuit.numbers.get(node, ()) if self._touches(number)]
        if not edited or not numbers:
            value = execute(self.circuit.trace.module, node, args, kwargs)
            return widened(value) if self._precise else value
        given = named_arguments(node, args, kwargs)
        for number in numbers:
            if number in self._probed:
                given = self._add_zero(number, given)
            if cut:
                given = _cut(node, given, self._edits.cuts.get(number, []), slicing=self._slicing)
            if number in self._edits.biases:
                given["bias"] = self._edits.biases[number].to(given["weight"])  # and to float64, if that is
        return call(node, given)

    def _touches(self, number: int) -> bool:
        return number in self._edits.cuts or number in self._edits.biases or number in self._probed

    def _add_zero(self, number: int, given: Arguments) -> Arguments:
        x = self._probed[number].get(given)
        zero = torch.zeros_like(x, requires_grad=True)
        self.probes[number] = (x.detach(), zero)
        return self._probed[number].put(given, x + zero)


_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def widened(value: Any) -> Any:
    """The same value in float64: tensors of lower precision, and dtypes that ops are told to use.

    >>> widened((torch.ones(1), torch.float16, 3))
    (tensor([1.], dtype=torch.float64), torch.float64, 3)
    """

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype in _WIDE:
            return leaf.to(_WIDE[leaf.dtype])
        return _WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    return pytree.tree_map(wide, value)


def _cut(node: fx.Node, given: Arguments, cuts: list[Cut], *, slicing: bool) -> Arguments:
    """Take away what is not read: by slicing where that is one position of the weight, else by zeros."""
    op = op_of(node)
    axis = op.sliced if op is not None and slicing and given.get("groups", 1) == 1 else None
    for each in cuts:
        x = each.data.get(given)
        if axis is not None and each.dim % x.ndim == axis % x.ndim and each.data.name == "input":
            positions = torch.nonzero(each.stays.to(x.device)).flatten()
            weight = given["weight"].index_select(1, positions)
            given = {**given, "input": x.index_select(each.dim, positions), "weight": weight}
        else:
            gone = along(~each.stays.to(x.device), each.dim, x.ndim)
            given = each.data.put(given, x.masked_fill(gone, 0))  # also clears NaN and Inf, which removal does
    return given
