"""Random: a uniform draw, the baseline every method has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ispasp.select.base import Found, Search, prefixes, register, seed_option
from ispasp.select.evidence import Evidence


@register
@dataclass(frozen=True)
class Random(Search):
    """A uniform draw without replacement, the same for the same seed and number of units.

    The baseline of every pruning paper, "uniform" in the i-SpaSP paper's Table 2 (Wolfe, Kyrillidis 2022). Needs
    nothing; costs n.

    >>> from ispasp.select import select_units
    >>> len(select_units(torch.eye(9), torch.ones(1, 9), 3, Random(seed=1)).kept)
    3
    """

    name, needs = "random", ()

    seed: int = seed_option()

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """One permutation serves all widths."""
        generator = torch.Generator("cpu").manual_seed(int(self.seed))
        return prefixes(torch.randperm(evidence.statistics.units, generator=generator, device="cpu").tolist(), widths)
