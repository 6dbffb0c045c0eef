"""GFS: greedy forward selection by the loss of the task."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.select.base import Selector
from ispasp.select.evidence import Evidence
from ispasp.select.ordering import descending
from ispasp.select.registry import register
from ispasp.types import Selection, Statistics, Step, units_to_keep
from ispasp.types.checks import is_integer

MaskLoss = Callable[[Tensor, int], Tensor]
"""loss(masks, step): the loss with each mask's units alone, on the mini-batch of the step. (m, units) -> (m,)"""

AddLoss = Callable[[Tensor, Tensor, int], Tensor]
"""loss(kept, candidates, step): the loss with `kept` (units,) and one candidate more, for each of them. (m,) -> (m,)"""


@register
@dataclass(frozen=True)
class GFS(Selector):
    """Start with no unit, add one at a time, each time the one that leaves the least loss on a new mini-batch.

    Ye et al. (2020), Good Subnetworks Provably Exist: Pruning via Greedy Forward Selection. Needs the loss of the task
    for any choice of units (without labels: the squared difference to the dense output). Costs a forward pass for
    every unit that is out, for every unit that comes in: about n s of them. With `candidates` a step tries that many
    units, drawn at random: the stochastic variant (the paper takes 50).

    Where we leave Ye et al.: they average the units of a layer, so that a network of k units of n has its outputs times
    n / k, and a unit may come in twice. Here a unit is in with the weights it has, or out, as in the i-SpaSP paper's
    Appendix A.2. So their rate is not claimed. They stop at a loss, here `keep` says how many.

    >>> GFS(candidates=50)
    GFS(candidates=50, seed=0)
    """

    name: ClassVar[str] = "gfs"
    needs: ClassVar[tuple[str, ...]] = ("task",)

    candidates: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse options that mean nothing."""
        _check_options(self.candidates, self.seed)

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose `keep` units by `statistics.task`, which `ispasp.prune` provides.

        >>> from ispasp.types import LinearConsumer, Reading
        >>> GFS().select(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),)), keep=1)
        Traceback (most recent call last):
        ...
        ispasp.errors.InputError: gfs follows the loss of the task, which these statistics do not hold: ...
        """
        grown = self.forward(statistics.units, keep, self._task(statistics))
        return Evidence(statistics).selection([step.kept for step in grown.steps], converged=True)

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """One growth passes all widths."""
        grown = self.forward(statistics.units, int(max(widths)), self._task(statistics))
        return [grown.steps[width - 1].kept for width in widths]

    def _task(self, statistics: Statistics) -> MaskLoss:
        if statistics.task is None:
            raise InputError(
                "gfs follows the loss of the task, which these statistics do not hold: use it in ispasp.prune, call "
                f"{self}.forward(units, keep, loss), or choose gfs-local, which follows the output of the dense layer"
            )
        return statistics.task

    def forward(self, units: int, keep: float | int, loss: MaskLoss) -> Selection:
        """Choose `keep` of `units` units with these options; see `greedy_forward`.

        >>> GFS().forward(3, 2, lambda masks, step: (masks @ torch.tensor([1.0, 2.0, 3.0]) - 4).abs()).kept
        (0, 2)
        """
        return greedy_forward(units, keep, loss, self.candidates, self.seed)


@dataclass(frozen=True)
class Growth:
    """The units in the order they came in, and the loss after each, on the mini-batch of that step.

    The first k of a larger growth are the growth of size k, so one run serves all sizes.

    >>> Growth((4, 1), (0.5, 0.2)).selection().steps
    (Step(kept=(4,), moment_residual=None, residual=None), Step(kept=(1, 4), moment_residual=None, residual=None))
    """

    order: tuple[int, ...]
    losses: tuple[float, ...]

    def kept(self, size: int) -> tuple[int, ...]:
        """The set when it had `size` units, sorted.

        >>> Growth((4, 1, 3), (0.5, 0.2, 0.1)).kept(2)
        (1, 4)
        """
        return tuple(sorted(self.order[:size]))

    def selection(self) -> Selection:
        """One step per unit; statistics play no part, so there are no residuals."""
        kept: list[int] = []
        steps = []
        for unit in self.order:
            insort(kept, unit)
            steps.append(Step(tuple(kept)))
        return Selection(steps[-1].kept, steps=tuple(steps))


def greedy_forward(
    units: int, keep: float | int, loss: MaskLoss, candidates: int | None = None, seed: int = 0
) -> Selection:
    """Greedy forward selection with a loss of whole masks.

    `loss(masks, step)` evaluates masks (m, units) of 0.0 and 1.0, one for each candidate, on the mini-batch of step 0,
    1, ..., and returns their losses (m,). Use `grow` where adding one unit is cheaper than evaluating a mask.

    >>> target = torch.tensor([1.0, 1.0]); outputs = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 0.9]])
    >>> greedy_forward(3, 2, lambda masks, step: ((masks @ outputs - target) ** 2).sum(1))   # first the middle one
    Selection(kept 2 units [1, 2], iterations=2, converged=True)
    """

    def added(kept: Tensor, tried: Tensor, step: int) -> Tensor:
        masks = kept.float().repeat(len(tried), 1)
        masks[torch.arange(len(tried), device=masks.device), tried] = 1.0
        return loss(masks, step)

    return grow(units, keep, added, candidates, seed).selection()


def grow(units: int, keep: float | int, loss: AddLoss, candidates: int | None = None, seed: int = 0) -> Growth:
    """Greedy forward selection with a loss of additions.

    `loss(kept, candidates, step)` gets the present set as a bool mask (units,) and the units to try (m,), ascending,
    and returns the loss with each of them added (m,). Among equals the lowest index comes in.

    >>> values = torch.tensor([3.0, 1.0, 2.0])
    >>> grow(3, 2, lambda kept, tried, step: 6 - values[kept].sum() - values[tried])
    Growth(order=(0, 2), losses=(3.0, 1.0))
    """
    _check_options(candidates, seed)
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
    usable = torch.isfinite(values) | torch.isposinf(values)  # a unit that overflows the loss is not chosen
    if not bool(usable.all()) or not bool(torch.isfinite(values).any()):
        raise InputError(
            f"step {step} has no finite loss for {int((~torch.isfinite(values)).sum())} of {count} candidates: "
            "check the data, or compute the loss in float32"
        )
    return values.clamp(max=torch.finfo(torch.float64).max)


def _check_options(candidates: int | None, seed: int) -> None:
    if candidates is not None and (not is_integer(candidates) or candidates < 1):
        raise InputError(f"candidates={candidates!r}: pass an integer >= 1 (the paper takes 50), or None to try all")
    if not is_integer(seed) or not 0 <= seed < 2**63:
        raise InputError(f"seed={seed!r}: pass an integer from 0 to 2^63 - 1")
