"""A plain function as a method: it scores units, and those with the largest scores stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.scores import Scored
from ispasp.types import Statistics
from ispasp.types.checks import check_finite

Score = Callable[[Statistics], Tensor]  # one number per unit: the higher, the rather it stays


@dataclass(frozen=True)
class ByScore(Scored):
    """Keeps the units to which a function of the statistics gives the largest scores.

    `function(statistics)` returns one number per unit, a tensor (units,). `method=function` is the same as
    `method=ByScore(function)`. Gram matrices cost more than the other statistics, so they are there only if `needs`
    names them. `sum_by_unit` adds up the channels of a head.

    >>> from ispasp.types import LinearConsumer, Producer, Reading
    >>> statistics = Statistics(2, (Reading(LinearConsumer(torch.eye(2))),), (Producer(torch.tensor([[1.0], [-3.0]])),))
    >>> ByScore(lambda statistics: statistics.producers[0].weight.abs().sum(1)).select(statistics, keep=1).kept
    (1,)
    """

    name: ClassVar[str] = "a function"
    function: Score
    needs: tuple[str, ...] = ("moment", "magnitude", "producers")  # type: ignore[misc]  # elsewhere it is the class's

    def score(self, statistics: Statistics) -> Tensor:
        """What the function gives, in float64."""
        found = self.function(statistics)
        try:
            scores = torch.as_tensor(found).detach().double()
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"{self} returned a {type(found).__name__}: return a tensor of one score per unit"
            ) from None
        if tuple(scores.shape) != (statistics.units,):
            raise InputError(
                f"{self} returned a tensor of shape {tuple(scores.shape)}, the hidden dimension has {statistics.units} "
                "units: return one score per unit; ispasp.select.sum_by_unit adds up channels"
            )
        check_finite(f"the scores of {self}", scores, "return a finite score for every unit")
        return scores

    def __str__(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))
