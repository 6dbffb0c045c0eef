"""MetaPruning: a network that generates the weights of any widths, then an evolution of widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ispasp._evaluate import divergence
from ispasp.budget import WidthProblem, register_search
from ispasp.errors import InputError
from ispasp.graph.analyse import owner
from ispasp.graph.state import copied
from ispasp.graph.trace import run
from ispasp.select.evidence import descending
from ispasp.train.objective import logits_of
from ispasp.types.dimension import kept_mask, names_in
from ispasp_lab.search.legr import loss_of, unit_norms

Widths = dict[str, int]
_HIDDEN = 32
_NARROWEST = 0.1


@register_search("meta")
@dataclass(frozen=True)
class MetaPruning:
    """Train a PruningNet on random widths, then evolve widths by the networks that it generates.

    Liu, Mu, Zhang, Guo, Yang, Cheng, Sun (2019), MetaPruning: Meta Learning for Automatic Neural Network Channel
    Pruning. As there: two linear layers for each layer of the network turn the widths around it into its weight, which
    is cut to these widths; widths are drawn anew in every training step; BatchNorm uses the statistics of the batch;
    the evolution keeps the best, mutates a tenth of a network's widths, and crosses two; networks above the limit are
    drawn again.

    Where we leave the paper: the PruningNet learns from the dense network's outputs on the calibration batches, so it
    needs no labels, and starts at the dense weights. The units of largest norm stay; only hidden dimensions shrink.
    `evaluate(network)` of the refitted network replaces the divergence of the generated one. The paper trains for a
    quarter of the usual epochs.

    >>> MetaPruning(steps=50)
    MetaPruning(steps=50, lr=0.001, population=50, best=10, rounds=20, seed=0, evaluate=None)
    """

    steps: int = 1000
    lr: float = 1e-3
    population: int = 50
    best: int = 10
    rounds: int = 20
    seed: int = 0
    evaluate: Callable[[nn.Module], float] | None = None

    def __call__(self, problem: WidthProblem) -> Widths:
        """The best widths of the evolution."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = PruningNet(problem)
            with torch.enable_grad():
                self._train(problem, net)
            return self._evolve(problem, net)

    def _train(self, problem: WidthProblem, net: PruningNet) -> None:
        steps = torch.optim.Adam(net.parameters(), self.lr)
        for step in range(self.steps):
            batch = problem.batches[step % len(problem.batches)]
            with torch.no_grad():
                target = logits_of(run(problem.model, batch))
            output = logits_of(net(draw_widths(problem), batch))
            steps.zero_grad()
            loss = functional.kl_div(
                output.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean"
            )
            loss.backward()  # type: ignore[no-untyped-call]
            steps.step()

    def _evolve(self, problem: WidthProblem, net: PruningNet) -> Widths:
        known: dict[tuple[int, ...], float] = {}
        batch = problem.batches[0]
        dense = run(problem.model, batch)

        def loss(widths: Widths) -> float:
            key = tuple(widths.values())
            if key not in known:
                if self.evaluate is not None:
                    known[key] = loss_of(problem, widths, self.evaluate)
                else:
                    with torch.no_grad():
                        known[key] = divergence(net(widths, batch), dense, batch)
            return known[key]

        people = [within(problem, lambda: draw_widths(problem)) for _ in range(self.population)]
        for _ in range(self.rounds):
            people = _next(problem, sorted(people, key=loss)[: self.best], self.population)
        return min(people, key=loss)


def _next(problem: WidthProblem, elite: Sequence[Widths], size: int) -> list[Widths]:
    """The best, mutations of them, and crossings of two."""
    half = (size - len(elite)) // 2
    changed = [within(problem, lambda: _mutated(problem, _one_of(elite))) for _ in range(half)]
    crossed = [within(problem, lambda: _crossed(_one_of(elite), _one_of(elite))) for _ in range(half)]
    return [*elite, *changed, *crossed]


