"""All statistics from the dense network in one pass, with memory that does not grow with the data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from ispasp.api.job import Job
from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.readers import Reader, read
from ispasp.compensate.refit import Gathered, gather, refit
from ispasp.errors import IspaspError
from ispasp.graph.analyse import owner
from ispasp.graph.tails import scale
from ispasp.graph.trace import Batch
from ispasp.report import track
from ispasp.types import Reading, Statistics


def collect(job: Job, batches: Iterable[Batch], needs: Collection[str]) -> dict[str, Statistics]:
    """Statistics of every hidden dimension, of this machine's batches."""
    tally = job.tally()
    with job.team.together("the calibration"):
        for number, batch in enumerate(track(batches, "calibrating", show=job.progress)):
            for reader, passage in stops(job, batch):
                for name, rows in _read(reader, passage, needs, number).items():
                    tally.add((name, reader.number), rows, number)
    found = {
        name: tally.statistics(job.units[name], [(name, reader.number) for reader in job.readers_of[name]])
        for name in job.counts
    }
    return {name: replace(statistics, producers=job.made_by(name)) for name, statistics in found.items()}


def stops(job: Job, batch: Batch) -> Iterator[tuple[Reader, Passage]]:
    """A batch in front of one reader after the other, in the dense network."""
    passage = Passage(job.circuits.of(batch), batch, job.tensors, Edits())
    for reader in job.readers:
        passage.advance(passage.circuit.contractions[reader.number])
        yield reader, passage


def _read(reader: Reader, passage: Passage, needs: Collection[str], batch: int) -> dict[str, tuple[Reading, ...]]:
    factor = scale(passage.circuit.tails[reader.number], passage.fixed)
    try:
        return read(reader, sorted(reader.names), passage.arguments(reader.number), factor, needs)
    except IspaspError as error:
        names = ", ".join(map(repr, sorted(reader.names)))
        raise type(error)(f"hidden dimension {names}, read by {reader.path}, batch {batch}: {error}") from error


def compensate_locally(job: Job, batches: Iterable[Batch]) -> dict[int, str]:
    """Compensate every consumer for what it does not read any more, with the inputs of the dense network.

    Returns the readers that cannot be compensated, with the reason.
    """
    found: dict[int, Gathered] = {}
    slots = {}
    with job.team.together("the compensation"):
        for count, batch in enumerate(track(batches, "compensating", show=job.progress)):
            for reader, passage in stops(job, batch):
                number = reader.number
                if number not in slots:
                    slots[number] = job.slot(reader)
                if slots[number].weight:
                    part = gather(reader, [passage], job.edits, dense=False, first=count)
                    known = found.get(number)
                    found[number] = part if known is None else known + part
    for reader in job.readers:
        if reader.number not in found:
            continue
        data = job.add(found[reader.number])
        where = slots[reader.number]
        job.refits[reader.number] = refit(reader, data, job.edits, where, ridge=job.ridge)
        if reader.number in job.edits.biases:
            job.gained[owner(where.weight)] = reader.number
    return {number: where.why_not for number, where in slots.items() if not where.weight}
