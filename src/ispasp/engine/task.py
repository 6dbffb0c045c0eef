"""Inputs of methods that use the task loss: sensitivities of units, and the loss of any choice of units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ispasp.engine.batches import Pair, count_examples, described, real_rows, tensors_of
from ispasp.engine.graphs import TracedGraphs
from ispasp.engine.runner import Edits, Runner
from ispasp.engine.sites import Site
from ispasp.engine.team import Team
from ispasp.errors import InputError
from ispasp.graph.ops import output_channels
from ispasp.graph.trace import Batch
from ispasp.types import Fisher, Reading, Sensitivity, Statistics
from ispasp.types.dimension import Kept

Loss = Callable[[Any, Any], Tensor]


def checked_loss(value: Any) -> Tensor:
    """Check that the loss is one finite number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(f"loss(output, batch) returned {described(value)}: return one number, the mean over the batch")
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"loss(output, batch) is {float(value)}: check the labels and the calibration data")
    return value


def sensitivities(
    sites: Sequence[Site], units: Mapping[str, int], runner: Runner, batch: Any, loss: Loss
) -> dict[tuple[int, str], Sensitivity]:
    """Sensitivities of one batch, for each site and hidden dimension it reads, by one backward pass.

    For every example |sum over the unit of H dL/dH|, L the example's own loss: `loss` is the mean over the batch. The
    runner probes what the sites read.
    """
    found = {}
    for site, gradient in zip(sites, _gradients(sites, runner, batch, loss), strict=True):
        x = runner.probes[site.number].value
        for name in site.names:
            found[site.number, name] = _by_unit(x.double() * gradient * len(x), site.units_of(name, x), units[name])
    return found


def fishers(
    sites: Sequence[Site], graphs: TracedGraphs, tensors: Mapping[str, Tensor], batch: Batch, loss: Loss
) -> dict[int, tuple[Fisher, ...]]:
    """Squared gradients at the outputs of each site in the dense network, of one batch, by one backward pass."""
    runner = Runner(graphs.of(batch), batch, tensors, Edits(), probed={site.number: None for site in sites})
    examples, found = count_examples(batch), {}
    for site, gradient in zip(sites, _gradients(sites, runner, batch, loss), strict=True):
        real, squares = real_rows(gradient, runner.padding), (gradient * examples).square()
        squares = squares if real is None else squares[real]  # padding tokens do not count
        products = site.forms(runner.probes[site.number].given)
        channel = output_channels(site.contraction.node)
        found[site.number] = tuple(_fisher(form.consumer.outputs, squares, channel, examples) for form in products)
    return found


def _fisher(outputs: int, squares: Tensor, channel: int | None, examples: int) -> Fisher:
    """The sum for each output; where it is not known which axis they are on, all outputs count alike."""
    if channel is None or squares.shape[channel] != outputs:
        return Fisher((squares.sum() / outputs).repeat(outputs), examples)
    return Fisher(squares.movedim(channel, 0).flatten(1).sum(1), examples)


def _gradients(sites: Sequence[Site], runner: Runner, batch: Any, loss: Loss) -> list[Tensor]:
    """Gradients of the loss, a mean over examples, for what the runner probes at each site."""
    with torch.enable_grad():
        value = checked_loss(loss(runner.output(), batch))
        if not value.requires_grad:
            raise InputError("loss(output, batch) does not depend on the model's output: compute it from `output`")
        zeros = [runner.probes[site.number].zero for site in sites]
        found = torch.autograd.grad(value, zeros, allow_unused=True, materialize_grads=True)
    return [gradient.double() for gradient in found]


def _by_unit(effect: Tensor, unit_of: Tensor, units: int) -> Sensitivity:
    flat, unit = effect.reshape(len(effect), -1), unit_of[0].reshape(-1)
    mine = unit >= 0
    each = flat.new_zeros(len(flat), units, dtype=torch.float64).index_add(1, unit[mine], flat[:, mine].double())
    return Sensitivity(each.abs().sum(0), len(flat))


def attached(
    statistics: Statistics, name: str, sites: Sequence[Site], totals: Mapping[tuple[int, str], Sensitivity]
) -> Statistics:
    """Add sensitivities to statistics. A mixture-of-experts site has several readings: the first gets them."""
    each, readings = len(statistics.readings) // len(sites), []
    for number, row in enumerate(statistics.readings):
        taken = totals[sites[number // each].number, name]
        if number % each:
            taken = replace(taken, total=torch.zeros_like(taken.total))
        readings.append(Reading(row.consumer, *row.statistics.values(), taken))
    return replace(statistics, readings=tuple(readings))


@dataclass(frozen=True, eq=False)
class TaskLoss:
    """The loss of networks in which only some units of a hidden dimension stay; without `loss` the distance to dense.

    Each mask runs the network from the dimension's first consumer on.
    """

    name: str
    sites: Sequence[Site]
    graphs: TracedGraphs
    tensors: Mapping[str, Tensor]
    edits: Edits
    kept: Kept
    pairs: Sequence[Pair]
    team: Team
    loss: Loss | None
    _starts: dict[int, Runner] = field(default_factory=dict)
    _dense: dict[int, list[Tensor]] = field(default_factory=dict)

    def __call__(self, masks: Tensor, step: int) -> Tensor:
        """Loss of each mask (m, units) on the mini-batch of the step, averaged over ranks. (m,)"""
        losses = torch.stack([self._loss(mask, step % len(self.pairs)) for mask in masks.bool()])
        total: Tensor = self.team.sum_tensors({"loss": losses.double()})["loss"]
        return total / self.team.size

    def _loss(self, mask: Tensor, number: int) -> Tensor:
        kept = {**self.kept, self.name: torch.nonzero(mask).flatten().tolist()}
        edits = self.edits | Edits({site.number: site.cuts(kept) for site in self.sites})
        output = self._start(number).branch(edits).output()
        if self.loss is not None:
            return checked_loss(self.loss(output, self.pairs[number][1])).detach().reshape(())
        pairs = zip(tensors_of(output), self._dense_output(number), strict=True)
        terms = [(a.double() - b.double()).square().sum() for a, b in pairs if a.is_floating_point()]
        return torch.stack(terms).sum()

    def _start(self, number: int) -> Runner:
        if number not in self._starts:
            batch = self.pairs[number][0]
            runner = Runner(self.graphs.of(batch), batch, self.tensors, self.edits)
            runner.advance(runner.graph.contractions[self.sites[0].number])
            self._starts[number] = runner
        return self._starts[number]

    def _dense_output(self, number: int) -> list[Tensor]:
        if number not in self._dense:
            batch = self.pairs[number][0]
            self._dense[number] = tensors_of(Runner(self.graphs.of(batch), batch, self.tensors, Edits()).output())
        return self._dense[number]
