"""Layers from first to last, each seeing the already pruned ones, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ispasp.api.job import Job
from ispasp.api.task import with_sensitivities, with_task
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.readers import Reader, read
from ispasp.calibrate.sources import Lockstep, OutOfMemory, Rerun, Source
from ispasp.compensate.refit import Refit, gather, refit
from ispasp.compensate.rescale import rescaled
from ispasp.compensate.slots import Slot
from ispasp.errors import IspaspError
from ispasp.graph.analyse import owner
from ispasp.graph.ops import without_bias
from ispasp.graph.tails import scale
from ispasp.graph.trace import Batch
from ispasp.report import track
from ispasp.types import Reading, Selection, Statistics
from ispasp.types.layout import kept_mask, names_in

T = TypeVar("T")


def sequential(job: Job, batches: Sequence[Batch], decided: Mapping[str, Selection] | None = None) -> bool:
    """Decide every hidden dimension (or take what is `decided`), and compensate each consumer in turn.

    Returns whether all went in lockstep; where memory does not suffice the batches are run again for every layer.
    """
    walk = _Walk(job, batches, decided or {})
    for reader in track(job.stations, "pruning", len(job.stations), show=job.progress):
        walk.visit(reader)
    return isinstance(walk.source, Lockstep)


class _Walk:
    """From consumer to consumer, with all batches."""

    def __init__(self, job: Job, batches: Sequence[Batch], decided: Mapping[str, Selection]) -> None:
        self._job = job
        self._batches = batches
        self._decided = decided
        self._twin = job.compensate == "dense"
        self.source: Source = Lockstep(job.model, batches, job.circuits, job.edits, twin=self._twin, memory=job.memory)

    def visit(self, reader: Reader) -> None:
        """Decide what is read here for the first time, then compensate this consumer."""
        job = self._job
        for name in job.counts:
            if name in reader.names and name not in job.selections:
                job.decide(name, self._decided[name] if name in self._decided else self._select(name, reader))
        if not job.selections:
            return  # nothing is pruned yet, so there is nothing to make good for
        note = ""
        if job.compensate:
            where = job.slot(reader)
            if where.weight:
                self._compensate(reader, where)
                return
            note = f"not compensated: {where.why_not}"
        if not reader.names:
            return
        with job.team.together(f"the error at {reader.path}"):
            found, refused = self._over(reader, lambda passages: _as_it_is(job, reader, next(passages)))
        before, after, size = map(job.team.total, found)
        job.refits[reader.number] = Refit(before, after, size, note or refused)

    def _over(self, reader: Reader, gather: Callable[[Iterator[Passage]], T]) -> T:
        """Something of all batches in front of a reader; if memory does not suffice, with fresh runs from the start."""
        try:
            return gather(self.source.at(reader.number))
        except (OutOfMemory, torch.OutOfMemoryError, MemoryError):
            pass  # the exception holds the waiting activations for as long as it is handled
        job = self._job
        self.source = Rerun(job.model, self._batches, job.circuits, job.edits, twin=self._twin)
        return gather(self.source.at(reader.number))

    def _select(self, name: str, reader: Reader) -> Selection:
        job = self._job

        def of_all(passages: Iterator[Passage]) -> Statistics:
            tally = job.tally()
            for number, passage in enumerate(passages):
                tally.add(name, readings(job, name, passage, number), number)
                if not job.data_needs:
                    break  # weights are the same for every batch
            return replace(tally.statistics(job.units[name], [name]), producers=job.made_by(name))

        with job.team.together(f"the calibration of {name!r}"):
            mine = with_sensitivities(job, {name: self._over(reader, of_all)}, job.edits)[name]
        return job.select(name, with_task(job, name, mine, job.edits))

    def _compensate(self, reader: Reader, where: Slot) -> None:
        job = self._job
        with job.team.together(f"the compensation of {reader.path}"):
            mine = self._over(reader, lambda passages: gather(reader, passages, job.edits, dense=self._twin))
        job.refits[reader.number] = refit(reader, job.add(mine), job.edits, where, ridge=job.ridge)
        if reader.number in job.edits.biases:
            job.gained[owner(where.weight)] = reader.number


def readings(job: Job, name: str, passage: Passage, batch: int) -> tuple[Reading, ...]:
    """Statistics of one batch at all consumers of a hidden dimension."""
    found: list[Reading] = []
    for reader in job.readers_of[name]:
        arguments = passage.arguments(reader.number)
        try:
            found += read(reader, [name], arguments, _outputs(job, reader, passage), job.data_needs)[name]
        except IspaspError as error:
            raise type(error)(f"hidden dimension {name!r}, read by {reader.path}, batch {batch}: {error}") from error
    return tuple(found)


def _outputs(job: Job, reader: Reader, passage: Passage) -> Tensor | None:
    """The factor on each output of a consumer: of what follows it, and zero for outputs that have been removed."""
    factor = scale(passage.circuit.tails[reader.number], passage.fixed)
    made = reader.contraction.made
    extent = job.survey.analysis.extent(made[0]) if len(made) == 1 else ()
    if not names_in(extent) & set(job.kept):
        return factor
    stays = kept_mask(extent, job.kept).double().to(passage.named(sorted(reader.contraction.parameters)[0]).device)
    return stays if factor is None else factor * stays


def _as_it_is(job: Job, reader: Reader, passage: Passage) -> tuple[tuple[float, float, float], str]:
    """What a consumer that is not compensated loses on the first batch, and how much there was; a remark.

    It is lost before and after the method's own factors, if there are any, which are put among the edits.
    """
    node, note = passage.circuit.contractions[reader.number], ""
    factors = {name: job.factors[name] for name in sorted(reader.names) if job.factors.get(name)}
    where = job.slot(reader) if factors else Slot()
    job.edits.tensors.pop(where.weight, None)  # of a try that ran out of memory: no factor may count twice
    whole, cut = passage.value(node, cut=False), passage.value(node)
    linear = without_bias(node, whole, passage.arguments(reader.number))
    before = after = _squared(whole - cut)
    if where.weight:
        job.edits.tensors[where.weight] = rescaled(reader, passage, factors, job.kept)
        after = _squared(whole - passage.value(node))
    elif factors:
        note = f"not rescaled: {where.why_not}"
    return (before, after, _squared(linear)), note


def _squared(x: Tensor) -> float:
    return float(x.double().square().sum())
