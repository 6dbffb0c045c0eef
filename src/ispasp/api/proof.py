"""Proof that removing equals masking, for the whole model and at every consumer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.api.evidence import Evidence, Setting, kept_outputs
from ispasp.api.precise import precise_proof
from ispasp.calibrate.batches import signature
from ispasp.calibrate.circuit import Circuit, Edits, caller
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.rows import first_examples
from ispasp.calibrate.traces import same_way
from ispasp.errors import SurgeryError
from ispasp.graph.ops import output_channels, without_bias
from ispasp.graph.trace import Batch
from ispasp.surgery.masking import tensors_in
from ispasp.surgery.remove import all_or_nothing
from ispasp.surgery.stir import set_values, stirred_batch, stirred_tensors
from ispasp.surgery.verify import FLOAT32, compare, output_of, tolerance
from ispasp.types.plan import Plan

_UNPROVED = "nothing that could be compared depends on it: outputs and consumers are constant, or not finite"


@dataclass(frozen=True, eq=False)
class _Run:
    """The masked network on one batch: its outputs, what each reader gave, and which of them these can prove."""

    batch: Batch
    circuit: Circuit
    outputs: list[Tensor]
    at: Mapping[int, tuple[Tensor, float]]  # with the norm it would have if nothing cancelled
    telling: set[int]  # readers whose product varies
    reached: set[int]  # readers that the outputs depend on
    values: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that were given other values


class Proof:
    """What the masked network gives, to be compared with what the pruned module gives.

    The masked network is the graph of the dense model in which consumers read zeros for removed units, with
    compensated weights where there are any; it is run before surgery. Where its outputs and consumers cannot tell
    (a gate that is zero, outputs that are not finite), it is run once more with other values in tensors of zeros.
    """

    def __init__(self, setting: Setting, example: Batch) -> None:
        """Run the masked network on the example, and on batches that take another way through the model."""
        self._setting = setting
        self._example = example
        circuits = setting.circuits
        self._calls = _calls(circuits.first, setting)  # readers that are layers, whose outputs can be watched
        self._runs = [self._masked(example, circuits.of(example), {})]
        self._shapes: list[Batch] = []
        for batch, circuit in circuits.kinds:
            if not same_way(circuits.first.trace, circuit.trace):
                self._runs.append(self._masked(batch, circuit, {}))
            elif signature(_few(batch)) != signature(example):
                self._shapes.append(batch)
        self._precise = precise_proof(setting, example) if self._half_precision else None
        if self._unproved(self._runs):
            values = self._other_values()
            self._runs.append(self._masked(stirred_batch(example), circuits.of(example), values))

    @property
    def _half_precision(self) -> bool:
        return max(tolerance(run.circuit.trace) for run in self._runs) > FLOAT32

    def look_closer(self) -> bool:
        """Run the masked network in float64 as well, if it can and that has not been done; the model must be dense."""
        if self._precise is not None or max(tolerance(run.circuit.trace) for run in self._runs) < FLOAT32:
            return False
        self._precise = precise_proof(self._setting, self._example)
        return self._precise is not None

    def compare(self, model: nn.Module, plan: Plan) -> Evidence:
        """Run the pruned module and compare."""
        setting, errors, outputs, total, seen = self._setting, dict[int, float](), 0, 0.0, set[int]()
        for run in self._runs:
            found, at = self._found(model, run, plan)
            outcome = compare(found, run.outputs)
            vouched = at.keys() & run.telling >= run.at.keys()  # then flipped comparisons are rounding
            error = outcome.error if vouched else max(outcome.error, outcome.flipped)
            outputs, total = outputs + outcome.entries, max(total, error)
            for number in run.at:
                errors[number] = max(errors.get(number, 0.0), at.get(number, error))
            seen |= at.keys() & run.telling
        for batch in self._shapes:
            _check_runs(model, batch)
        limit = max(tolerance(run.circuit.trace) for run in self._runs)
        unproved = self._unproved(self._runs)
        certificates: dict[str, float | None] = {}
        for reader in setting.readers:
            for name in reader.names & set(setting.kept):
                known = certificates.get(name)
                certificates[name] = max(known or 0.0, errors[reader.number])
        certificates |= dict.fromkeys(unproved, None)
        total = max([total, *(e for e in errors.values())])
        kinds = len(self._runs) + len(self._shapes) - any(run.values for run in self._runs)
        precise = None if self._precise is None else self._precise.error(model)
        return Evidence(total, limit, certificates, unproved, outputs, len(seen), kinds, precise)

    def _other_values(self) -> dict[str, Tensor]:
        """Values for tensors of zeros; weight_norm's stay, because surgery rescales them by what they are."""
        norms = {name for walk in self._setting.analysis.walks for v, g, _ in walk.weight_norms for name in (v, g)}
        found = stirred_tensors(self._setting.tensors, self._setting.edits.tensors)
        return {name: value for name, value in found.items() if name not in norms}

    def _masked(self, batch: Batch, circuit: Circuit, values: Mapping[str, Tensor]) -> _Run:
        s = self._setting
        edits = Edits(s.edits.cuts, {**s.edits.tensors, **values}, s.edits.biases)
        at: dict[int, tuple[Tensor, float]] = {}
        telling: set[int] = set()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            passage = Passage(circuit, batch, s.tensors, edits, slicing=False)
            for reader in s.readers:
                node = circuit.contractions[reader.number]
                passage.advance(node)
                y = passage.value(node)
                size = passage.magnitude(reader.number) if reader.number in self._calls else 0.0
                at[reader.number] = kept_outputs(s, reader.number, y), size
                product = without_bias(node, y, passage.arguments(reader.number))
                if bool((torch.isfinite(product) & (product != 0)).any()):
                    telling.add(reader.number)
            outputs = tensors_in(passage.advance())
        reached = self._reached(circuit, batch, edits) if compare(outputs, outputs).entries else set()
        return _Run(batch, circuit, outputs, at, telling, reached, values)

    def _reached(self, circuit: Circuit, batch: Batch, edits: Edits) -> set[int]:
        """Readers, of those that are no layers that can be watched, whose input the outputs depend on."""
        s = self._setting
        open_ = [reader for reader in s.readers if reader.number not in self._calls]
        if not open_:
            return set()
        try:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                passage = Passage(circuit, batch, s.tensors, edits, slicing=False)
                passage.probe({reader.number: reader.contraction.data for reader in open_})
                outputs = [t for t in tensors_in(passage.advance()) if t.requires_grad]
                seeds = [torch.randn_like(t) for t in outputs]
                zeros = [passage.probes[reader.number][1] for reader in open_]
                gradients = torch.autograd.grad(outputs, zeros, seeds, allow_unused=True)
        except (RuntimeError, NotImplementedError):  # an op without a derivative
            return set()
        return {r.number for r, g in zip(open_, gradients, strict=True) if g is not None and bool((g != 0).any())}

    def _unproved(self, runs: Sequence[_Run]) -> dict[str, str]:
        """Hidden dimensions with a reader that no run can tell anything about."""
        told: set[int] = set()
        for run in runs:
            told |= {number for number in run.telling if number in self._calls} | run.reached
        rows = [r for r in self._setting.readers if r.number not in told]
        return {name: _UNPROVED for reader in rows for name in sorted(reader.names & set(self._setting.kept))}

    def _found(self, model: nn.Module, run: _Run, plan: Plan) -> tuple[list[Tensor], dict[int, float]]:
        """The pruned module's outputs on a batch, and its errors at the layers that can be watched."""
        with all_or_nothing() as undo, _watching({layer for layer, _ in self._calls.values()}) as seen:
            set_values(model, run.values, plan, undo)
            try:
                found = output_of(model, run.batch)
            except Exception as error:
                raise SurgeryError(_fails(run.batch, error)) from error
            undo.run()
        errors = {}
        for number, (layer, call) in _calls(run.circuit, self._setting).items():
            if call < len(seen.get(layer, ())):
                errors[number] = _difference(seen[layer][call], *run.at[number])
        return found, errors


