"""From a model and a batch to its hidden dimensions, as far as the graph alone can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx, nn

import ispasp.graph.rules  # noqa: F401  # fills the table of rules
from ispasp.graph.atoms import UNKNOWN, Atom, Axis, Reason, freeze_atom, new_axis, resolve
from ispasp.graph.trace import Batch, Trace, trace
from ispasp.graph.track import Tracker
from ispasp.graph.values import Contraction, Value
from ispasp.types.layout import Extent


@dataclass(frozen=True, eq=False)
class Found:
    """A hidden dimension in the graph."""

    name: str
    kind: str
    atom: Atom
    producers: tuple[str, ...]
    consumers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Analysis:
    """What the graph tells. `tensors` are the parameters and buffers that it reads, by name."""

    trace: Trace
    tracker: Tracker
    tensors: Mapping[str, Value]
    found: tuple[Found, ...]
    frozen: tuple[tuple[str, Reason], ...]
    names: Mapping[Atom, str] = field(default_factory=dict)

    def naming(self, chosen: Iterable[Found]) -> Analysis:
        """The same analysis in which only these hidden dimensions have names; all other axes count as whole."""
        return replace(self, names={found.atom: found.name for found in chosen})

    def extent(self, axis: Axis) -> Extent:
        """An axis in the words of plans."""
        return tuple(
            tuple((self.names.get(atom), atom.size) for atom in segment) if segment else ((None, 1),)
            for segment in resolve(axis)
        )


def analyse(model: nn.Module, batch: Batch) -> Analysis:
    """Trace the model, track its axes and collect hidden dimensions and what is frozen."""
    tracker = tracked(model, trace(model, batch))
    traced, tensors = tracker.trace, tracker.tensors
    _choose_factors(tracker, tensors)
    found = _collect(tracker)
    return Analysis(traced, tracker, tensors, found, _frozen(tracker, tensors)).naming(found)


def tracked(model: nn.Module, traced: Trace) -> Tracker:
    """Walk a trace of the model with fresh axes."""
    tracker = Tracker(traced, _tensors(model, {source.name for source in traced.sources.values()}))
    tracker.walk()
    return tracker


def _tensors(model: nn.Module, used: set[str]) -> dict[str, Value]:
    """Fresh axes for every parameter and buffer; tensors known under several names share them."""
    values: dict[str, Value] = {}
    by_identity: dict[int, Value] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) not in by_identity:
            axes = tuple(new_axis(size) for size in tensor.shape)
            by_identity[id(tensor)] = Value(axes, frozenset([name]))
        values[name] = by_identity[id(tensor)]
    seen = {id(values[name]) for name in used if name in values}
    return {name: value for name, value in values.items() if id(value) in seen}


def _every_axis(tracker: Tracker, tensors: Mapping[str, Value]) -> Iterable[Axis]:
    for value in tensors.values():
        yield from value.axes
    for contraction in tracker.contractions:
        yield from (*contraction.contracted, *contraction.made)
    for node, value in tracker.values.items():
        if node.op == "call_function" and isinstance(value, Value):
            yield from value.axes


def _choose_factors(tracker: Tracker, tensors: Mapping[str, Value]) -> None:
    """Of a product only one factor may lose units: heads before others, then the one with the most units."""
    axes = list(_every_axis(tracker, tensors))
    for axis in axes:
        resolve(axis)  # may freeze concatenations inside products
    for axis in axes:
        for segment in resolve(axis):
            live = [atom for atom in segment if atom.frozen is None and atom.size != UNKNOWN]
            if len(live) > 1:
                best = max(live, key=lambda atom: (atom.head, atom.size if not atom.head else 0))
                for atom in live:
                    if atom is not best:
                        freeze_atom(atom, Reason("another factor of the same axis counts the units"))


def owner(parameter: str) -> str:
    """Path of the module that holds a parameter, whatever parametrizations stand between.

    >>> owner("layer.0.conv.weight"), owner("conv.parametrizations.weight.original1"), owner("scale")
    ('layer.0.conv', 'conv', '')
    """
    return (
        parameter.split(".parametrizations.", maxsplit=1)[0]
        if ".parametrizations." in parameter
        else parameter.rpartition(".")[0]
    )


def _paths(contraction: Contraction) -> list[str]:
    return sorted({owner(name) or name for name in contraction.parameters})


def _collect(tracker: Tracker) -> tuple[Found, ...]:
    made: dict[Atom, list[Contraction]] = {}
    read: dict[Atom, list[Contraction]] = {}
    for contraction in tracker.contractions:
        for table, axes in ((made, contraction.made), (read, contraction.contracted)):
            for atom in dict.fromkeys(atom for axis in axes for segment in resolve(axis) for atom in segment):
                table.setdefault(atom, []).append(contraction)
    looked_up = _tables(tracker)
    found: list[Found] = []
    taken: set[str] = set()
    for atom in [*made, *(atom for atom in looked_up if atom not in made)]:
        if atom.frozen is not None or atom not in read:
            continue
        producers = [path for contraction in made.get(atom, ()) for path in _paths(contraction)]
        producers = producers or looked_up[atom]
        kind = "head" if atom.head else "filter" if made.get(atom) and made[atom][0].kind == "conv" else "neuron"
        name = _unique(_name(producers[0], kind, made.get(atom, [])), taken)
        consumers = [path for contraction in read[atom] for path in _paths(contraction)]
        found.append(Found(name, kind, atom, tuple(dict.fromkeys(producers)), tuple(dict.fromkeys(consumers))))
    return tuple(found)


def _tables(tracker: Tracker) -> dict[Atom, list[str]]:
    """Atoms that come out of a table of embeddings."""
    found: dict[Atom, list[str]] = {}
    for node in tracker.values:
        if node.op == "call_function" and "embedding" in str(node.target):
            weight = tracker.values.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
            if isinstance(weight, Value) and weight.is_parameter:
                for segment in resolve(weight.axes[-1]):
                    for atom in segment:
                        found.setdefault(atom, []).extend(owner(name) or name for name in sorted(weight.parameters))
    return found


def _name(producer: str, kind: str, made: list[Contraction]) -> str:
    if kind != "head":
        return producer
    parameter = sorted(made[0].parameters)[0] if made else producer
    inside = parameter.rpartition(".")[2] in ("weight", "original0", "original1", "weight_g", "weight_v")
    return (producer.rpartition(".")[0] or producer) if inside else producer


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}#{number}", number + 1
    taken.add(candidate)
    return candidate


def _frozen(tracker: Tracker, tensors: Mapping[str, Value]) -> tuple[tuple[str, Reason], ...]:
    rows: dict[tuple[str, str], Reason] = {}
    for contraction in tracker.contractions:
        atoms = [atom for axis in contraction.made for segment in resolve(axis) for atom in segment]
        why = next((atom.frozen for atom in atoms if atom.frozen is not None), None)
        if why is not None and not any(atom.frozen is None for atom in atoms):
            for path in _paths(contraction):
                rows.setdefault((path, why.text), why)
    for name, value in tensors.items():  # layers that only an op without a rule reads, such as an LSTM's
        atoms = [atom for axis in value.axes for segment in resolve(axis) for atom in segment]
        for atom in atoms:
            if atom.frozen is not None and atom.frozen.text.startswith("no rule"):
                rows.setdefault((owner(name) or name, atom.frozen.text), atom.frozen)
    return tuple((path, why) for (path, _), why in rows.items())
