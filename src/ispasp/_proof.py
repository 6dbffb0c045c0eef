"""Proof that removing equals masking, for the whole model and at every consumer.

The masked network is the dense graph in which consumers read zeros for removed units, with compensated weights. It runs
before surgery; the pruned module runs after it, on the same examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from ispasp.engine.batches import first_of, signature, tensors_of
from ispasp.engine.graphs import TracedGraph, TracedGraphs, caller, same_path
from ispasp.engine.runner import Edits, Runner
from ispasp.engine.sites import Site
from ispasp.errors import SurgeryError, failing_as
from ispasp.graph.analyse import Analysis, matches, retracked
from ispasp.graph.ops import output_channels, without_bias
from ispasp.graph.state import seeded, succeeds
from ispasp.graph.trace import Batch, cache_on, has_cache, named_tensors, trace
from ispasp.result import Evidence
from ispasp.surgery.remove import undone
from ispasp.surgery.verify import FLOAT32, compare, output_of, set_values, stirred_batch, stirred_tensors, tolerance
from ispasp.types.dimension import Kept, kept_mask
from ispasp.types.plan import Plan

_UNPROVED = "nothing that could be compared depends on it: outputs and consumers are constant, or not finite"
_FEW = 2  # examples to check that a model runs
Outputs = Mapping[int, tuple[Tensor, float]]  # of each site, with the norm it would have if nothing cancelled


@dataclass(frozen=True, eq=False)
class MaskedNetwork:
    """The dense model's graph, its sites, and the edits that mask removed units."""

    model: nn.Module
    analysis: Analysis
    graphs: TracedGraphs
    example: Batch
    sites: Sequence[Site]
    edits: Edits
    kept: Kept

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.model)

    @cached_property
    def layers(self) -> dict[int, tuple[nn.Module, int]]:
        """Sites that are layers whose outputs can be watched: the layer, and which of its calls that is."""
        return _layers(self.graphs.first, self)


@dataclass(frozen=True, eq=False)
class Run:
    """The masked network on one batch."""

    batch: Batch
    graph: TracedGraph
    outputs: list[Tensor]
    at: Outputs
    varies: frozenset[int]  # sites whose product varies
    reached: frozenset[int]  # sites that the outputs depend on
    values: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that were given other values


@dataclass(frozen=True, eq=False)
class Expected:
    """Outputs of the masked network, taken before surgery."""

    net: MaskedNetwork
    runs: tuple[Run, ...]
    shapes: tuple[Batch, ...]  # batches of other shapes that the pruned model has to run on
    precise: tuple[Outputs, list[Tensor]] | None = None  # in float64: sites and outputs
    cached: bool = False  # whether the dense model runs with a cache

    @property
    def limit(self) -> float:
        """The relative difference that rounding explains."""
        return max(tolerance(run.graph.trace) for run in self.runs)

    @property
    def unproved(self) -> dict[str, str]:
        """Hidden dimensions with a site that no run could check."""
        told = {n for run in self.runs for n in (run.varies & self.net.layers.keys()) | run.reached}
        rows = [site for site in self.net.sites if site.number not in told]
        return {name: _UNPROVED for site in rows for name in sorted(site.names & set(self.net.kept))}


def expect(net: MaskedNetwork) -> Expected:
    """Run the masked network on the example, and on batches that take another path through the model.

    If outputs and consumers prove nothing (a gate that is zero, outputs that are not finite), it runs once more with
    other values in all-zero tensors. Half precision is proved in float64.
    """
    graphs, example = net.graphs, net.example
    runs, shapes = [_masked(net, example, graphs.of(example))], list[Batch]()
    for batch, graph in graphs.kinds:
        if not same_path(graphs.first.trace, graph.trace):
            runs.append(_masked(net, batch, graph))
        elif signature(first_of(batch, _FEW)) != signature(example):
            shapes.append(batch)
    with cache_on():
        cached = has_cache(net.model, example) and succeeds(lambda: output_of(net.model, example))
    found = Expected(net, tuple(runs), tuple(shapes), cached=cached)
    if found.limit > FLOAT32:
        found = replace(found, precise=_precise(net))
    if found.unproved:
        # not weight_norm's tensors: surgery rescales them by their values
        norms = {name for walk in net.analysis.walks for norm in walk.weight_norms for name in (norm.v, norm.g)}
        values = stirred_tensors(net.tensors, net.edits.tensors)
        values = {name: value for name, value in values.items() if name not in norms}
        other = _masked(net, stirred_batch(example), graphs.of(example), values)
        found = replace(found, runs=(*found.runs, other))
    return found


def look_closer(expected: Expected) -> Expected | None:
    """Run the masked network in float64 as well; None if that fails or is done. The model must be dense."""
    if expected.precise is not None or expected.limit < FLOAT32:
        return None
    precise = _precise(expected.net)
    return None if precise is None else replace(expected, precise=precise)


