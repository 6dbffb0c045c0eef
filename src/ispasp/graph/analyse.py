"""Find the hidden dimensions of a model, and their cost, in its graph."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from ispasp.errors import TraceError
from ispasp.graph.atoms import UNKNOWN, Atom, Axis, Reason, atoms_of, freeze, freeze_atom, length, new_axis, resolve
from ispasp.graph.trace import Batch, Trace, call_arguments, named_tensors, trace
from ispasp.graph.track import Contraction, Tracker, Value, shape_of
from ispasp.types.dimension import Cost, Extent, Kept, distinct, full_length, kept_length, names_in

_BY_MODE = re.compile(r"\bif\b.*\btraining\b")
_SAME_AXES = re.compile(r"checkpoint|drop\w*\s*=[^=].*\bif\b.*\btraining\b.*\belse\b")  # or only a rate of dropout
_TRAINING_ONLY = "is used in training only: it is cut to fit what it reads, and loses no units of its own"
NOT_CALLED = (
    "is not used by the example call: it stays as it is, so calls that use it may fail: pass one or skip= its input"
)


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
    """Facts from the graph. `tensors` are the parameters and buffers that it reads, by name."""

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
        return (self.tracker, *self.others, *([self.training] if self.training else []))

    def naming(self, chosen: Iterable[Found]) -> Analysis:
        """The same analysis with only these hidden dimensions; all other axes count as whole."""
        return replace(self, names={found.atom: found.name for found in chosen})

    def extent(self, axis: Axis) -> Extent:
        """Convert an axis to the notation of plans."""
        found = (tuple((self.names.get(atom), atom.size) for atom in segment) for segment in resolve(axis))
        return tuple(segment or ((None, 1),) for segment in found)


def analyse(model: nn.Module, batch: Batch, also: Sequence[Batch] = ()) -> Analysis:
    """Trace the model, track its axes and collect hidden dimensions and what is frozen.

    `also` are batches of other kinds: all traces share the axes of the parameters, so an axis that one of them freezes
    or ties is frozen or tied in all. The training path is tracked too if it may differ from eval mode.
    """
    everything = _values(model)
    tracker, *others = walks = [Tracker(trace(model, each), everything) for each in (batch, *also)]
    reached, training = _used(everything, walks), None
    by_mode = _may_differ_in_training(model, everything, reached)
    if by_mode:
        with suppress(TraceError):  # surgery is tried in training mode in any case
            walks.append(training := Tracker(trace(model, batch, training=True), everything))
    tensors = _used(everything, walks)
    for other in others:
        _freeze_unmatched(tracker, other)
    _choose_factors(walks, tensors)
    found = tuple(_collect(tracker))
    frozen = (*_frozen(tracker, tensors), *_unreached(model, reached, tensors), *_unregistered(model))
    return Analysis(tracker.trace, tracker, tensors, found, frozen, {}, tuple(others), training, by_mode).naming(found)


def retracked(model: nn.Module, traced: Trace) -> Tracker:
    """Walk a trace of the model with fresh axes."""
    return Tracker(traced, _values(model))


def _values(model: nn.Module) -> dict[str, Value]:
    """Fresh axes for every parameter and buffer; tensors known under several names share them."""
    values: dict[str, Value] = {}
    by_identity: dict[int, Value] = {}
    for name, tensor in named_tensors(model).items():
        new = Value(tuple(map(new_axis, tensor.shape)), frozenset([name]))
        values[name] = by_identity.setdefault(id(tensor), new)
    return values


def _used(values: Mapping[str, Value], walks: Iterable[Tracker]) -> dict[str, Value]:
    """The parameters and buffers that some walk reads, under all their names."""
    names = {name for walk in walks for name in walk.trace.read}
    seen = {id(values[name]) for name in names if name in values}
    return {name: value for name, value in values.items() if id(value) in seen}


# Other paths through the model --------------------------------------------------------------------------------------
def matches(main: Tracker, other: Tracker) -> dict[int, fx.Node]:
    """Find the contractions of one walk in another: the n-th use of the same parameters in the same way."""
    mine, theirs = _uses(main), _uses(other)
    found: dict[int, fx.Node] = {}
    for key, uses in mine.items():
        if len(uses) == len(theirs.get(key, [])):  # else they cannot be told apart
            found |= {number: node for (number, _), (_, node) in zip(uses, theirs[key], strict=True)}
    return found


def _uses(walk: Tracker) -> dict[Any, list[tuple[int, fx.Node]]]:
    """The contractions that use the same parameters in the same way, with their numbers."""
    found: dict[Any, list[tuple[int, fx.Node]]] = {}
    for number, c in enumerate(walk.contractions):
        key = c.parameters, c.kind, c.data, c.dims, str(c.node.target)
        found.setdefault(key, []).append((number, c.node))
    return found


def _freeze_unmatched(main: Tracker, other: Tracker) -> None:
    """Freeze the inputs of layers that only one of two walks reaches: statistics and masks are the first walk's."""
    both = matches(main, other)
    only = [c for n, c in enumerate(main.contractions) if n not in both]
    only += [c for c in other.contractions if c.node not in both.values()]
    for contraction in only:
        ranks = {c.dims for c in only if c.parameters == contraction.parameters}
        when = (
            "for some kinds of batches only"
            if len(ranks) < 2
            else "in batches of different numbers of axes: pass one kind"
        )
        for axis in contraction.contracted:
            freeze(axis, Reason(f"is read by {', '.join(paths_of(contraction))} {when}", contraction.node.name))


