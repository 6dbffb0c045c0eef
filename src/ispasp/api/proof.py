"""Proof that removing equals masking, for the whole model and at every consumer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.api.job import Job
from ispasp.calibrate.circuit import output_dim
from ispasp.calibrate.passage import Passage
from ispasp.graph.analyse import owner
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

    def compare(self, model: nn.Module) -> tuple[float, float, dict[str, float]]:
        """Relative error of the pruned module's output, its limit, and the certificate of each hidden dimension."""
        paths = {r.number: owner(sorted(r.contraction.parameters)[0]) for r in self._job.readers}
        with _watching(model, {p for p in paths.values() if _is_one_product(model.get_submodule(p))}) as seen:
            found = output_of(model, self._example)
        error, limit = relative_error(found, self._expected), tolerance(self._expected)
        calls: dict[str, int] = {}
        errors: dict[int, float] = {}
        for number, path in paths.items():
            call = calls.get(path, 0)
            calls[path] = call + 1
            mine = seen.get(path, [])
            errors[number] = _difference(mine[call], self._at[number]) if call < len(mine) else error
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


def _is_one_product(module: nn.Module) -> bool:
    """Whether a module's output is the product with its weight: a linear layer or a convolution."""
    return isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or type(module).__name__ == "Conv1D"


def _difference(found: Any, expected: Tensor) -> float:
    if not isinstance(found, Tensor) or found.numel() != expected.numel():
        return float("inf")
    return relative_error([found.reshape(expected.shape)], [expected])


@contextmanager
def _watching(model: nn.Module, paths: set[str]) -> Iterator[dict[str, list[Any]]]:
    """Outputs of these modules, call by call."""
    seen: dict[str, list[Any]] = {}

    def record(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            seen.setdefault(path, []).append(output.clone() if isinstance(output, Tensor) else output)

        return hook

    handles = [model.get_submodule(path).register_forward_hook(record(path)) for path in sorted(paths)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