def compared(expected: Expected, model: nn.Module, plan: Plan) -> Evidence:
    """Run the pruned module and compare it with what was expected."""
    net, errors, outputs, total, seen = expected.net, dict[int, float](), 0, 0.0, set[int]()
    for run in expected.runs:
        found, at = _watched(expected, model, run, plan)
        outcome = compare(found, run.outputs)
        vouched = at.keys() & run.varies >= run.at.keys()  # then flipped comparisons are rounding
        error = outcome.error if vouched else max(outcome.error, outcome.flipped)
        outputs, total = outputs + outcome.entries, max(total, error)
        for number in run.at:
            errors[number] = max(errors.get(number, 0.0), at.get(number, error))
        seen |= at.keys() & run.varies
    for batch in expected.shapes:
        try:
            output_of(model, first_of(batch, _FEW))
        except Exception:  # it may need more examples
            _runs(model, batch)
    if expected.cached:
        with cache_on():
            _runs(model, net.example, " with use_cache=True")
    certificates: dict[str, float | None] = {}
    for site in net.sites:
        for name in site.names & set(net.kept):
            certificates[name] = max(certificates.get(name) or 0.0, errors[site.number])
    unproved = expected.unproved
    certificates |= dict.fromkeys(unproved, None)
    total = max([total, *errors.values()])
    kinds = len(expected.runs) + len(expected.shapes) - any(run.values for run in expected.runs)
    precise = None if expected.precise is None else _precise_error(expected, model)
    return Evidence(total, expected.limit, certificates, unproved, outputs, len(seen), kinds, precise)


# The masked network ---------------------------------------------------------------------------------------------
def _masked(net: MaskedNetwork, batch: Batch, graph: TracedGraph, values: Mapping[str, Tensor] | None = None) -> Run:
    edits = net.edits | Edits(tensors=values or {})
    runner = Runner(graph, batch, net.tensors, edits, slicing=False)
    at: dict[int, tuple[Tensor, float]] = {}
    varies: set[int] = set()
    constant = {n for n, cuts in edits.cuts.items() if not all(bool(cut.stays.any()) for cut in cuts)}  # reads nothing
    with seeded():
        for number, node, y in _stops(net, runner):
            size = runner.magnitude(number) if number in net.layers else 0.0
            at[number] = _kept_outputs(net, number, y), size
            product = without_bias(node, y, runner.arguments(number))
            if number in constant or bool((torch.isfinite(product) & (product != 0)).any()):
                varies.add(number)
        outputs = tensors_of(runner.advance())
    reached = _reached(net, graph, batch, edits) | constant if compare(outputs, outputs).entries else frozenset[int]()
    return Run(batch, graph, outputs, at, frozenset(varies), reached, values or {})


def _stops(net: MaskedNetwork, runner: Runner) -> Iterator[tuple[int, fx.Node, Tensor]]:
    """Run up to each site that the graph has; yields its number, node and output."""
    for site in net.sites:
        node = runner.graph.contractions.get(site.number)
        if node is not None:
            runner.advance(node)
            yield site.number, node, runner.value(node)


def _reached(net: MaskedNetwork, graph: TracedGraph, batch: Batch, edits: Edits) -> frozenset[int]:
    """Sites outside of watched layers whose input the outputs depend on."""
    probed = {site.number: site.contraction.data for site in net.sites if site.number not in net.layers}
    if not probed:
        return frozenset()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            runner = Runner(graph, batch, net.tensors, edits, slicing=False, probed=probed)
            outputs = [t for t in tensors_of(runner.advance()) if t.requires_grad]
            seeds = [torch.randn_like(t) for t in outputs]
            zeros = [runner.probes[number][1] for number in probed]
            gradients = torch.autograd.grad(outputs, zeros, seeds, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # an op without a derivative
        return frozenset()
    pairs = zip(probed, gradients, strict=True)
    return frozenset(number for number, g in pairs if g is not None and bool((g != 0).any()))


def _cuts_outputs(net: MaskedNetwork, number: int) -> bool:
    """Whether a contraction's own units lie on a plain axis of its output."""
    contraction = net.analysis.tracker.contractions[number]
    return output_channels(contraction.node) is not None and len(contraction.made) == 1


def _kept_outputs(net: MaskedNetwork, number: int, y: Tensor) -> Tensor:
    """The kept part of a contraction's outputs, if they are units themselves."""
    if not _cuts_outputs(net, number):
        return y
    contraction = net.analysis.tracker.contractions[number]
    mask = kept_mask(net.analysis.extent(contraction.made[0]), net.kept)
    return y.index_select(output_channels(contraction.node) or 0, torch.nonzero(mask).flatten().to(y.device))


# The pruned module ----------------------------------------------------------------------------------------------
def _watched(expected: Expected, model: nn.Module, run: Run, plan: Plan) -> tuple[list[Tensor], dict[int, float]]:
    """The pruned module's outputs on a batch, and its errors at the layers that can be watched."""
    with undone() as undo, _watching({layer for layer, _ in expected.net.layers.values()}) as seen:
        set_values(model, run.values, plan, undo)
        found = _runs(model, run.batch)
    errors = {}
    for number, (layer, call) in _layers(run.graph, expected.net).items():
        if call < len(seen.get(layer, ())):
            y, (wanted, size) = seen[layer][call], run.at[number]
            fits = isinstance(y, Tensor) and y.numel() == wanted.numel()
            errors[number] = _difference([y.reshape(wanted.shape)] if fits else [], wanted, size)
    return found, errors


def _difference(found: Sequence[Tensor], expected: Tensor, size: float) -> float:
    """Smallest relative difference, by the expected norm or the larger one it has if nothing cancels."""
    error = min((compare([y], [expected]).error for y in found), default=float("inf"))
    own = float(torch.where(torch.isfinite(expected), expected, torch.zeros_like(expected)).double().norm())
    return error * own / size if size > own > 0 else error


@contextmanager
def _watching(layers: set[nn.Module]) -> Iterator[dict[nn.Module, list[Any]]]:
    """Record the outputs of these layers, call by call."""
    seen: dict[nn.Module, list[Any]] = {}

    def hook(layer: nn.Module, _args: Any, output: Any) -> None:
        seen.setdefault(layer, []).append(output.clone() if isinstance(output, Tensor) else output)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(hook, prepend=True))  # before hooks that change it
        yield seen


