"""Try surgery on a model: which hidden dimensions can shrink, and which attributes must be corrected for it.

The graph says what may be removed. The trial checks that the model's own forward runs with fewer units and equals
masking, on one short example if that takes the same path through the model as the batch.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.engine.batches import first_of, tensors_of
from ispasp.engine.graphs import TracedGraph, TracedGraphs, same_path
from ispasp.engine.sites import sites
from ispasp.errors import InputError, TraceError
from ispasp.graph.analyse import Analysis, cost_model, owner
from ispasp.graph.atoms import atoms_of
from ispasp.graph.state import state_kept, succeeds
from ispasp.graph.trace import Batch, Trace, cache_on, call_arguments, evaluating, has_cache, run_and_restore
from ispasp.surgery.attention import SlimMultiheadAttention
from ispasp.surgery.corrections import alike, candidates, common_path, is_builtin, search
from ispasp.surgery.remove import read_number, removed
from ispasp.surgery.verify import Failure, Frame, attempt, masked_output, relative_error, shared, tolerance
from ispasp.types.dimension import Attribute, Structure, TensorLayout, full_length, names_in
from ispasp.types.plan import Plan

_TOKENS = 32
_CHEAP = 10**8  # multiply-accumulates of a pass that costs less than tracing the model again
_MOST_ROUNDS = 60
_MOST_CORRECTED = 3  # each costs many forward passes
_FRACTIONS = (0.5, 0.4, 0.6, 0.45, 0.55)
Kept = Mapping[str, tuple[int, ...]]
Key = tuple[str, str]  # module and name of an attribute
Pair = tuple[int, int]  # units of a dimension, and how many of them are kept


def short_example(batch: Batch, rows: int) -> Batch:
    """The first rows of a batch; of tokens the first or last 32, whichever has less padding."""
    few = first_of(batch, rows)
    length = next((t.shape[1] for t in tensors_of(few) if t.ndim == 2 and not t.is_floating_point()), 0)
    if length <= _TOKENS:
        return few

    def cut(window: slice) -> Batch:
        def shorter(t: Tensor) -> Tensor:
            return t[tuple(window if k and size == length else slice(None) for k, size in enumerate(t.shape))].clone()

        return pytree.tree_map_only(Tensor, shorter, few)

    def tokens(part: Batch) -> int:
        return sum(int(t.count_nonzero()) for t in tensors_of(part) if not t.is_floating_point())

    return max(cut(slice(0, _TOKENS)), cut(slice(length - _TOKENS, length)), key=tokens)


def traced_example(model: nn.Module, batch: Batch, analysis: Analysis) -> tuple[Batch, TracedGraph]:
    """Choose what to try the model on, with its graph: one or two short examples on the same path, or the batch."""
    for rows in () if _is_cheap(model, batch, analysis) else (1, 2):
        short = short_example(batch, rows)
        if 2 * sum(t.numel() for t in tensors_of(short)) >= sum(t.numel() for t in tensors_of(batch)):
            break  # it would not be worth a trace of its own
        with suppress(InputError, TraceError):
            graph = TracedGraphs(model, analysis, batch, ()).of(short)
            if _ops(graph.trace) == _ops(analysis.trace):
                return short, graph
    return batch, TracedGraph.of(analysis)


def _is_cheap(model: nn.Module, batch: Batch, analysis: Analysis) -> bool:
    costs = cost_model(analysis, model, batch)
    return costs.macs({}) * costs.examples <= _CHEAP


def _ops(trace: Trace) -> list[str]:
    """All ops in order, except `expand`, which models omit for a single example."""
    called = [node.target for node in trace.graph.nodes if node.op == "call_function"]
    return [str(target) for target in called if target is not torch.ops.aten.expand.default]


def two_choices(units: Mapping[str, int], seed: int = 0) -> tuple[Kept, Kept]:
    """Two random choices of about half of the units of each dimension.

    Dimensions of equal size keep different numbers, none in proportion to another, so that a forward that reads the
    size of one for another is found out. Where numbers run out, no two have the same in both choices; there a dimension
    may be whole in the second. Larger numbers stay multiples of four, which some kernels want.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    firsts: Counter[Pair] = Counter()
    seconds: Counter[Pair] = Counter()
    both: Counter[tuple[int, int, int]] = Counter()
    choices: tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]] = ({}, {})
    for number, (name, size) in enumerate(units.items()):
        step = 4 if size >= 16 else 1
        counts = range(step, size, step)
        wishes = [size * _FRACTIONS[(number + shift) % len(_FRACTIONS)] for shift in (0, 2)]
        a = min(counts, key=lambda n: (firsts[size, n], abs(n - wishes[0])))
        b = min((*counts, size), key=lambda n: (both[size, a, n], n in (a, size), seconds[size, n], abs(n - wishes[1])))
        firsts[size, a] += 1
        seconds[size, b] += 1
        both[size, a, b] += 1
        for kept, count in zip(choices, (a, b), strict=True):
            if count < size:
                kept[name] = tuple(sorted(torch.randperm(size, generator=generator, device="cpu")[:count].tolist()))
    return choices


