"""GFS, local imitation: greedy forward selection against the dense layer's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.select.base import Selector
from ispasp.select.evidence import Evidence
from ispasp.select.ordering import largest
from ispasp.select.registry import register
from ispasp.select.scores import prefixes
from ispasp.types import Selection, Statistics, units_to_keep


@register
@dataclass(frozen=True)
class GFSLocal(Selector):
    """Start with no unit, add one at a time, each time the one that leaves ||A H - A H_S||_F smallest.

    Ye, Wu, Liu (2020), Greedy Optimization Provably Wins the Lottery: Logarithmic Number of Winning Tickets is Enough,
    the local imitation. Needs Gram matrices; costs n for each unit kept, after the energy matrix.

    Where we leave the paper: its layer is a convex combination of units, so every step also chooses by how much the
    new unit enters and the others shrink, a unit may come in again, and the weights it ends with rescale the units.
    Here a unit is in once with the weight it has, or out: a selection is a set, and compensation finds better weights
    than those of a combination that sums to one. So the paper's rate is not claimed. It takes a new mini-batch in each
    step; the Gram matrix holds all data. Its global imitation, which follows the network's loss, is left out.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> H = torch.tensor([[3.0, 2.0, -2.0], [0.0, 2.0, -2.0]])   # the last two cancel
    >>> r = measure(LinearConsumer(torch.ones(1, 3)), H, ["gram"])
    >>> GFSLocal().select(Statistics(3, (r,)), keep=1).kept
    (0,)
    """

    name: ClassVar[str] = "gfs-local"
    needs: ClassVar[tuple[str, ...]] = ("gram",)

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose `keep` units, the lowest index first among equals.

        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> r = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, 3.0, 2.0]]), ["gram"])
        >>> GFSLocal().select(Statistics(3, (r,)), keep=2).kept
        (1, 2)
        """
        s = units_to_keep(keep, statistics.units)
        evidence = Evidence(statistics)
        return evidence.selection(prefixes(_added(evidence.energy(self.name), s), [s]), converged=True)

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """One sequence of additions passes all widths."""
        return prefixes(_added(Evidence(statistics).energy(self.name), max(widths)), widths)


def _added(E: Tensor, s: int) -> list[int]:
    """The s units of the set S, in the order they come in.

    With R the units that are out, ||A H_{R - i}||^2 = ||A H_R||^2 - 2 (E 1_R)_i + E_ii: a step needs E 1_R only.
    """
    S = torch.zeros(len(E), dtype=torch.bool, device=E.device)
    e, cross = E.diagonal(), E.sum(1)  # cross = E 1_R
    floor, order = float(cross.abs().max()), []
    for _ in range(s):
        i = largest(2 * cross - e, ~S, floor)
        S[i] = True
        cross = cross - E[i]
        order.append(i)
    return order
