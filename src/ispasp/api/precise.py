"""The proof in float64: it measures surgery, not rounding.

A refit to few examples amplifies rounding, and half precision rounds so much that a wrong unit could hide in it. Here
the graph of the pruned model runs against the masked graph of the dense one, both in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ispasp.api.evidence import Setting, cuts_outputs, kept_outputs
from ispasp.calibrate.circuit import Circuit, Edits, named_tensors
from ispasp.calibrate.passage import Passage
from ispasp.graph.analyse import matches, retracked
from ispasp.graph.trace import Batch, trace
from ispasp.surgery.masking import tensors_in
from ispasp.surgery.verify import compare


class PreciseProof:
    """What the masked network gives in float64, taken before surgery."""

    def __init__(self, setting: Setting, example: Batch) -> None:
        """Run the masked graph."""
        self._setting = setting
        self._example = example
        self._at, self._outputs = self._run(setting.circuits.of(example), setting.edits)

    def error(self, model: nn.Module) -> float:
        """Largest relative difference of the pruned model's graph, at outputs and consumers.

        Whole numbers are compared at consumers only: a comparison that rounding flips proves nothing.
        """
        traced = trace(model, self._example)
        found = matches(self._setting.analysis.tracker, retracked(model, traced))
        at, outputs = self._run(Circuit(traced, found), Edits(), named_tensors(model))
        errors = [compare(outputs, self._outputs).error]
        for number in at.keys() & self._at.keys():
            (y, _), (expected, size) = at[number], self._at[number]
            if y.numel() != expected.numel() and not cuts_outputs(self._setting, number):
                continue  # a product whose own units are not on a plain axis: the outputs tell
            own = float(expected.norm())
            error = min((compare([z], [expected]).error for z in _arranged(y, expected)), default=float("inf"))
            errors.append(error * own / size if size > own > 0 else error)
        return max(errors)

    def _run(
        self, circuit: Circuit, edits: Edits, tensors: dict[str, Tensor] | None = None
    ) -> tuple[dict[int, tuple[Tensor, float]], list[Tensor]]:
        s, pruned = self._setting, tensors is not None
        found: dict[int, tuple[Tensor, float]] = {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            given = s.tensors if tensors is None else tensors
            passage = Passage(circuit, self._example, given, edits, slicing=False, precise=True)
            for reader in s.readers:
                node = circuit.contractions.get(reader.number)
                if node is not None:
                    passage.advance(node)
                    y = passage.value(node)
                    y = y if pruned else kept_outputs(s, reader.number, y)
                    found[reader.number] = y, passage.magnitude(reader.number)
            return found, tensors_in(passage.advance())


def _arranged(y: Tensor, expected: Tensor) -> list[Tensor]:
    """A consumer's output in another's shape; attention that is swapped may have examples before positions."""
    if y.numel() != expected.numel():
        return []
    other = [y.transpose(0, 1)] if y.ndim > 2 and y.shape != expected.shape else []
    return [z.reshape(expected.shape) for z in (y, *other)]


def precise_proof(setting: Setting, example: Batch) -> PreciseProof | None:
    """The proof, or None where an op does not run in float64."""
    try:
        return PreciseProof(setting, example)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