# Where units lie ------------------------------------------------------------------------------------------------
def structure_of(model: nn.Module, analysis: Analysis, corrections: Iterable[Attribute] = ()) -> Structure:
    """Layout of the units of the named dimensions in tensors and attributes; trials found these `corrections`."""
    units = {name: atom.size for atom, name in analysis.names.items()}
    tensors = {}
    for name, value in analysis.tensors.items():
        extents = [analysis.extent(axis) for axis in value.axes]
        axes = {k: extent for k, extent in enumerate(extents) if names_in(extent)}
        if axes:
            tensors[name] = TensorLayout(tuple(map(full_length, extents)), axes)
    found = {}
    for parameter, name, axis in (size for walk in analysis.walks for size in walk.sizes):
        module, extent = owner(parameter), analysis.extent(axis)
        if names_in(extent) and read_number(model.get_submodule(module), name) == full_length(extent):
            found[module, name] = Attribute(module, name, extent)
    found |= {_key(a): a for a in _attention_heads(model, analysis)}
    for a in corrections:
        left = a.without(names_in(a.extent) - units.keys())  # some dimensions were refused
        if names_in(left.extent):
            found.setdefault(_key(a), left)
    norms = dict.fromkeys(norm for walk in analysis.walks for norm in walk.weight_norms)
    return Structure(type(model).__name__, units, tensors, tuple(found.values()), tuple(norms))


def _attention_heads(model: nn.Module, analysis: Analysis) -> Iterator[Attribute]:
    """`num_heads` of torch's attention modules, which the graph does not show."""
    for path, module in model.named_modules():
        value = analysis.tensors.get(f"{path}.out_proj.weight")
        if value is None or not isinstance(module, (nn.MultiheadAttention, SlimMultiheadAttention)):
            continue
        for atom in atoms_of(value.axes[1]):
            if atom in analysis.names and atom.size == module.num_heads:
                yield Attribute(path, "num_heads", (((analysis.names[atom], atom.size),),))


