"""Statistics as plain sums with keys, so that ranks that have seen different data can agree on what to add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types import Reading, Statistic, Statistics
from ispasp.types.statistic import STATISTICS, Size

Key = tuple[int, str, Size]  # reading, statistic, key of its tensor (a spatial size for moments, () for most)


@dataclass(frozen=True)
class Agreement:
    """What all ranks together have: the shape of every sum, and the number of examples behind each statistic."""

    shapes: Mapping[Key, tuple[int, ...]]
    examples: Mapping[tuple[int, str], int]


def sums(statistics: Statistics) -> dict[Key, Tensor]:
    """Every sum in the statistics under its key.

    >>> from ispasp.types import LinearConsumer, Moment
    >>> moment = Moment({(): torch.tensor([1.0, 2.0])}, examples=3)
    >>> sums(Statistics(2, (Reading(LinearConsumer(torch.eye(2)), moment),)))
    {(0, 'moment', ()): tensor([1., 2.])}
    """
    found: dict[Key, Tensor] = {}
    for number, reading in enumerate(statistics.readings):
        for name, statistic in _taken(reading).items():
            found.update({(number, name, key): total for key, total in statistic.tensors().items()})
    return found


def outline(statistics: Statistics) -> dict[str, Any]:
    """What one rank has, as JSON: for the others to see before anything is added.

    >>> from ispasp.types import LinearConsumer, Magnitude
    >>> reading = Reading(LinearConsumer(torch.eye(2)), Magnitude(torch.ones(2), examples=3))
    >>> outline(Statistics(2, (reading,)))
    {'units': 2, 'channels': [2], 'shapes': [[0, 'magnitude', [], [2]]], 'examples': [[0, 'magnitude', 3]]}
    """
    return {
        "units": statistics.units,
        "channels": [reading.consumer.channels for reading in statistics.readings],
        "shapes": [
            [number, name, list(size), list(total.shape)] for (number, name, size), total in sums(statistics).items()
        ],
        "examples": [
            [number, name, statistic.examples]
            for number, reading in enumerate(statistics.readings)
            for name, statistic in _taken(reading).items()
        ],
    }


def agreed(outlines: Sequence[Mapping[str, Any]]) -> Agreement:
    """What all ranks together have, from the outline of each. The error, if any, is the same on every rank.

    A rank without data at a consumer adds nothing there; one with data must have the statistics that the others have.

    >>> a = {"units": 2, "channels": [2], "shapes": [[0, "moment", [3], [2, 3]]], "examples": [[0, "moment", 1]]}
    >>> b = {"units": 2, "channels": [2], "shapes": [[0, "moment", [5], [2, 5]]], "examples": [[0, "moment", 4]]}
    >>> agreed([a, b])
    Agreement(shapes={(0, 'moment', (3,)): (2, 3), (0, 'moment', (5,)): (2, 5)}, examples={(0, 'moment'): 5})
    """
    shapes: dict[Key, tuple[int, ...]] = {}
    examples: dict[tuple[int, str], int] = {}
    for rank, given in enumerate(outlines):
        for what in ("units", "channels"):
            if given[what] != outlines[0][what]:
                raise InputError(
                    f"rank {rank} has statistics of {given[what]} {what}, rank 0 of {outlines[0][what]}: "
                    "prune the same model with the same options on every rank"
                )
        for number, name, size, shape in given["shapes"]:
            key = (number, name, tuple(size))
            if shapes.setdefault(key, tuple(shape)) != tuple(shape):
                raise InputError(
                    f"the {name} at consumer {number} has shape {tuple(shape)} on rank {rank}, {shapes[key]} on a rank "
                    "before it: prune the same model with the same options on every rank"
                )
        for number, name, count in given["examples"]:
            examples[number, name] = examples.get((number, name), 0) + count
    for rank, given in enumerate(outlines):
        _check_kinds(rank, given, examples)
    return Agreement(dict(sorted(shapes.items())), dict(sorted(examples.items())))


def rebuilt(statistics: Statistics, agreement: Agreement, totals: Mapping[Key, Tensor]) -> Statistics:
    """Statistics of the same hidden dimension with the sums and the examples of all ranks."""
    return Statistics(
        statistics.units,
        tuple(_reading(number, r, agreement, totals) for number, r in enumerate(statistics.readings)),
        statistics.producers,
        statistics.task,
    )


def blank(statistics: Statistics, key: Key, shape: tuple[int, ...]) -> Tensor:
    """A sum of no data, on the device where this rank has its other sums of that consumer."""
    near = next((total for other, total in sums(statistics).items() if other[0] == key[0]), None)
    device = statistics.readings[key[0]].consumer.weight.device if near is None else near.device
    return torch.zeros(shape, dtype=torch.float64, device=device)


def _taken(reading: Reading) -> dict[str, Statistic]:
    """The statistics that hold data."""
    return {name: statistic for name, statistic in reading.statistics.items() if statistic.examples}


def _check_kinds(rank: int, given: Mapping[str, Any], examples: Mapping[tuple[int, str], int]) -> None:
    own: dict[int, set[str]] = {}
    for number, name, _ in given["examples"]:
        own.setdefault(number, set()).add(name)
    for number, names in own.items():
        missing = {name for other, name in examples if other == number} - names
        if missing:
            raise InputError(
                f"rank {rank} has no {sorted(missing)[0]} at consumer {number}, another rank has: "
                "take the same statistics on every rank"
            )


def _reading(number: int, reading: Reading, agreement: Agreement, totals: Mapping[Key, Tensor]) -> Reading:
    found = []
    for name, kind in STATISTICS.items():
        if (number, name) in agreement.examples:
            tensors = {key: total for (n, of, key), total in totals.items() if (n, of) == (number, name)}
            found.append(kind.from_tensors(tensors, agreement.examples[number, name]))
    return Reading(reading.consumer, *found)
