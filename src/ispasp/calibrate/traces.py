"""One circuit for every kind of batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from ispasp.calibrate.batches import signature
from ispasp.calibrate.circuit import Circuit
from ispasp.errors import InputError
from ispasp.graph.analyse import Analysis, matches, retracked
from ispasp.graph.trace import Batch, Trace, trace


class Circuits:
    """The traced graph of each kind of batch, with the analysed nodes found again in every one.

    torch.export fixes shapes, and a forward may branch on them, so a last, smaller batch or a longer sequence has a
    trace of its own.
    """

    def __init__(self, model: nn.Module, analysis: Analysis, example: Batch, also: Sequence[Batch] = ()) -> None:
        """Start with the traces that were analysed: of the example, and of batches of other kinds."""
        self._model = model
        self._analysis = analysis
        self.first = Circuit.of(analysis)
        self._known: dict[Any, Circuit] = {signature(example): self.first}
        self.kinds: list[tuple[Batch, Circuit]] = []  # one batch of each kind but the example's
        for batch, walk in zip(also, analysis.others, strict=True):
            self._add(batch, Circuit(walk.trace, matches(analysis.tracker, walk)))

    def of(self, batch: Batch) -> Circuit:
        """The circuit for batches of this kind."""
        key = signature(batch)
        if key not in self._known:
            traced = trace(self._model, batch)
            self._add(batch, Circuit(traced, self._all_matches(traced, batch)))
        return self._known[key]

    @property
    def every(self) -> list[Circuit]:
        """The circuits of all kinds."""
        return [self.first, *(circuit for _, circuit in self.kinds)]

    def all_reach(self, number: int) -> bool:
        """Whether every kind of batch meets a contraction."""
        return all(number in circuit.contractions for circuit in self.every)

    def _add(self, batch: Batch, circuit: Circuit) -> None:
        _check_order(circuit, batch)
        self._known[signature(batch)] = circuit
        self.kinds.append((batch, circuit))

    def _all_matches(self, traced: Trace, batch: Batch) -> Mapping[int, fx.Node]:
        """A kind that comes too late for the analysis must use all parameters alike."""
        old, new = self._analysis.tracker, retracked(self._model, traced)
        found = matches(old, new)
        if not len(found) == len(old.contractions) == len(new.contractions):
            raise InputError(_another_way(batch))
        return found


def _check_order(circuit: Circuit, batch: Batch) -> None:
    """All batches wait in front of one layer after the other, so every kind must meet them in the same order."""
    met = [circuit.order[node] for _, node in sorted(circuit.contractions.items()) if node in circuit.order]
    if met != sorted(met):
        raise InputError(_another_way(batch))


def _another_way(batch: Batch) -> str:
    return (
        f"a batch of shapes {signature(batch)[1:]} takes another way through the model than the first one: "
        "calibrate with batches of one shape"
    )


def same_way(a: Trace, b: Trace) -> bool:
    """Whether two traces are the same ops on the same tensors, up to numbers such as the sizes of a view.

    >>> import torch
    >>> two, three = (trace(nn.Linear(2, 3), torch.ones(n, 2)) for n in (2, 3))
    >>> same_way(two, three)
    True
    """
    return [_described(node, a) for node in a.graph.nodes] == [_described(node, b) for node in b.graph.nodes]


def _described(node: fx.Node, traced: Trace) -> Any:
    source = traced.sources.get(node.name) if node.op == "placeholder" else None
    return node.op, source or str(node.target), [used.name for used in node.all_input_nodes]