# The trial ------------------------------------------------------------------------------------------------------
@dataclass
class Trial:
    """A trial in progress: corrections found so far, and refused dimensions with the reason."""

    model: nn.Module
    batch: Batch
    analysis: Analysis
    structure: Structure
    refused: dict[str, str] = field(default_factory=dict)
    _example: Batch = field(init=False)  # the batch to run the model on
    _graph: TracedGraph = field(init=False)
    _limit: float = field(init=False)  # largest relative error allowed
    _cached: bool = field(init=False)  # whether to call the model with its cache
    _searched: set[Key] = field(default_factory=set)  # corrections found by trial, not by the graph
    _by_analogy: set[Key] = field(default_factory=set)  # corrections taken over from another module
    _dropped: set[Key] = field(default_factory=set)  # those of them that did harm

    def __post_init__(self) -> None:
        self._example, self._graph = traced_example(self.model, self.batch, self.analysis)
        self._limit = tolerance(self._graph.trace)
        self._cached = has_cache(self.model, self._example)

    def run(self) -> None:
        """Try all dimensions with two choices of units, until the model runs with both and equals masking."""
        choices: tuple[Kept, ...] = two_choices(self.structure.units)
        if _is_cheap(self.model, self.batch, self.analysis):
            # A third choice, for errors that two miss by chance: in reverse order, so that other neighbours are larger.
            backwards = dict(reversed(list(self.structure.units.items())))
            choices = (*choices, two_choices(backwards, seed=1)[0])
        for _ in range(_MOST_ROUNDS):
            if all(self._passes(self._left(choice)) for choice in choices):
                self._try_training(self._left(choices[0]))
                return
        why = f"no way to remove it was found in {_MOST_ROUNDS} trials"
        self.refused.update(dict.fromkeys(self._left(choices[0]), why))

    def run_without(self, names: Sequence[str]) -> None:
        """Try to remove these dimensions entirely; those that must keep a unit are refused."""
        kept: Kept = {}
        layouts = ((self.structure.tensors.get(norm.v), norm.dim) for norm in self.structure.weight_norms)
        normed = {name for layout, dim in layouts if layout for name in names_in(layout.axes.get(dim, ()))}
        for name in names:
            if name in normed:
                self.refused[name] = "torch cannot compute the weight norm of a layer without units"
            elif reaches_output(self.analysis, {**kept, name: ()}):
                kept = {**kept, name: ()}
            else:
                self.refused[name] = "without it the output of the model would not depend on its input"
        while kept and self._is_wrong(kept):
            for name in _bisect(kept, self._is_wrong) or [self._last_straw(kept)]:
                outcome, _ = self._try({name: ()})
                why = "removing all its units does not equal masking them"
                self.refused[name] = _text(outcome) if isinstance(outcome, Failure) else why
            kept = self._left(kept)
        if kept and (tokens := cached_tokens(self.model, self._example)):
            for name in _bisect(kept, lambda part: self._caches(part) != tokens):
                self.refused[name] = "the cache of a generating model counts its tokens there"

    def _caches(self, kept: Kept) -> int:
        with removed(self.model, Plan(kept, self.structure)):
            return cached_tokens(self.model, self._example)

    def _left(self, choice: Kept) -> Kept:
        return {name: kept for name, kept in choice.items() if name not in self.refused}

    def _passes(self, kept: Kept) -> bool:
        """Whether these units can be removed; if not, adopt corrections or refuse dimensions."""
        if not kept:
            return True
        outcome, found = self._try(kept, searching=True)
        error = math.inf if isinstance(outcome, Failure) else self._error(outcome, kept)
        if error <= self._limit:
            return True
        if self._cached and self._is_wrong({}):
            self._cached = False  # the dense model fails with its cache, or computes something else
        elif not isinstance(outcome, Failure):
            self._correct_difference(kept, error)
        elif not self._adopt(found, kept) and not self._drop(outcome):
            self._give_up(outcome, kept)
        return False

    def _try(self, kept: Kept, *, searching: bool = False) -> tuple[list[Tensor] | Failure, tuple[Attribute, ...]]:
        """Remove units, run, and put them back. If the model fails, search corrections before that.

        A model with a cache is called with it, as the user will; without it, where that fails.
        """
        found: tuple[Attribute, ...] = ()
        with removed(self.model, Plan(kept, self.structure)):
            with cache_on() if self._cached else nullcontext():
                outcome = attempt(self.model, self._example)
            if isinstance(outcome, Failure) and self._cached:
                plainly = attempt(self.model, self._example)
                outcome = plainly if isinstance(plainly, Failure) else replace(outcome, cached=True)
            if isinstance(outcome, Failure) and searching:
                with cache_on() if outcome.cached else nullcontext():
                    found = search(outcome, self.structure, kept)
        return outcome, found

    def _error(self, outcome: Sequence[Tensor], kept: Kept) -> float:
        expected = masked_output(self.analysis, self.model, self._example, kept, self._graph)
        return relative_error(shared(outcome, expected) if self._cached else outcome, expected)

    # The forward fails ------------------------------------------------------------------------------------------
    def _adopt(self, found: Sequence[Attribute], kept: Kept) -> bool:
        """Adopt corrections, for all modules of the same class. Returns whether any was new."""
        known = {_key(a) for a in self.structure.attributes}
        more = [a for a in alike(self.model, found, self.structure, kept) if _key(a) not in self._dropped]
        new = {_key(a): a for a in (*more, *found) if _key(a) not in known}
        self._by_analogy |= set(new) - {_key(a) for a in found}
        self._searched |= set(new)
        self.structure = replace(self.structure, attributes=(*self.structure.attributes, *new.values()))
        return bool(new)

    def _drop(self, failure: Failure) -> bool:
        """Take back corrections by analogy in the modules that fail now. Returns whether there were any."""
        paths = {frame.path for frame in failure.stack}
        harmful = {key for key in self._by_analogy if key[0] in paths}
        keep = tuple(a for a in self.structure.attributes if _key(a) not in harmful)
        self.structure = replace(self.structure, attributes=keep)
        self._by_analogy -= harmful
        self._dropped |= harmful
        return bool(harmful)

    def _give_up(self, failure: Failure, kept: Kept) -> None:
        """Refuse the dimensions of the innermost module that fails with one of them alone.

        A dimension that only needs a correction, which could not be found while another one fails, gets it.
        """
        for frame in reversed(failure.stack):
            if is_builtin(frame.module):
                continue
            inside = [name for name in kept if self._tensors(name, frame.path)]
            known = len(self.structure.attributes)
            alone = {name: failure if len(inside) < 2 else self._fails_alone(name, kept) for name in inside}
            guilty = {name: f"fails with fewer units: {_text(found)}" for name, found in alone.items() if found}
            if guilty:
                self._refuse(guilty, kept, frame)
            if guilty or len(self.structure.attributes) > known:
                return
        self.refused.update(dict.fromkeys(kept, f"the model fails with fewer units: {_text(failure)}"[:300]))

    def _refuse(self, guilty: dict[str, str], kept: Kept, frame: Frame) -> None:
        """Refuse dimensions, and those at the same place in other modules of the same class: they run the same code."""
        cls = type(frame.module)
        where = f"the forward of {frame.path or 'the model'} ({cls.__name__})"
        same = () if cls.__module__.startswith("torch.nn") else self.model.named_modules()
        for path, module in same:
            if type(module) is cls:
                more = {path + name.removeprefix(frame.path): why for name, why in guilty.items()}
                guilty = {**{name: why for name, why in more.items() if name in kept}, **guilty}
        self.refused.update({name: f"{where} {why}"[:300] for name, why in guilty.items()})

    def _fails_alone(self, name: str, kept: Kept) -> Failure | None:
        """How the forward fails if only this dimension loses units; a correction that helps is adopted."""
        only = {name: kept[name]}
        outcome, found = self._try(only, searching=True)
        return outcome if isinstance(outcome, Failure) and not self._adopt(found, only) else None

    def _tensors(self, name: str, path: str = "") -> list[str]:
        inside = ((tensor, layout.axes) for tensor, layout in self.structure.tensors.items() if _within(tensor, path))
        return [tensor for tensor, axes in inside if any(name in names_in(extent) for extent in axes.values())]

    # The forward runs, but differs from masking -------------------------------------------------------------------
    def _correct_difference(self, kept: Kept, error: float) -> None:
        """Find the guilty dimensions: an attribute may be wrong without making the forward fail."""
        guilty = _bisect(kept, self._is_wrong) or [self._last_straw(kept)]
        for name in guilty[:_MOST_CORRECTED]:
            if self._corrected(name, kept):
                return
        why = f"removing its units does not equal masking them (relative error {error:.1e})"
        self.refused.update(dict.fromkeys(guilty, why))

    def _last_straw(self, kept: Kept) -> str:
        """If only a combination is wrong: the dimension that makes it so, adding one after the other."""
        names = list(kept)
        counts = range(1, len(names))  # all of them are wrong: the last need not be tried
        return names[bisect_left(counts, True, key=lambda n: self._is_wrong(_part(kept, names[:n])))]

    def _is_wrong(self, kept: Kept) -> bool:
        outcome, _ = self._try(kept)
        return isinstance(outcome, Failure) or self._error(outcome, kept) > self._limit

    def _corrected(self, name: str, kept: Kept) -> bool:
        """Adopt corrections that make the removal of a dimension equal masking. Returns whether there are any."""
        path, only, before = common_path(self._tensors(name)), {name: kept[name]}, self.structure
        told = tuple(a for a in before.attributes if _key(a) not in self._searched or not _within(a.module, path))
        for chosen in candidates(path, self.model, replace(before, attributes=told), only):
            self.structure = replace(before, attributes=(*told, *chosen))
            if not self._is_wrong(only):
                new = set(map(_key, chosen))
                if new <= set(map(_key, before.attributes)):
                    break
                self._searched |= new
                self._adopt(chosen, kept)
                return True
        self.structure = before
        return False

    # Training -----------------------------------------------------------------------------------------------------
    def _try_training(self, kept: Kept) -> None:
        """Refuse the dimensions whose removal breaks training mode, if that takes another path than eval mode."""
        training = self.analysis.training
        if not self.analysis.by_mode or (training and same_path(training.trace, self.analysis.trace)):
            return
        if _trains(self.model, self.batch):
            guilty = _bisect(kept, self._fails_in_training)
            self.refused.update(dict.fromkeys(guilty, "the forward in training mode fails with fewer units"))

    def _fails_in_training(self, kept: Kept) -> bool:
        with removed(self.model, Plan(kept, self.structure)):
            return not _trains(self.model, self.batch)


