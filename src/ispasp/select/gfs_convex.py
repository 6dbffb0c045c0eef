"""GFS with convex weights and repetition: greedy local imitation as in its paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.select.base import Found, Search, option, register, whole
from ispasp.select.evidence import Evidence, descending, smallest
from ispasp.types import Statistics


@register
@dataclass(frozen=True)
class GFSConvex(Search):
    """Greedy forward selection of a convex combination of units, where a unit may come in again.

    Ye, Wu, Liu (2020), Greedy Optimization Provably Wins the Lottery: Logarithmic Number of Winning Tickets is Enough,
    the local imitation. A layer of n units is their average: sum over i of a_i (n A H_i) with a_i = 1/n. A step

        a <- (1 - g) a + g e_i,   i and g that leave D(a) = ||A H - sum over i of a_i n A H_i||_F^2 smallest,

    adds a unit, changes the weight of one that is in, or drops it; g is any step that leaves a a convex combination.
    A unit that is always zero is among them and not counted, so the weights may sum to less than one.
    Needs Gram matrices; costs n for each step, after the energy matrix. Kept units are multiplied by n a_i, which
    `prune` applies without compensation; compensation finds all weights itself.

    D after k steps is at most 2 R^2 / (k + 2), R the largest distance of two n A H_i, as for every greedy step with
    line search (Jaggi 2013). The paper shows an exponential rate where A H is inside the convex hull of the units.

    Where we leave the paper: it takes a new mini-batch in each step, the Gram matrix holds all data. `steps` for each
    unit to keep is the most, and from then on each step brings in a new unit. Its global imitation is left out.

    >>> from ispasp.select import LinearConsumer, measure
    >>> reading = measure(LinearConsumer(torch.ones(1, 3)), torch.tensor([[1.0, 2.0, 3.0]]), ["gram"])
    >>> found = GFSConvex().select(Statistics(3, (reading,)), 1)   # 2 x 3 = 1 + 2 + 3
    >>> found.kept, GFSConvex().factors(Statistics(3, (reading,)), found.kept)
    ((2,), (2.0,))
    """

    name = "gfs-convex"
    needs = ("gram",)

    steps: int = option(10, whole(1), "an integer >= 1, steps for each unit that stays")

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """Each width takes the last weights before the set grows beyond it."""
        E = evidence.energy(self.name)
        return [Found([sorted(descending(self._weights(E, width))[:width].tolist())]) for width in widths]

    def factors(self, statistics: Statistics, kept: Sequence[int]) -> tuple[float, ...]:
        E = Evidence(statistics).energy(self.name)
        return tuple((len(E) * self._weights(E, len(kept)))[list(kept)].tolist())

    def _weights(self, E: Tensor, width: int) -> Tensor:
        last = torch.zeros_like(E[0])
        for a in imitations(E, self.steps * width):
            if int((a > 0).sum()) > width:
                break
            last = a
        return last


def imitations(E: Tensor, free: int) -> Iterator[Tensor]:
    """The weights a after each step, (n,). After `free` steps each brings in a new unit; ends when all are in.

    D(a) = (n a - 1)^T E (n a - 1), and along a + g (e_i - a) it is D + 2 g b_i + g^2 c_i. The last entry is the unit
    that is always zero.
    """
    n = len(E)
    E = torch.nn.functional.pad(E, (0, 1, 0, 1))
    rows, a = E.sum(1), torch.zeros_like(E[0])  # rows = E 1
    a[n] = 1.0
    Ea, step = torch.zeros_like(a), 0
    while True:
        i, g, gain = _best(n, E, rows, a, Ea, torch.ones_like(a, dtype=torch.bool))
        if step >= free or gain <= 0.0:  # nothing gets better by itself
            free, outside = step, a <= 0
            outside[n] = False
            if not bool(outside.any()):
                return
            i, g, _ = _best(n, E, rows, a, Ea, outside)
        a, Ea = (1 - g) * a, (1 - g) * Ea + g * E[i]
        least = torch.finfo(torch.float64).eps  # a new unit is there, even if it does not help; else it is dropped
        a[i] = a[i] + g if a[i] + g > least else least * (step >= free)
        step += 1
        yield a[:n].clone()


def _best(n: int, E: Tensor, rows: Tensor, a: Tensor, Ea: Tensor, among: Tensor) -> tuple[int, float, float]:
    """The unit and the step that lower D most, and by how much."""
    tiny = torch.finfo(a.dtype).tiny
    q = n * Ea - rows
    b = n * (q - a @ q)
    c = n * n * (E.diagonal() - 2 * Ea + a @ Ea).clamp_min(0.0)
    g = torch.where(c > 0, -b / c.clamp_min(tiny), (b < 0).double())
    g = g.clamp(max=1.0).maximum(torch.where(a < 1, -a / (1 - a).clamp_min(tiny), 0.0))
    change = 2 * g * b + g * g * c
    i = smallest(change, among, n * float(rows.abs().max()))
    floor = torch.finfo(a.dtype).eps * n * float(rows.abs().max())
    return i, float(g[i]), -float(change[i]) if -float(change[i]) > floor else 0.0
