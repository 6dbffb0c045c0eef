"""GFS: greedy forward selection, by the loss of the task or (local imitation) by the dense layer's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Found, Search, option, prefixes, register, seed_option, whole
from ispasp.select.evidence import Evidence, descending, largest, smallest
from ispasp.types import Statistics, units_to_keep

# loss(masks, step): the loss with each mask's units alone, on the mini-batch of the step. (m, units) -> (m,)
MaskLoss = Callable[[Tensor, int], Tensor]
# loss(kept, candidates, step): the loss with `kept` (units,) and each candidate added to it. (m,) -> (m,)
AddLoss = Callable[[Tensor, Tensor, int], Tensor]


@register
@dataclass(frozen=True)
class GFS(Search):
    """Start with no unit and add one at a time, each time the one that leaves the least loss on a new mini-batch.

    Ye et al. (2020), Good Subnetworks Provably Exist: Pruning via Greedy Forward Selection. Needs the loss of the task
    for any choice of units (without labels: the squared difference to the dense output). Costs a forward pass for
    every unit that is out, for every unit that comes in: about n s of them. With `candidates` a step tries that many
    units, drawn at random: the stochastic variant (the paper takes 50).

    Where we leave Ye et al.: they average the units of a layer, so that k of n units have their outputs times n / k,
    and a unit may come in twice. Here a unit is in with the weights it has, or out, as in the i-SpaSP paper's
    Appendix A.2, so their rate is not claimed. They stop at a loss, here `keep` says how many.

    >>> GFS(candidates=50)
    GFS(candidates=50, seed=0)
    """

    name, needs = "gfs", ("task",)

    candidates: int | None = option(None, whole(1), "an integer >= 1 (the paper takes 50), or None to try all")
    seed: int = seed_option()

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """One growth by `Statistics.task`, which `ispasp.prune` provides, passes all widths."""
        task = evidence.statistics.task
        if task is None:
            wrong = "gfs follows the loss of the task, which these statistics do not hold"
            other = f"call {self}.forward(units, keep, loss), or choose gfs-local"
            raise InputError(f"{wrong}: use it in ispasp.prune, {other}, which follows the output of the dense layer")
        grown = self.forward(evidence.statistics.units, int(max(widths)), task)
        return [Found([grown.kept(size + 1) for size in range(width)]) for width in widths]

    def forward(self, units: int, keep: float | int, loss: MaskLoss) -> Growth:
        """Choose `keep` of `units` units by a loss of whole masks.

        `loss(masks, step)` evaluates masks (m, units) of 0.0 and 1.0, one for each candidate, on the mini-batch of
        step 0, 1, ..., and returns their losses (m,). Use `grow` where adding one unit is cheaper than a whole mask.

        >>> target = torch.tensor([1.0, 1.0]); outputs = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 0.9]])
        >>> GFS().forward(3, 2, lambda masks, step: ((masks @ outputs - target) ** 2).sum(1)).order
        (1, 2)
        """

        def added(kept: Tensor, tried: Tensor, step: int) -> Tensor:
            masks = kept.float().repeat(len(tried), 1)
            masks[torch.arange(len(tried), device=masks.device), tried] = 1.0
            return loss(masks, step)

        return grow(units, keep, added, self.candidates, self.seed)


@dataclass(frozen=True)
class Growth:
    """The units in the order they came in, and the loss after each, on the mini-batch of that step.

    The first k of a larger growth are the growth of size k, so one run serves all sizes.
    """

    order: tuple[int, ...]
    losses: tuple[float, ...]

    def kept(self, size: int) -> tuple[int, ...]:
        """The set when it had `size` units, sorted."""
        return tuple(sorted(self.order[:size]))


def grow(units: int, keep: float | int, loss: AddLoss, candidates: int | None = None, seed: int = 0) -> Growth:
    """Greedy forward selection with a loss of additions.

    `loss(kept, candidates, step)` gets the present set as a bool mask (units,) and the units to try (m,), ascending,
    and returns the loss with each of them added (m,). Among equals the lowest index comes in.

    >>> values = torch.tensor([3.0, 1.0, 2.0])
    >>> grow(3, 2, lambda kept, tried, step: 6 - values[kept].sum() - values[tried])
    Growth(order=(0, 2), losses=(3.0, 1.0))
    """
    GFS(candidates, seed)  # checks them
    s = units_to_keep(keep, units)
    generator = torch.Generator("cpu").manual_seed(int(seed))
    S = torch.zeros(units, dtype=torch.bool, device="cpu")
    order, losses = [], []
    for step in range(s):
        tried = torch.nonzero(~S).flatten()
        if candidates is not None and candidates < len(tried):
            tried = tried[torch.randperm(len(tried), generator=generator, device="cpu")[:candidates]].sort().values
        values = _checked(loss(S.clone(), tried, step), len(tried), step)
        best = int(descending(-values)[0])
        S[tried[best]] = True
        order.append(int(tried[best]))
        losses.append(float(values[best]))
    return Growth(tuple(order), tuple(losses))


def _checked(values: object, count: int, step: int) -> Tensor:
    if not isinstance(values, Tensor) or tuple(values.shape) != (count,):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"the loss of {count} candidates came as {got}: return a tensor of shape ({count},)")
    values = values.detach().double().cpu()
    finite = torch.isfinite(values)
    usable = finite | torch.isposinf(values)  # a unit that overflows the loss is not chosen
    if not bool(usable.all()) or not bool(finite.any()):
        wrong = f"step {step}: {int((~finite).sum())} of {count} losses are not finite"
        raise InputError(f"{wrong}: check the data, or use float32")
    return values.clamp(max=torch.finfo(torch.float64).max)


@register
@dataclass(frozen=True)
class GFSLocal(Search):
    """Start with no unit and add one at a time, each time the one that leaves ||A H - A H_S||_F smallest.

    Ye, Wu, Liu (2020), Greedy Optimization Provably Wins the Lottery: Logarithmic Number of Winning Tickets is Enough,
    the local imitation. Needs Gram matrices; costs n for each unit kept, after the energy matrix.

    Where we leave the paper: its layer is a convex combination of units, so a step also chooses a weight for the new
    unit, and a unit may come in again. Here a unit is in with the weight it has, or out, and compensation finds the
    weights; so the paper's rate is not claimed. It takes a new mini-batch in each step, the Gram matrix holds all
    data. Its global imitation, which follows the network's loss, is left out.

    >>> from ispasp.select import select_units
    >>> H = torch.tensor([[3.0, 2.0, -2.0], [0.0, 2.0, -2.0]])   # the last two cancel
    >>> select_units(torch.ones(1, 3), H, 1, "gfs-local").kept
    (0,)
    """

    name, needs = "gfs-local", ("gram",)

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """One sequence of additions passes all widths.

        With R the units that are out, ||A H_{R - i}||^2 = ||A H_R||^2 - 2 (E 1_R)_i + E_ii: a step needs E 1_R only.
        """
        E = evidence.energy(self.name)
        S = torch.zeros(len(E), dtype=torch.bool, device=E.device)
        e, cross = E.diagonal(), E.sum(1)  # cross = E 1_R
        floor, order = float(cross.abs().max()), []
        for _ in range(max(widths)):
            i = largest(2 * cross - e, ~S, floor)
            S[i] = True
            cross = cross - E[i]
            order.append(i)
        return prefixes(order, widths)


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

    name, needs = "gfs-convex", ("gram",)

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
