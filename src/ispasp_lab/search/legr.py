"""LeGR: one ranking of all units, by norms that an affine transform per layer makes comparable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ispasp.budget import WidthProblem, register_search
from ispasp_lab.procedures.scores import sum_over_makers


class Genes(NamedTuple):
    """The factor and the shift of each hidden dimension. (dimensions,)"""

    scale: Tensor
    shift: Tensor


@register_search("legr")
@dataclass(frozen=True)
class LeGR:
    """Evolve the transform alpha ||w||^2 + kappa of each hidden dimension; the smallest of all units go.

    Chin, Ding, Zhang, Marculescu (2020), Towards Efficient Model Compression via Learned Global Ranking. The evolution
    is the paper's: a population of 64; each step the best of 16 that are drawn is mutated in a tenth of its layers,
    alpha by a log-normal factor, kappa by a normal with the spread of the layer's norms, and the oldest makes place.

    Where we leave the paper: it trains each candidate for 200 steps and takes the accuracy; here a candidate is
    refitted, and its divergence counts, or `evaluate(network)`. It removes the units that rank last; here the ranking
    gives widths, and `method` chooses the units (`method="l2"` those of the paper). It learns the transform once for
    all budgets, at the smallest; here it is learned for the budget asked for. 400 steps are the paper's.

    >>> LeGR(steps=10)
    LeGR(steps=10, population=64, drawn=16, part=0.1, seed=0, evaluate=None)
    """

    steps: int = 400
    population: int = 64
    drawn: int = 16
    part: float = 0.1
    seed: int = 0
    evaluate: Callable[[nn.Module], float] | None = None

    def __call__(self, problem: WidthProblem) -> dict[str, int]:
        """The best widths of all candidates."""
        norms = unit_norms(problem)
        g = torch.Generator().manual_seed(self.seed)
        sizes = torch.tensor([float(each.std(correction=0)) for each in norms.values()])
        genes = Genes(torch.ones(len(norms)), torch.zeros(len(norms)))
        known: dict[tuple[int, ...], float] = {}
        population: deque[tuple[float, Genes]] = deque(maxlen=self.population)
        best: tuple[float, dict[str, int]] = (float("inf"), {})
        for step in range(self.steps):
            if step and step < self.population:
                genes = self._mutated(population[0][1], sizes, g, everywhere=True)
            elif step:
                some = torch.randperm(len(population), generator=g)[: self.drawn].tolist()
                genes = self._mutated(min((population[i] for i in some), key=lambda each: each[0])[1], sizes, g)
            widths = ranked_widths(problem, norms, genes)
            key = tuple(widths.values())
            if key not in known:
                known[key] = loss_of(problem, widths, self.evaluate)
            population.append((known[key], genes))
            best = min(best, (known[key], widths), key=lambda each: each[0])
        return best[1]

    def _mutated(self, genes: Genes, sizes: Tensor, g: torch.Generator, *, everywhere: bool = False) -> Genes:
        n = len(sizes)
        changed = torch.rand(n, generator=g) < (1.0 if everywhere else self.part)
        changed[torch.randint(n, (1,), generator=g)] = True
        factor, shift = torch.exp(torch.randn(n, generator=g)), torch.randn(n, generator=g) * sizes
        return Genes(
            torch.where(changed, genes.scale * factor, genes.scale),
            torch.where(changed, genes.shift + shift, genes.shift),
        )


def unit_norms(problem: WidthProblem) -> dict[str, Tensor]:
    """||w||^2 of the weights that make each unit."""
    squares = {name: p.detach().double().square() for name, p in problem.model.named_parameters()}
    total = sum_over_makers(problem.survey, squares)
    return {name: total[name] for name in problem.units}


def ranked_widths(problem: WidthProblem, norms: Mapping[str, Tensor], genes: Genes) -> dict[str, int]:
    """The widths when as few as possible of the units that rank last are removed, but enough for the limit."""
    pairs = zip(norms.items(), genes.scale.tolist(), genes.shift.tolist(), strict=True)
    scores = {name: alpha * each + kappa for (name, each), alpha, kappa in pairs}

    def widths(threshold: float) -> dict[str, int]:
        return {name: problem.fit(name, int((each >= threshold).sum())) for name, each in scores.items()}

    thresholds = torch.unique(torch.cat([*scores.values()]))
    low, high = 0, len(thresholds)  # thresholds[high]: nothing but the least stays
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if problem.count(widths(float(thresholds[middle]))) <= problem.limit else (middle + 1, high)
        )
    return widths(float(thresholds[low]) if low < len(thresholds) else float("inf"))


def loss_of(problem: WidthProblem, widths: Mapping[str, int], evaluate: Callable[[Any], float] | None) -> float:
    """The divergence of a candidate, or what `evaluate` returns, negated."""
    return problem.error(widths) if evaluate is None else -float(evaluate(problem.network(widths).eval()))