def _may_differ_in_training(model: nn.Module, tensors: Mapping[str, Value], read: Collection[str]) -> bool:
    """Whether eval mode leaves saved tensors unread, or the model's code checks `training`."""
    unread = {name for name, value in tensors.items() if value.axes and name not in read}
    for path, module in model.named_modules(remove_duplicate=False):
        unread -= {f"{path}.{name}".removeprefix(".") for name in module._non_persistent_buffers_set}
    classes: set[Any] = {type(module) for module in model.modules()}
    return bool(unread) or any(map(_asks_for_training, classes))


@cache
def _asks_for_training(cls: Any) -> bool:
    """Whether the code of a module branches on its training mode; torch's own layers keep their axes in either."""
    if cls.__module__.startswith("torch.nn."):
        return False
    file, name = _source(sys.modules.get(cls.__module__)), re.escape(cls.__name__)
    if re.search(rf"\bclass {name}(?!\w)", file) and not _branches(file):
        return False  # saves time: to find a class, Python parses its whole file
    own = _source(cls)
    return not own or _branches(own)


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


@cache
def _branches(source: str) -> bool:
    return any(_BY_MODE.search(line) and not _SAME_AXES.search(line) for line in source.splitlines())


def _unreached(model: nn.Module, reached: Collection[str], read: Collection[str]) -> Iterable[tuple[str, Reason]]:
    """The outermost modules none of whose parameters are reached in eval mode; some may be read in training."""
    left: dict[str, Reason] = {}
    for name in (name for name, _ in model.named_parameters() if name not in reached):
        paths = itertools.accumulate(owner(name).split("."), "{}.{}".format)
        path = next((p for p in paths if not any(n.startswith(f"{p}.") for n in reached)), owner(name)) or name
        left.setdefault(path, Reason(_TRAINING_ONLY if name in read else NOT_CALLED))
    return left.items()


def _unregistered(model: nn.Module) -> Iterator[tuple[str, Reason]]:
    """Attributes of modules that hold layers of which the model does not know."""
    known = set(model.modules())
    why = "holds layers that are not registered, so they stay whole: make it an nn.ModuleList"
    for path, module in model.named_modules():
        for name, held in vars(module).items():
            layers = (leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, nn.Module) and leaf not in known)
            if any(True for layer in layers for _ in layer.parameters()):
                yield f"{path}.{name}".removeprefix("."), Reason(why)


# Hidden dimensions --------------------------------------------------------------------------------------------------
def _choose_factors(walks: Sequence[Tracker], tensors: Mapping[str, Value]) -> None:
    """Let one factor of each product lose units: heads first, else the factor with the most units."""
    made = (value for walk in walks for node, value in walk.values.items() if node.op == "call_function")
    axes = [axis for value in (*tensors.values(), *made) if isinstance(value, Value) for axis in value.axes]
    axes += [axis for walk in walks for c in walk.contractions for axis in (*c.contracted, *c.made)]
    for axis in axes:
        resolve(axis)  # may freeze concatenations inside products
    held = {atom for value in tensors.values() for axis in value.axes for atom in atoms_of(axis)}
    for axis in axes:
        for segment in resolve(axis):
            live = [atom for atom in segment if atom.frozen is None and atom.size != UNKNOWN]
            best = max(live, key=lambda atom: (atom in held, *_rank(atom)), default=None)
            for atom in live:
                if atom is not best:
                    freeze_atom(atom, Reason("another factor of the same axis counts the units"))


def _rank(atom: Atom) -> tuple[bool, int]:
    return atom.head, 0 if atom.head else atom.size


def owner(parameter: str) -> str:
    """Path of the module that holds a parameter, whatever parametrizations stand between."""
    before, found, _ = parameter.partition(".parametrizations.")
    return before if found else parameter.rpartition(".")[0]


def paths_of(holder: Contraction | Value) -> list[str]:
    """The modules that hold its parameters."""
    return sorted({owner(name) or name for name in holder.parameters})


