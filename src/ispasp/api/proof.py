"""Proof that removing equals masking, for the whole model and at every consumer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.api.job import Job
from ispasp.calibrate.circuit import Circuit, caller, output_dim
from ispasp.calibrate.passage import Passage
from ispasp.graph.trace import Batch
from ispasp.surgery.masking import tensors_in
from ispasp.surgery.verify import output_of, relative_error, tolerance
from ispasp.types.layout import kept_mask


class Proof:
    """What the masked network gives, to be compared with what the pruned module gives.

    The masked network is the graph of the dense model in which consumers read zeros for removed units, with
    compensated weights where there are any; it is run before surgery.
    """

    def __init__(self, job: Job, example: Batch) -> None:
        """Run the masked network on the example."""
        self._job = job
        self._example = example
        self._at: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            passage = Passage(job.circuits.of(example), example, job.tensors, job.edits, slicing=False)
            for reader in job.readers:
                node = passage.circuit.contractions[reader.number]
                passage.advance(node)
                self._at[reader.number] = self._kept_outputs(reader.number, passage.value(node))
            self._expected = tensors_in(passage.advance())
        self._calls = _calls(passage.circuit, job)

    def compare(self, model: nn.Module) -> tuple[float, float, dict[str, float]]:
        """Relative error of the pruned module's output, its limit, and the certificate of each hidden dimension."""
        with _watching({layer for layer, _ in self._calls.values()}) as seen:
            found = output_of(model, self._example)
        error, limit = relative_error(found, self._expected), tolerance(self._expected)
        errors = dict.fromkeys(self._at, error)
        for number, (layer, call) in self._calls.items():
            if call < len(seen.get(layer, ())):
                errors[number] = _difference(seen[layer][call], self._at[number])
        readers_of = self._job.readers_of
        return error, limit, {name: max(errors[r.number] for r in readers_of[name]) for name in readers_of}

    def _kept_outputs(self, number: int, y: Tensor) -> Tensor:
        """The outputs that stay, where outputs are units themselves."""
        analysis = self._job.survey.analysis
        contraction = analysis.tracker.contractions[number]
        channel = output_dim(contraction.node)
        if channel is None or len(contraction.made) != 1:
            return y
        mask = kept_mask(analysis.extent(contraction.made[0]), self._job.kept)
        return y.index_select(channel, torch.nonzero(mask).flatten().to(y.device))


def _calls(circuit: Circuit, job: Job) -> dict[int, tuple[nn.Module, int]]:
    """For each reader that is the product of a layer: the layer, and which of its calls that is."""
    readers = {circuit.contractions[r.number]: r.number for r in job.readers}
    counts: dict[nn.Module, int] = {}
    found = {}
    for node in circuit.order:
        layer = caller(node, job.model)
        if layer is not None and _is_one_product(layer) and output_dim(node) is not None:
            if node in readers:
                found[readers[node]] = (layer, counts.get(layer, 0))
            counts[layer] = counts.get(layer, 0) + 1
    return found


def _is_one_product(module: nn.Module) -> bool:
    """Whether a module's output is the product with its weight: a linear layer or a convolution."""
    return isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or type(module).__name__ == "Conv1D"


def _difference(found: Any, expected: Tensor) -> float:
    if not isinstance(found, Tensor) or found.numel() != expected.numel():
        return float("inf")
    return relative_error([found.reshape(expected.shape)], [expected])


@contextmanager
def _watching(layers: set[nn.Module]) -> Iterator[dict[nn.Module, list[Any]]]:
    """Outputs of these layers, call by call."""
    seen: dict[nn.Module, list[Any]] = {}

    def hook(layer: nn.Module, _args: Any, output: Any) -> None:
        seen.setdefault(layer, []).append(output.clone() if isinstance(output, Tensor) else output)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