def _layers(graph: TracedGraph, net: MaskedNetwork) -> dict[int, tuple[nn.Module, int]]:
    """For each site that is the product of a layer: the layer, and which of its calls that is."""
    numbers = {graph.contractions[site.number]: site.number for site in net.sites}
    counts: dict[nn.Module, int] = {}
    found = {}
    for node in graph.nodes:
        layer = caller(node, net.model)
        # the output of a linear layer or a convolution is the product with its weight
        one = isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)) or type(layer).__name__ == "Conv1D"
        if layer is not None and one and output_channels(node) is not None:
            if node in numbers:
                found[numbers[node]] = (layer, counts.get(layer, 0))
            counts[layer] = counts.get(layer, 0) + 1
    return found


def _runs(model: nn.Module, batch: Batch, how: str = "") -> list[Tensor]:
    remedy = "pass round_to=8 if its kernels want even widths; else check that it does the same on every call"
    what = f"the pruned model fails on a batch of shapes {signature(batch)[1:]}{how}"
    with failing_as(SurgeryError, what, f"the model is as it was; {remedy}"):
        return output_of(model, batch)


# In float64 -----------------------------------------------------------------------------------------------------
# A refit to few examples amplifies rounding, and in half precision a wrong unit could hide. In float64 the graph of
# the pruned model runs against the masked graph of the dense one: the difference is surgery, not rounding.


def _precise(net: MaskedNetwork) -> tuple[Outputs, list[Tensor]] | None:
    """The masked network in float64, or None where an op does not run in it."""
    try:
        at, outputs = _run_precisely(net, net.graphs.of(net.example), net.edits, net.tensors)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return {n: (_kept_outputs(net, n, y), size) for n, (y, size) in at.items()}, outputs


def _precise_error(expected: Expected, model: nn.Module) -> float:
    """Largest relative difference of the pruned model's graph, at outputs and consumers.

    Whole numbers are compared at consumers only: a comparison that rounding flips proves nothing.
    """
    net, (wanted_at, wanted) = expected.net, expected.precise or ({}, [])
    traced = trace(model, net.example)
    found = matches(net.analysis.tracker, retracked(model, traced))
    at, outputs = _run_precisely(net, TracedGraph(traced, found), Edits(), named_tensors(model))
    errors = [compare(outputs, wanted).error]
    for number in at.keys() & wanted_at.keys():
        (y, _), (expected_y, size) = at[number], wanted_at[number]
        if y.numel() == expected_y.numel() or _cuts_outputs(net, number):  # else only the outputs are compared
            errors.append(_difference(_arranged(y, expected_y), expected_y, size))
    return max(errors)


def _run_precisely(
    net: MaskedNetwork, graph: TracedGraph, edits: Edits, tensors: Mapping[str, Tensor]
) -> tuple[Outputs, list[Tensor]]:
    with torch.no_grad(), seeded():
        runner = Runner(graph, net.example, tensors, edits, slicing=False, precise=True)
        found = {number: (y, runner.magnitude(number)) for number, _, y in _stops(net, runner)}
        return found, tensors_of(runner.advance())


def _arranged(y: Tensor, expected: Tensor) -> list[Tensor]:
    """A consumer's output in another's shape. Replaced attention may have examples before positions."""
    if y.numel() != expected.numel():
        return []
    other = [y.transpose(0, 1)] if y.ndim > 2 and y.shape != expected.shape else []
    return [z.reshape(expected.shape) for z in (y, *other)]
