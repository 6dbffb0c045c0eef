"""Random: a uniform draw, the baseline every method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ispasp.select.base import Selector
from ispasp.select.evidence import Evidence
from ispasp.types import Selection, Statistics, units_to_keep


@dataclass(frozen=True)
class Random(Selector):
    """A uniform draw without replacement, the same for the same seed and number of units.

    >>> from ispasp.types import LinearConsumer, Reading, Statistics
    >>> statistics = Statistics(9, (Reading(LinearConsumer(torch.eye(9))),))
    >>> len(Random(seed=1).select(statistics, keep=3).kept)
    3
    """

    name: ClassVar[str] = "random"
    needs: ClassVar[tuple[str, ...]] = ()

    seed: int = 0

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Draw `keep` units."""
        s = units_to_keep(keep, statistics.units)
        generator = torch.Generator().manual_seed(self.seed)
        kept = torch.randperm(statistics.units, generator=generator)[:s]
        return Evidence(statistics).selection([sorted(kept.tolist())], converged=True)
