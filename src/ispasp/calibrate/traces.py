"""One circuit for every shape of batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ispasp.calibrate.batches import signature
from ispasp.calibrate.batchwise import any_number_of_examples
from ispasp.calibrate.circuit import Circuit
from ispasp.errors import InputError
from ispasp.graph.analyse import Analysis, tracked
from ispasp.graph.trace import Batch, Trace, trace


class Circuits:
    """Traces the model once for each shape of batch, and finds the analysed nodes again in every trace.

    torch.export fixes shapes, so a last, smaller batch or a longer sequence needs a trace of its own.
    """

    def __init__(self, model: nn.Module, analysis: Analysis, example: Batch) -> None:
        """Start with the trace that was analysed, of the example batch."""
        self._model = model
        self._analysis = analysis
        nodes = {number: c.node for number, c in enumerate(analysis.tracker.contractions)}
        self.first = Circuit(analysis.trace, nodes)
        self._known: dict[Any, Circuit] = {signature(example): self.first}
        self._like = _ignoring_examples(example)
        self._fits_any = any_number_of_examples(analysis.trace.graph)

    def of(self, batch: Batch) -> Circuit:
        """The circuit for batches of this shape."""
        key = signature(batch)
        if key not in self._known and self._fits_any and _ignoring_examples(batch) == self._like:
            self._known[key] = self.first
        if key not in self._known:
            traced = trace(self._model, batch)
            self._known[key] = Circuit(traced, self._by_name(traced) or self._by_order(traced, batch))
        return self._known[key]

    def _by_name(self, traced: Trace) -> Mapping[int, fx.Node] | None:
        """The same ops under the same names, the usual case."""
        new, old = list(traced.graph.nodes), list(self._analysis.trace.graph.nodes)
        if [(n.name, n.target) for n in new] != [(n.name, n.target) for n in old]:
            return None
        at = {node.name: node for node in new}
        return {number: at[c.node.name] for number, c in enumerate(self._analysis.tracker.contractions)}

    def _by_order(self, traced: Trace, batch: Batch) -> Mapping[int, fx.Node]:
        """Other ops in between, but the same products with the same parameters in the same order."""
        new, old = tracked(self._model, traced).contractions, self._analysis.tracker.contractions
        if [(c.parameters, c.kind, c.data) for c in new] != [(c.parameters, c.kind, c.data) for c in old]:
            raise InputError(
                f"a batch of shapes {signature(batch)[1:]} takes another way through the model than the first one: "
                "calibrate with batches of one shape"
            )
        return {number: c.node for number, c in enumerate(new)}


def _ignoring_examples(batch: Batch) -> tuple[Any, ...]:
    """The signature without the number of examples, the size of every tensor's first dimension."""
    cut = pytree.tree_map(lambda leaf: leaf[:1] if isinstance(leaf, Tensor) and leaf.ndim else leaf, batch)
    return signature(cut)
