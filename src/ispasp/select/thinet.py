"""ThiNet: greedy removal of what the consumers' output misses least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.evidence import Evidence
from ispasp.select.ordering import smallest
from ispasp.select.registry import register
from ispasp.select.scores import prefixes
from ispasp.types import Selection, Statistics, units_to_keep

_RIDGE = 1e-6  # of the mean of the diagonal


@register
@dataclass(frozen=True)
class ThiNet(Selector):
    """Grow the removed set R one unit at a time, each time by the one that leaves ||A H_R||_F smallest.

    Luo, Wu, Lin (2017), ThiNet: A Filter Level Pruning Method for Deep Neural Network Compression. Needs Gram matrices;
    costs n for each unit removed, after the energy matrix, and s^3 for `factors`, its least-squares scale of what the
    consumers read of each kept unit (`rescale=False`: without). Compensation does that and more, since it refits every
    weight instead of one factor per unit; so the scale is for pruning without.

    Where we leave the paper: it draws some output values at random to keep the search affordable, the energy matrix
    counts all of them at no cost. Several consumers share the factors.

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

    rescale: bool = True

    def __post_init__(self) -> None:
        """Refuse an option that means nothing."""
        if not isinstance(self.rescale, bool):
            raise InputError(f"rescale={self.rescale!r}: pass True (the paper) or False")

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
        return evidence.selection(_left(evidence.energy(self.name), [s]), converged=True)

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """One sequence of removals passes all widths."""
        return _left(Evidence(statistics).energy(self.name), widths)

    def factors(self, statistics: Statistics, kept: Sequence[int]) -> tuple[float, ...]:
        """The w that leave ||A H - sum over kept i of w_i A H_i||_F smallest.

        >>> from ispasp.calibrate import measure
        >>> from ispasp.types import LinearConsumer
        >>> r = measure(LinearConsumer(torch.ones(1, 2)), torch.tensor([[1.0, 0.5], [2.0, 1.0]]), ["gram"])
        >>> [round(w, 4) for w in ThiNet().factors(Statistics(2, (r,)), kept=(0,))]   # unit 1 was half of unit 0
        [1.5]
        """
        return least_squares_factors(Evidence(statistics).energy(self.name), kept) if self.rescale else ()


def least_squares_factors(E: Tensor, kept: Sequence[int]) -> tuple[float, ...]:
    """The w with E_SS w = (E 1)_S; where the data do not decide they stay near 1. (n, n)

    Written as w = 1 + d, with E_SS d = (E 1_R)_S, R the units that are out, so that a ridge holds d and not w small.

    >>> least_squares_factors(torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]).double(), [0, 2])
    (1.49999..., 1.0)
    """
    S = torch.tensor(sorted(kept), dtype=torch.long, device=E.device)
    R = torch.ones(len(E), dtype=E.dtype, device=E.device)
    R[S] = 0.0
    ridged = E[S[:, None], S]
    ridged.diagonal().add_(_RIDGE * (float(ridged.diagonal().mean()) or 1.0))
    L, info = torch.linalg.cholesky_ex(ridged)
    if bool(info.any()):
        return (1.0,) * len(S)  # a Gram matrix in float32 may have negative eigenvalues: nothing to rely on
    return tuple((1.0 + torch.cholesky_solve((E @ R)[S, None], L).flatten()).tolist())


def _left(E: Tensor, widths: Sequence[int]) -> list[tuple[int, ...]]:
    """The units that stay at each width, as removals go on."""
    gone = _removed(E, len(E) - min(widths))
    stay = sorted(set(range(len(E))) - set(gone))
    return prefixes([*stay, *reversed(gone)], widths)


def _removed(E: Tensor, count: int) -> list[int]:
    """The `count` units of the set R, in the order they go.

    ||A H_{R + i}||^2 = ||A H_R||^2 + 2 (E 1_R)_i + E_ii, so a step needs the vector E 1_R only.
    """
    R = torch.zeros(len(E), dtype=torch.bool, device=E.device)
    e, cross = E.diagonal(), torch.zeros_like(E[0])  # cross = E 1_R
    floor, order = float(e.max()), []
    for _ in range(count):
        i = smallest(e + 2 * cross, ~R, floor)
        R[i] = True
        cross = cross + E[i]
        order.append(i)
    return order