def _collect(tracker: Tracker) -> Iterator[Found]:
    made: dict[Atom, list[Contraction]] = {}
    read: dict[Atom, list[Contraction]] = {}
    for contraction in tracker.contractions:
        for side, axes in ((made, contraction.made), (read, contraction.contracted)):
            for atom in dict.fromkeys(atom for axis in axes for atom in atoms_of(axis)):
                side.setdefault(atom, []).append(contraction)
    looked_up: dict[Atom, list[str]] = {}
    for table in tracker.tables:
        for atom in atoms_of(table.axes[-1]):
            looked_up.setdefault(atom, []).extend(paths_of(table))
    taken: set[str] = set()
    for atom in dict.fromkeys([*made, *looked_up]):
        if atom.frozen is not None or atom not in read:
            continue
        makers = made.get(atom, [])
        producers = [path for contraction in makers for path in paths_of(contraction)] or looked_up[atom]
        kind = "head" if atom.head else "filter" if makers and makers[0].kind == "conv" else "neuron"
        name = distinct(_name(producers[0], kind, makers), taken, "{}#{}")
        taken.add(name)
        consumers = [path for contraction in read[atom] for path in paths_of(contraction)]
        yield Found(name, kind, atom, tuple(dict.fromkeys(producers)), tuple(dict.fromkeys(consumers)))


def _name(producer: str, kind: str, makers: list[Contraction]) -> str:
    """The producer's path; for heads that of the attention module around it."""
    if kind != "head":
        return producer
    parameter = min(makers[0].parameters) if makers else producer
    inside = parameter.rpartition(".")[2] in ("weight", "original0", "original1", "weight_g", "weight_v")
    return (producer.rpartition(".")[0] or producer) if inside else producer


def _frozen(tracker: Tracker, tensors: Mapping[str, Value]) -> list[tuple[str, Reason]]:
    rows: dict[tuple[str, str], Reason] = {}
    for contraction in tracker.contractions:
        atoms = [atom for axis in contraction.made for atom in atoms_of(axis)]
        reason = max(atoms, key=_rank).frozen if atoms and all(atom.frozen for atom in atoms) else None
        if not atoms and any(length(axis) > 1 for axis in contraction.made):
            reason = Reason("the forward reads its units one by one")
        if reason is not None:
            for path in paths_of(contraction):
                rows.setdefault((path, reason.text), reason)
    for name, value in tensors.items():  # layers that only an op without a rule reads, such as an LSTM's
        for atom in (atom for axis in value.axes for atom in atoms_of(axis)):
            if atom.frozen is not None and atom.frozen.text.startswith("no rule"):
                rows.setdefault((owner(name) or name, atom.frozen.text), atom.frozen)
    return [(path, why) for (path, _), why in rows.items()]


def layers_of(analysis: Analysis) -> Iterator[tuple[str, Extent]]:
    """The layers that sum over an axis, in the order of the network, and the axis that each of them makes."""
    for contraction in analysis.tracker.contractions:
        if UNKNOWN not in map(length, contraction.made):
            axes = itertools.product(*map(analysis.extent, contraction.made))
            yield ", ".join(paths_of(contraction)), tuple(sum(parts, ()) for parts in axes)


# Cost ---------------------------------------------------------------------------------------------------------------
Product = tuple[int, tuple[Extent, ...]]  # a factor times the lengths of axes that hold units


@dataclass(frozen=True)
class CostModel:
    """Parameters and multiply-accumulates as functions of the kept units."""

    parameters: tuple[Product, ...]  # one for each tensor
    products: tuple[Product, ...]
    examples: int
    folded: tuple[tuple[int, frozenset[str]], ...] = ()  # parameters that go with the first unit of these dimensions

    def params(self, kept: Kept) -> int:
        extra = sum(count for count, names in self.folded if not names & set(kept))
        return _total(self.parameters, kept) + extra

    def macs(self, kept: Kept) -> int:
        """Multiply-accumulates for one example."""
        return _total(self.products, kept) // self.examples

    def cost(self, kept: Kept) -> Cost:
        return Cost(self.params(kept), self.macs(kept), self.params({}), self.macs({}))


def _total(rows: Iterable[Product], kept: Kept) -> int:
    return sum(factor * math.prod(kept_length(extent, kept) for extent in extents) for factor, extents in rows)


def cost_model(analysis: Analysis, model: nn.Module, batch: Batch) -> CostModel:
    """Collect the sizes of every parameter and every product of the graph."""
    parameters = []
    for name, parameter in model.named_parameters():  # tied parameters count once
        value = analysis.tensors.get(name)
        parameters.append(_row(analysis, value.axes) if value is not None else (parameter.numel(), ()))
    products = [_row(analysis, axes) for axes in analysis.tracker.products if axes and UNKNOWN not in map(length, axes)]
    args, kwargs = call_arguments(batch)
    shapes = [shape_of(value) for value in (*args, *kwargs.values())]
    examples = next((shape[0] for shape in shapes if shape), 1)
    return CostModel(tuple(parameters), tuple(products), examples)


def _row(analysis: Analysis, axes: Iterable[Axis]) -> Product:
    """Axes without units become one factor."""
    extents = [*map(analysis.extent, axes)]
    factor = math.prod(full_length(extent) for extent in extents if not names_in(extent))
    return factor, tuple(filter(names_in, extents))