def reaches_output(analysis: Analysis, kept: Kept) -> bool:
    """Whether the model's output depends on its input with these units only: a product that reads none is a constant.

    >>> from ispasp.graph.analyse import analyse
    >>> found = analyse(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4))
    >>> reaches_output(found, {"0": (3,)}), reaches_output(found, {"0": ()})
    (True, False)
    """
    where = {site.contraction.node: site.cuts(kept) for site in sites(analysis, kept)}
    constant = {node for node, cuts in where.items() if not all(bool(cut.stays.any()) for cut in cuts)}
    sources = analysis.trace.sources
    reached = {node for node in analysis.trace.graph.find_nodes(op="placeholder") if sources[node.name].kind == "input"}
    for node in analysis.trace.graph.nodes:
        if node not in constant and reached.intersection(node.all_input_nodes):
            reached.add(node)
    return analysis.trace.graph.output_node() in reached


def cached_tokens(model: nn.Module, batch: Batch) -> int:
    """Number of tokens in the cache that a Hugging Face model fills; 0 without a cache."""
    if "use_cache" not in inspect.signature(model.forward).parameters:
        return 0
    args, kwargs = call_arguments(batch)
    with evaluating(model), state_kept(model):
        output = model(*args, **{**kwargs, "use_cache": True})
    count = getattr(getattr(output, "past_key_values", None), "get_seq_length", None)
    return int(count()) if callable(count) else 0


def _trains(model: nn.Module, batch: Batch) -> bool:
    with evaluating(model, training=True), torch.random.fork_rng(devices=[]):
        return succeeds(lambda: run_and_restore(model, batch))


def _bisect(kept: Kept, wrong: Callable[[Kept], bool]) -> list[str]:
    """The dimensions that are wrong on their own."""
    if not kept or not wrong(kept):
        return []
    names, half = list(kept), len(kept) // 2
    if not half:
        return names
    return [*_bisect(_part(kept, names[:half]), wrong), *_bisect(_part(kept, names[half:]), wrong)]


def _part(kept: Kept, names: Sequence[str]) -> Kept:
    return {name: kept[name] for name in names}


def _key(attribute: Attribute) -> Key:
    return attribute.module, attribute.name


def _text(failure: Failure) -> str:
    text = (str(failure.error).strip().splitlines() or [type(failure.error).__name__])[0]
    return f"{text} (with use_cache=True)" if failure.cached else text


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
