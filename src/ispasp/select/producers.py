"""The check that producers are there, for selectors that score weights."""

from __future__ import annotations

import torch

from ispasp.errors import InputError
from ispasp.types import Producer, Statistics


def checked_producers(statistics: Statistics, method: str) -> tuple[Producer, ...]:
    """The producers, if there are any and they make every unit; `method` names who asks.

    >>> from ispasp.types import LinearConsumer, Reading
    >>> checked_producers(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),)), "l1")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: l1 scores the weights of producers, and the statistics hold none: ...
    """
    if not statistics.producers:
        raise InputError(
            f"{method} scores the weights of producers, and the statistics hold none: "
            "pass Statistics(units, readings, producers=(Producer(weight),))"
        )
    n = statistics.units
    made = torch.zeros(n, dtype=torch.bool, device="cpu")
    for number, producer in enumerate(statistics.producers):
        unit_of = producer.unit_of().cpu()
        last = int(unit_of.max())
        if last >= n:
            raise InputError(
                f"producer {number} makes unit {last}, the hidden dimension has {n} units: "
                f"its `units` must be from -1 to {n - 1}"
            )
        made[unit_of[unit_of >= 0]] = True
    if not bool(made.all()):
        missing = torch.nonzero(~made).flatten().tolist()
        raise InputError(
            f"{len(missing)} of {n} units are made by no producer (the first is {missing[0]}), so {method} cannot "
            "score them: pass all producers, or choose a method that looks at activations"
        )
    return statistics.producers