def _few(batch: Batch) -> Batch:
    """The first two examples of a batch, or all where it cannot be cut."""
    small = first_examples(batch)
    return batch if small is None else small


def _check_runs(model: nn.Module, batch: Batch) -> None:
    """The pruned model runs on a batch of another shape; two examples of it, where it takes so few."""
    try:
        try:
            output_of(model, _few(batch))
        except Exception:
            output_of(model, batch)
    except Exception as error:
        raise SurgeryError(_fails(batch, error)) from error


def _fails(batch: Batch, error: Exception) -> str:
    return (
        f"the pruned model fails on a batch of shapes {signature(batch)[1:]} ({type(error).__name__}: {error}): the "
        "model is as it was; check that its forward does the same on every call, or calibrate with batches of one shape"
    )


def _calls(circuit: Circuit, setting: Setting) -> dict[int, tuple[nn.Module, int]]:
    """For each reader that is the product of a layer: the layer, and which of its calls that is."""
    readers = {circuit.contractions[r.number]: r.number for r in setting.readers}
    counts: dict[nn.Module, int] = {}
    found = {}
    for node in circuit.order:
        layer = caller(node, setting.model)
        if layer is not None and _is_one_product(layer) and output_channels(node) is not None:
            if node in readers:
                found[readers[node]] = (layer, counts.get(layer, 0))
            counts[layer] = counts.get(layer, 0) + 1
    return found


def _is_one_product(module: nn.Module) -> bool:
    """Whether a module's output is the product with its weight: a linear layer or a convolution."""
    return isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or type(module).__name__ == "Conv1D"


def _difference(found: Any, expected: Tensor, size: float) -> float:
    """Relative difference of a layer's outputs: to their own norm, or to the larger one of what they are sums of."""
    if not isinstance(found, Tensor) or found.numel() != expected.numel():
        return float("inf")
    error = compare([found.reshape(expected.shape)], [expected]).error
    own = float(torch.where(torch.isfinite(expected), expected, torch.zeros_like(expected)).double().norm())
    return error * own / size if size > own > 0 else error


@contextmanager
def _watching(layers: set[nn.Module]) -> Iterator[dict[nn.Module, list[Any]]]:
    """Outputs of these layers, call by call."""
    seen: dict[nn.Module, list[Any]] = {}

    def hook(layer: nn.Module, _args: Any, output: Any) -> None:
        seen.setdefault(layer, []).append(output.clone() if isinstance(output, Tensor) else output)

    handles = [layer.register_forward_hook(hook, prepend=True) for layer in layers]  # before hooks that change it
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
