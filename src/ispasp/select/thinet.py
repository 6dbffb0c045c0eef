"""ThiNet: greedy removal of the units the consumers' output misses least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ispasp.select.base import Found, Search, flag, prefixes, register
from ispasp.select.evidence import Evidence, smallest
from ispasp.types import Statistics

_RIDGE = 1e-6  # relative to the mean of the diagonal


@register
@dataclass(frozen=True)
class ThiNet(Search):
    """Grow the removed set R one unit at a time, each time by the one that leaves ||A H_R||_F smallest.

    Luo, Wu, Lin (2017), ThiNet: A Filter Level Pruning Method for Deep Neural Network Compression. Needs Gram matrices;
    costs n for each unit removed, after the energy matrix, and s^3 for `factors`, its least-squares scale of each kept
    unit (none with `rescale=False`). Compensation refits every weight instead, so the scale is for pruning without.

    Where we leave the paper: it samples output values to keep the search affordable, the energy matrix counts all of
    them. Several consumers share the factors.

    Units that cancel each other look indispensable, since each of them alone is:

    >>> from ispasp.select import select_units
    >>> H = torch.tensor([[1.0, -1.0, 0.5], [2.0, -2.0, 0.5]])   # the first two cancel
    >>> select_units(torch.ones(1, 3), H, 2, "thinet").kept
    (0, 1)
    """

    name, needs = "thinet", ("gram",)

    rescale: bool = flag(True, "True (the paper) or False")

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """One sequence of removals passes all widths.

        ||A H_{R + i}||^2 = ||A H_R||^2 + 2 (E 1_R)_i + E_ii, so a step needs the vector E 1_R only.
        """
        E = evidence.energy(self.name)
        stays = torch.ones(len(E), dtype=torch.bool, device=E.device)
        e, cross = E.diagonal(), torch.zeros_like(E[0])  # cross = E 1_R
        floor, gone = float(e.max()), []
        for _ in range(len(E) - min(widths)):
            i = smallest(e + 2 * cross, stays, floor)
            stays[i] = False
            cross = cross + E[i]
            gone.append(i)
        return prefixes([*torch.nonzero(stays).flatten().tolist(), *reversed(gone)], widths)

    def factors(self, statistics: Statistics, kept: Sequence[int]) -> tuple[float, ...]:
        """The w that leave ||A H - sum over kept i of w_i A H_i||_F smallest: E_SS w = (E 1)_S.

        Written as w = 1 + d with E_SS d = (E 1_R)_S, so that the ridge leaves w = 1 where the data do not decide.

        >>> from ispasp.select import LinearConsumer, measure
        >>> r = measure(LinearConsumer(torch.ones(1, 2)), torch.tensor([[1.0, 0.5], [2.0, 1.0]]), ["gram"])
        >>> [round(w, 4) for w in ThiNet().factors(Statistics(2, (r,)), kept=(0,))]   # unit 1 was half of unit 0
        [1.5]
        """
        if not self.rescale:
            return ()
        E = Evidence(statistics).energy(self.name)
        S = torch.tensor(sorted(kept), dtype=torch.long, device=E.device)
        R = E.new_ones(len(E)).index_fill(0, S, 0.0)
        ridged = E[S[:, None], S]
        ridged.diagonal().add_(_RIDGE * (float(ridged.diagonal().mean()) or 1.0))
        L, info = torch.linalg.cholesky_ex(ridged)
        if bool(info.any()):
            return (1.0,) * len(S)  # a Gram matrix in float32 may have negative eigenvalues
        return tuple((1.0 + torch.cholesky_solve((E @ R)[S, None], L).flatten()).tolist())
