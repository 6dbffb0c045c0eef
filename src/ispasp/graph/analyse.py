"""From a model and a batch to its hidden dimensions, as far as the graph alone can tell."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import fx, nn

import ispasp.graph.rules  # noqa: F401  # fills the table of rules
from ispasp.errors import TraceError
from ispasp.graph.atoms import UNKNOWN, Atom, Axis, Reason, freeze, freeze_atom, new_axis, resolve
from ispasp.graph.trace import Batch, Trace, trace
from ispasp.graph.track import Tracker
from ispasp.graph.values import Contraction, Value
from ispasp.types.layout import Extent

_BY_MODE = re.compile(r"\bif\b.*\btraining\b")
_TRAINING_ONLY = "is used in training only: it is cut to fit what it reads, and loses no units of its own"
_NEVER = "is not used by the example call: it stays as it is"


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
    others: tuple[Tracker, ...] = ()  # walks of other kinds of batches, over the same axes of parameters
    training: Tracker | None = None  # the walk in training mode, where that may differ and can be traced
    by_mode: bool = False  # whether the training path may differ

    @property
    def walks(self) -> tuple[Tracker, ...]:
        """Every walk that shares these axes."""
        return (self.tracker, *self.others, *([self.training] if self.training else []))

    def naming(self, chosen: Iterable[Found]) -> Analysis:
        """The same analysis in which only these hidden dimensions have names; all other axes count as whole."""
        return replace(self, names={found.atom: found.name for found in chosen})

    def extent(self, axis: Axis) -> Extent:
        """An axis in the words of plans."""
        return tuple(
            tuple((self.names.get(atom), atom.size) for atom in segment) if segment else ((None, 1),)
            for segment in resolve(axis)
        )


def analyse(model: nn.Module, batch: Batch, also: Sequence[Batch] = ()) -> Analysis:
    """Trace the model, track its axes and collect hidden dimensions and what is frozen.

    `also` are batches of other kinds: all traces share the axes of the parameters, so what one of them freezes or ties
    holds for all. The training path is tracked as well where it may differ from the one in eval mode.
    """
    everything = _values(model)
    tracker = tracked(trace(model, batch), everything)
    others = tuple(tracked(trace(model, each), everything) for each in also)
    by_mode = _may_differ_in_training(model, everything, (tracker, *others))
    training = _in_training(model, batch, everything) if by_mode else None
    walks = (tracker, *others, *([training] if training else []))
    tensors = _used(everything, walks)
    for other in others:
        freeze_unmatched(tracker, other)
    _choose_factors(walks, tensors)
    found = _collect(tracker)
    frozen = (*_frozen(tracker, tensors), *_unreached(model, everything, (tracker, *others), training))
    known = Analysis(tracker.trace, tracker, tensors, found, frozen, {}, others, training, by_mode)
    return known.naming(found)


def tracked(traced: Trace, tensors: Mapping[str, Value]) -> Tracker:
    """Walk a trace with these axes of the model's parameters and buffers."""
    tracker = Tracker(traced, tensors)
    tracker.walk()
    return tracker


def retracked(model: nn.Module, traced: Trace) -> Tracker:
    """Walk a trace of the model with fresh axes."""
    return tracked(traced, _values(model))


def _values(model: nn.Module) -> dict[str, Value]:
    """Fresh axes for every parameter and buffer; tensors known under several names share them."""
    values: dict[str, Value] = {}
    by_identity: dict[int, Value] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) not in by_identity:
            axes = tuple(new_axis(size) for size in tensor.shape)
            by_identity[id(tensor)] = Value(axes, frozenset([name]))
        values[name] = by_identity[id(tensor)]
    return values


def _used(values: Mapping[str, Value], walks: Iterable[Tracker]) -> dict[str, Value]:
    """The parameters and buffers that some walk reads, under all their names."""
    names = {name for walk in walks for name in walk.trace.read}
    seen = {id(values[name]) for name in names if name in values}
    return {name: value for name, value in values.items() if id(value) in seen}


