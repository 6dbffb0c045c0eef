"""ThiNet: greedy removal of what the consumers' output misses least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.select.base import Selector
from ispasp.select.evidence import Evidence
from ispasp.select.ordering import descending
from ispasp.types import Selection, Statistics, units_to_keep


@dataclass(frozen=True)
class ThiNet(Selector):
    """Grow the removed set R one unit at a time, each time by the one that leaves ||A H_R||_F smallest.

    Luo, Wu, Lin (2017), ThiNet: A Filter Level Pruning Method for Deep Neural Network Compression. Needs Gram matrices;
    costs n for each unit removed, after the energy matrix.

    Where we leave the paper: it draws some output values at random to keep the search affordable, the energy matrix
    counts all of them at no cost. The least-squares scale of the kept channels that follows its search is no part of
    the choice; compensation does it, and more (it refits every weight, not one factor per channel).

    Know its edge: units that cancel each other look indispensable, since each of them alone is.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> H = torch.tensor([[1.0, -1.0, 0.5], [2.0, -2.0, 0.5]])   # the first two cancel
    >>> r = measure(LinearConsumer(torch.ones(1, 3)), H, ["gram"])
    >>> ThiNet().select(Statistics(3, (r,)), keep=2).kept
    (0, 1)
    """

    name: ClassVar[str] = "thinet"
    needs: ClassVar[tuple[str, ...]] = ("gram",)

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose `keep` units; the highest index goes first among equals.

        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> r = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, 3.0, 2.0]]), ["gram"])
        >>> ThiNet().select(Statistics(3, (r,)), keep=1).kept
        (1,)
        """
        s = units_to_keep(keep, statistics.units)
        evidence = Evidence(statistics)
        kept = torch.nonzero(~_removed(evidence.energy(self.name), statistics.units - s)).flatten().tolist()
        return evidence.selection([kept], converged=True)


def _removed(E: Tensor, count: int) -> Tensor:
    """The set R of `count` units, as a mask (n,).

    ||A H_{R + i}||^2 = ||A H_R||^2 + 2 (E 1_R)_i + E_ii, so a step needs the vector E 1_R only.
    """
    R = torch.zeros(len(E), dtype=torch.bool, device=E.device)
    e, cross = E.diagonal(), torch.zeros_like(E[0])  # cross = E 1_R
    floor = float(e.max())
    for _ in range(count):
        order = descending(e + 2 * cross, floor)
        i = order[~R[order]][-1]
        R[i] = True
        cross = cross + E[i]
    return R
