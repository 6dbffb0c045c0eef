"""Readings of many batches added up: all together, and apart for methods that take a new mini-batch at every step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ispasp.types import Reading, Statistics

Rows = tuple[Reading, ...]


class Tally:
    """Sums of readings under keys. With `parts` > 0 they are also kept apart for so many mini-batches.

    Batch k goes to part k mod `parts`, so that memory does not grow with the number of batches. With several machines
    the batches are counted round robin, as a distributed sampler deals them out: batch k of machine r of m is number
    k m + r.

    >>> import torch
    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> tally = Tally(parts=2)
    >>> for k in range(3):
    ...     tally.add("fc", (measure(LinearConsumer(torch.eye(1)), torch.tensor([[10.0**k]])),), batch=k)
    >>> found = tally.statistics(1, ["fc"])
    >>> [part.readings[0].moment.maps[()].item() for part in (found, *found.parts)]
    [111.0, 101.0, 10.0]
    """

    def __init__(self, parts: int = 0, machine: int = 0, machines: int = 1) -> None:
        """Nothing yet."""
        self._parts = parts
        self._machine, self._machines = machine, machines
        self._sums: dict[tuple[int | None, Hashable], Rows] = {}

    def add(self, key: Hashable, rows: Rows, batch: int) -> None:
        """Add the readings of one batch."""
        self._add((None, key), rows)
        if self._parts:
            self._add(((batch * self._machines + self._machine) % self._parts, key), rows)

    def statistics(self, units: int, keys: Sequence[Hashable]) -> Statistics:
        """What was added under these keys; parts that no batch of this machine went to hold no data."""
        whole = [self._sums[None, key] for key in keys]
        parts = []
        for part in range(self._parts):
            rows = [self._sums.get((part, key)) or _blank(known) for key, known in zip(keys, whole, strict=True)]
            parts.append(Statistics(units, _joined(rows)))
        return Statistics(units, _joined(whole), parts=tuple(parts))

    def _add(self, at: tuple[int | None, Hashable], rows: Rows) -> None:
        known = self._sums.get(at)
        self._sums[at] = rows if known is None else tuple(a + b for a, b in zip(known, rows, strict=True))


def _blank(rows: Rows) -> Rows:
    return tuple(Reading(row.consumer) for row in rows)


def _joined(rows: Sequence[Rows]) -> Rows:
    return tuple(reading for some in rows for reading in some)
