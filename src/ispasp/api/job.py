"""A pruning job: what is to be decided, and what has been."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ispasp.api.survey import Survey
from ispasp.calibrate.circuit import Edits, named_tensors
from ispasp.calibrate.gradients import Loss
from ispasp.calibrate.producers import producers
from ispasp.calibrate.readers import Reader, readers
from ispasp.calibrate.tally import Tally
from ispasp.calibrate.team import Team
from ispasp.calibrate.traces import Circuits
from ispasp.compensate.refit import Gathered, Refit
from ispasp.compensate.slots import Slot, slot
from ispasp.compensate.sums import Halves, Sums
from ispasp.errors import IspaspError
from ispasp.graph.trace import Batch
from ispasp.select import Selector
from ispasp.types import Producer, Selection, Statistics
from ispasp.types.statistic import measurable

Compensate = Literal["local", "dense"] | None
Refitted = Literal["consumers", "all"]
Pairs = Callable[[], Iterable[tuple[Batch, Any]]]  # what the model gets, and the batch it was taken from


@dataclass(frozen=True)
class Errors:
    """Relative errors of what a hidden dimension's consumers give: now, without compensation, on held-out examples."""

    now: float | None
    before: float | None
    held_out: float | None


@dataclass(eq=False)
class Job:
    """Everything the procedures share. `counts[name]` units of each hidden dimension are to stay."""

    model: nn.Module
    survey: Survey
    circuits: Circuits
    counts: Mapping[str, int]
    selector: Selector
    team: Team
    compensate: Compensate = None
    ridge: float | None = None
    memory: int | None = None
    loss: Loss | None = None
    pairs: Pairs = tuple
    refit: Refitted = "consumers"
    progress: bool = False
    selections: dict[str, Selection] = field(default_factory=dict)
    factors: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of the kept units, where a method has some
    refits: dict[int, Refit] = field(default_factory=dict)  # contraction -> what happened there
    edits: Edits = field(default_factory=Edits)
    gained: dict[str, int] = field(default_factory=dict)  # module that gains a bias -> contraction

    def __post_init__(self) -> None:
        """Look up where the hidden dimensions are read."""
        self.units = {d.name: d.units for d in self.survey.dimensions}
        self.readers: list[Reader] = readers(self.survey.analysis, self.counts)
        self.readers_of = {name: [r for r in self.readers if name in r.names] for name in self.counts}
        self.tensors = named_tensors(self.model)
        everything = self.refit == "all" and self.compensate == "dense"
        every = readers(self.survey.analysis, self.counts, others=True) if everything else self.readers
        self.stations = [reader for reader in every if self.circuits.all_reach(reader.number)]

    @property
    def data_needs(self) -> set[str]:
        """Statistics that calibration has to take of activations for the selector."""
        return set(self.selector.needs) & set(measurable())

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """Kept units of what has been decided so far."""
        return {name: selection.kept for name, selection in self.selections.items()}

    def made_by(self, name: str) -> tuple[Producer, ...]:
        """The producers of a hidden dimension, where the selector wants to see them."""
        if "producers" not in self.selector.needs:
            return ()
        return producers(self.survey.analysis, name, self.tensors)

    def tally(self) -> Tally:
        """An empty one, with the mini-batches that the selector wants to see apart."""
        return Tally(self.selector.parts, self.team.rank, self.team.size)

    def total(self, statistics: Statistics) -> Statistics:
        """The statistics of all machines, without mini-batches that no machine had."""
        parts = [self.team.sum(part) for part in statistics.parts]
        return replace(self.team.sum(statistics), parts=tuple(part for part in parts if _has_data(part)))

    def select(self, name: str, statistics: Statistics) -> Selection:
        """Let the selector choose, from the statistics of all machines; every machine gets the same answer."""
        total = self.total(statistics)
        try:
            selection = self.selector.select(total, self.counts[name])
        except IspaspError as error:
            raise type(error)(f"hidden dimension {name!r}: {error}") from error
        kept = self.team.same({"kept": torch.tensor(selection.kept, device="cpu")})["kept"]
        if tuple(kept.tolist()) != selection.kept:  # other hardware may round otherwise: rank 0 decides
            selection = Selection(tuple(kept.tolist()), scores=selection.scores)
        if self.compensate is None:
            self.factors[name] = self.selector.factors(total, selection.kept)
        return selection

    def decide(self, name: str, selection: Selection) -> None:
        """From here on consumers read the kept units only."""
        self.selections[name] = selection
        for reader in self.readers_of[name]:
            self.edits.cuts[reader.number] = reader.cuts(self.kept)

    def slot(self, reader: Reader) -> Slot:
        """Where new weights of a reader go, if that is the same for all kinds of batches."""
        found = {slot(reader, circuit, self.model, self.tensors) for circuit in self.circuits.every}
        return found.pop() if len(found) == 1 else Slot(why_not="not all kinds of batches use it alike")

    def add(self, data: Gathered) -> Gathered:
        """Merge what all machines have gathered."""
        first, second = (Sums(**self.team.sum_tensors(s.tensors())) for s in (data.sums.first, data.sums.second))
        return replace(data, sums=Halves(first, second), examples=self.team.total(data.examples))

    def errors(self, name: str) -> Errors:
        """Relative errors at the consumers of a hidden dimension."""
        found = [self.refits[r.number] for r in self.readers_of[name] if r.number in self.refits]
        size = sum(r.size for r in found)
        unseen = [r.held_out for r in found if r.held_out is not None]
        whole = sum(total for _, total in unseen)
        return Errors(
            math.sqrt(sum(r.after for r in found) / size) if size > 0 else None,
            math.sqrt(sum(r.before for r in found) / size) if size > 0 else None,
            math.sqrt(sum(error for error, _ in unseen) / whole) if whole > 0 else None,
        )

    def notes(self, name: str) -> tuple[str, ...]:
        """Remarks on the consumers of a hidden dimension."""
        rows = [(r.path, self.refits[r.number].note) for r in self.readers_of[name] if r.number in self.refits]
        return tuple(f"{path}: {note}" for path, note in rows if note)


def _has_data(statistics: Statistics) -> bool:
    return any(reading.statistics for reading in statistics.readings)