class PruningNet(nn.Module):
    """Generates the weights of all layers around the hidden dimensions from the widths, and runs the network."""

    def __init__(self, problem: WidthProblem) -> None:
        """Start with a generator whose last bias is the dense weight."""
        super().__init__()
        self._problem = problem
        self._model = copied(problem.model).requires_grad_(False)
        self._layouts = {
            name: layout
            for name, layout in problem.survey.structure.tensors.items()
            if len(layout.shape) > 1
            and owner(name)
            and any(names_in(e) & problem.units.keys() for e in layout.axes.values())
        }
        if not self._layouts:
            raise InputError("no weight reads or makes the hidden dimensions: MetaPruning has nothing to generate")
        self._order = {name: descending(norms).tolist() for name, norms in unit_norms(problem).items()}
        self.generators = nn.ModuleDict()
        for name in self._layouts:
            weight = problem.model.get_parameter(name).detach()
            last = nn.Linear(_HIDDEN, weight.numel())
            nn.init.zeros_(last.weight)
            with torch.no_grad():
                last.bias.copy_(weight.flatten())
            made = nn.Sequential(nn.Linear(len(self._names(name)), _HIDDEN), nn.ReLU(), last)
            self.generators[name.replace(".", "/")] = made

    def forward(self, widths: Mapping[str, int], batch: Any) -> Any:
        """The output of the network with generated weights, units beyond the widths being zero."""
        self._model.train()  # BatchNorm takes the statistics of the batch
        return functional_call(self._model, self._weights(widths), batch if isinstance(batch, tuple) else (batch,))

    def _names(self, name: str) -> list[str]:
        axes = self._layouts[name].axes.values()
        return sorted({n for extent in axes for n in names_in(extent) if n in self._problem.units})

    def _weights(self, widths: Mapping[str, int]) -> dict[str, Tensor]:
        found = {}
        kept = {name: self._order[name][:width] for name, width in widths.items()}
        for name, layout in self._layouts.items():
            parts = torch.tensor([widths[n] / self._problem.units[n] for n in self._names(name)])
            weight = self.generators[name.replace(".", "/")](parts).reshape(layout.shape)
            for axis, extent in layout.axes.items():
                mask = kept_mask(extent, kept).to(weight.dtype)
                weight = weight * mask.reshape(-1, *(1,) * (weight.ndim - axis - 1))
            found[name] = weight
        return found


def draw_widths(problem: WidthProblem) -> Widths:
    """Each width uniformly from a tenth of the units to all."""
    parts = (_NARROWEST + (1 - _NARROWEST) * torch.rand(len(problem.units))).tolist()
    return {
        name: problem.fit(name, round(part * n)) for part, (name, n) in zip(parts, problem.units.items(), strict=True)
    }


def within(problem: WidthProblem, draw: Callable[[], Widths], tries: int = 100) -> Widths:
    """Draw until the limit is met and nearly used; else shrink the last draw to it."""
    widths = draw()
    for _ in range(tries):
        if 0.9 * problem.limit <= problem.count(widths) <= problem.limit:
            return widths
        widths = draw()
    return shrunk(problem, widths)


def shrunk(problem: WidthProblem, widths: Widths) -> Widths:
    """All widths times the largest factor that meets the limit."""

    def scaled(factor: float) -> Widths:
        return {
            name: problem.fit(name, min(problem.units[name], round(factor * width))) for name, width in widths.items()
        }

    low, high = 0.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if problem.count(scaled(middle)) <= problem.limit else (low, middle)
    return scaled(low)


def _one_of(people: Sequence[Widths]) -> Widths:
    return people[int(torch.randint(len(people), ()))]


def _mutated(problem: WidthProblem, widths: Widths) -> Widths:
    new = draw_widths(problem)
    changed = (torch.rand(len(widths)) < 0.1).tolist()
    return {name: new[name] if change else width for change, (name, width) in zip(changed, widths.items(), strict=True)}


def _crossed(a: Widths, b: Widths) -> Widths:
    first = (torch.rand(len(a)) < 0.5).tolist()
    return {name: a[name] if mine else b[name] for mine, name in zip(first, a, strict=True)}
