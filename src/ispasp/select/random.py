"""Random: a uniform draw, the baseline every method has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.evidence import Evidence
from ispasp.select.registry import register
from ispasp.select.scores import prefixes
from ispasp.types import Selection, Statistics, units_to_keep
from ispasp.types.checks import is_integer


@register
@dataclass(frozen=True)
class Random(Selector):
    """A uniform draw without replacement, the same for the same seed and number of units.

    The baseline of every pruning paper, "uniform" in the i-SpaSP paper's Table 2 (Wolfe, Kyrillidis 2022). Needs
    nothing; costs n.

    >>> from ispasp.types import LinearConsumer, Reading, Statistics
    >>> statistics = Statistics(9, (Reading(LinearConsumer(torch.eye(9))),))
    >>> len(Random(seed=1).select(statistics, keep=3).kept)
    3
    """

    name: ClassVar[str] = "random"
    needs: ClassVar[tuple[str, ...]] = ()

    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what torch cannot seed with."""
        if not is_integer(self.seed) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed!r}: pass an integer from 0 to 2^63 - 1")

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Draw `keep` units; the data play no part.

        >>> from ispasp.types import LinearConsumer, Reading
        >>> Random().select(Statistics(4, (Reading(LinearConsumer(torch.eye(4))),)), keep=1.0).kept
        (0, 1, 2, 3)
        """
        kept = self.path(statistics, [units_to_keep(keep, statistics.units)])
        return Evidence(statistics).selection(kept, converged=True)

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """One permutation serves all widths."""
        generator = torch.Generator("cpu").manual_seed(int(self.seed))
        order = torch.randperm(statistics.units, generator=generator, device="cpu")
        return prefixes(order.tolist(), widths)
