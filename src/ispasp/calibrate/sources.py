"""Where all calibration batches stand: in lockstep in front of one layer, or on their way there from the start.

Pruning from first to last needs every batch in front of a layer at once: its statistics decide what the layer loses,
and only then the batches may go on. In lockstep all of them wait there with their activations, so that the whole
procedure costs one forward pass. Where those activations do not fit in memory, each batch is run from the start for
every layer instead; both give the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ispasp.calibrate.circuit import Edits, named_tensors
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.traces import Circuits
from ispasp.graph.trace import Batch


class OutOfMemory(Exception):  # noqa: N818  # a signal, not an error of the user's
    """The waiting batches take more memory than there is, or than was allowed."""


class Source(ABC):
    """All batches, brought in front of one contraction after the other."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], circuits: Circuits, edits: Edits, *, twin: bool
    ) -> None:
        """`edits` is looked at whenever a node is run: what is added to it counts from there on."""
        self._batches = batches
        self._circuits = circuits
        self._tensors = named_tensors(model)
        self.edits = edits
        self._twin = twin

    def _start(self, batch: Batch) -> Passage:
        return Passage(self._circuits.of(batch), batch, self._tensors, self.edits, twin=self._twin)

    @abstractmethod
    def at(self, number: int) -> Iterator[Passage]:
        """Each batch in front of contraction `number`; may be asked for several times, never for an earlier one."""


class Lockstep(Source):
    """All batches wait in front of the same layer; `memory` limits the bytes of their activations."""

    def __init__(  # noqa: D107
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        circuits: Circuits,
        edits: Edits,
        *,
        twin: bool,
        memory: int | None = None,
    ) -> None:
        super().__init__(model, batches, circuits, edits, twin=twin)
        self._memory = memory
        self._passages: list[Passage] = []

    def at(self, number: int) -> Iterator[Passage]:
        """Send every batch on to the contraction."""
        try:
            if not self._passages:
                self._passages = [self._start(batch) for batch in self._batches]
            for passage in self._passages:
                passage.advance(passage.circuit.contractions[number])
                self._check(passage)
                yield passage
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemory from error
        except RuntimeError as error:  # the CPU's allocator has no exception of its own
            if "not enough memory" in str(error) or "can't allocate memory" in str(error):
                raise OutOfMemory from error
            raise

    def _check(self, passage: Passage) -> None:
        if self._memory is not None and passage.bytes * len(self._passages) > self._memory:
            self._passages = []
            raise OutOfMemory


class Rerun(Source):
    """Each batch is run from the start whenever it is asked for: slow, with the memory of one batch."""

    def at(self, number: int) -> Iterator[Passage]:
        """Run every batch up to the contraction."""
        for batch in self._batches:
            passage = self._start(batch)
            passage.advance(passage.circuit.contractions[number])
            yield passage