# Other ways through the model ---------------------------------------------------------------------------------------


def matches(main: Tracker, other: Tracker) -> dict[int, fx.Node]:
    """The contractions of one walk found again in another: the n-th use of the same parameters in the same way."""
    again: dict[Any, list[fx.Node]] = {}
    for contraction in other.contractions:
        again.setdefault(_key(contraction), []).append(contraction.node)
    count = Counter(_key(contraction) for contraction in main.contractions)
    seen: Counter[Any] = Counter()
    found: dict[int, fx.Node] = {}
    for number, contraction in enumerate(main.contractions):
        key = _key(contraction)
        if len(again.get(key, ())) == count[key]:  # else nobody can tell which use is which
            found[number] = again[key][seen[key]]
            seen[key] += 1
    return found


def _key(contraction: Contraction) -> Any:
    return contraction.parameters, contraction.kind, contraction.data, contraction.dims, str(contraction.node.target)


def freeze_unmatched(main: Tracker, other: Tracker) -> None:
    """Freeze what is read where only one of two walks goes: statistics and masks are the first walk's."""
    both = matches(main, other)
    alike = set(both.values())
    only = [c for n, c in enumerate(main.contractions) if n not in both]
    only += [c for c in other.contractions if c.node not in alike]
    for contraction in only:
        where = ", ".join(_paths(contraction))
        for axis in contraction.contracted:
            freeze(axis, Reason(f"is read by {where} for some kinds of batches only", contraction.node.name))


def _may_differ_in_training(model: nn.Module, tensors: Mapping[str, Value], walks: Sequence[Tracker]) -> bool:
    """Whether there are parameters that eval mode never reads, or code that asks for the mode."""
    classes: set[Any] = {type(module) for module in model.modules()}
    return len(_used(tensors, walks)) < len(tensors) or any(_asks_for_training(cls) for cls in classes)


def _in_training(model: nn.Module, batch: Batch, tensors: Mapping[str, Value]) -> Tracker | None:
    """The walk of the training path, if it can be traced; if not, surgery is tried in training mode all the same."""
    try:
        return tracked(trace(model, batch, training=True), tensors)
    except TraceError:
        return None


@cache
def _asks_for_training(cls: Any) -> bool:
    """Whether the code of a module decides by its training mode; torch's own layers keep their axes in either."""
    if cls.__module__.startswith("torch.nn."):
        return False
    try:
        lines = inspect.getsource(cls).splitlines()
    except (OSError, TypeError):
        return True
    return any(_BY_MODE.search(line) and "checkpoint" not in line for line in lines)


def _unreached(
    model: nn.Module, tensors: Mapping[str, Value], walks: Sequence[Tracker], training: Tracker | None
) -> list[tuple[str, Reason]]:
    """Modules none of whose parameters the traces in eval mode read, the outermost of each."""
    reached = _used(tensors, walks)
    trained = _used(tensors, [training]) if training else {}
    left: dict[str, Reason] = {}
    for name, _ in model.named_parameters():
        if name in reached:
            continue
        parts = owner(name).split(".")
        paths = [".".join(parts[: k + 1]) for k in range(len(parts))]
        path = next((p for p in paths if not any(n.startswith(f"{p}.") for n in reached)), owner(name)) or name
        why = _TRAINING_ONLY if name in trained else _NEVER
        left.setdefault(path, Reason(why))
    return list(left.items())


def _every_axis(walks: Iterable[Tracker], tensors: Mapping[str, Value]) -> Iterable[Axis]:
    for value in tensors.values():
        yield from value.axes
    for tracker in walks:
        for contraction in tracker.contractions:
            yield from (*contraction.contracted, *contraction.made)
        for node, value in tracker.values.items():
            if node.op == "call_function" and isinstance(value, Value):
                yield from value.axes


def _choose_factors(walks: Sequence[Tracker], tensors: Mapping[str, Value]) -> None:
    """Of a product only one factor may lose units: heads before others, then the one with the most units."""
    axes = list(_every_axis(walks, tensors))
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
