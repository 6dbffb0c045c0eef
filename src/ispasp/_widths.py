"""From a budget to widths, by what the output of the network says.

A curve predicts the error of a hidden dimension at every width. It is scaled by the divergence of the network's output,
measured at a few widths: one dimension is narrowed and its consumers refitted, and the network runs on from there. The
allocation by these curves then competes with simpler ones on the measured divergence of the whole candidate network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ispasp._evaluate import divergence
from ispasp._keep import rounded
from ispasp._steps import Work, measure_all, stops, total_statistics, walk
from ispasp.budget import Budget, Curve, Params, allocate
from ispasp.budget.curve import Curves, error_curve, sampled_energy
from ispasp.budget.search import WidthProblem, checked, width_search
from ispasp.compensate.refit import gather, refit
from ispasp.engine.batches import count_examples, first_of, tensors_of
from ispasp.engine.runner import Edits, Runner
from ispasp.graph.ops import scale
from ispasp.graph.trace import Batch
from ispasp.report import track
from ispasp.types import Selection
from ispasp.types.dimension import Extent, kept_length

_SAMPLE = 1 / 8  # of the examples: what curves and divergences are measured on
_FEWEST, _TOKENS = 32, 1024  # examples of a sample at least, or tokens
_WIDTHS = (0.5, 0.2)  # fractions of units that divergences are measured at; the first only where dimensions are many
_MANY = 40
_FLOORS = (0.0, 0.65, 1.0)  # fractions of the uniform widths that a candidate keeps at least
_STEP = 0.5  # by which an exchange scales two curves, on a log scale


def sample_of(batch: Batch, examples: int) -> Batch:
    """Take an eighth of `examples` from a batch, but at least 32 examples or 1,024 tokens.

    >>> len(sample_of(torch.ones(256, 3), 1024)), len(sample_of(torch.ones(256, 3), 64))
    (128, 32)
    >>> len(sample_of(torch.ones(64, 256, dtype=torch.long), 64))
    8
    """
    tokens = next((t.shape[1] for t in tensors_of(batch) if t.ndim == 2 and not t.is_floating_point()), 0)
    fewest = -(-_TOKENS // tokens) if tokens else _FEWEST
    return first_of(batch, max(fewest, math.ceil(_SAMPLE * examples)))


def error_curves(work: Work, batch: Batch) -> Curves:
    """Predicted error at the consumers against kept units, compensation counted in where there is one.

    What the method would choose at each width, and what that choice loses, is measured on one batch.
    """
    energies = work.team.sum_tensors(_energies(work, batch))
    found = measure_all(work, [batch])
    curves, orders = dict[str, Curve](), dict[str, Tensor]()
    for name, part in found.items():
        curves[name], order = error_curve(
            work.selector,
            total_statistics(work.team, part),
            energy=energies[name],
            compensated=work.options.compensate is not None,
            least=narrowest(work, name),
        )
        orders[name] = torch.tensor(order, device="cpu")
    same = work.team.same(orders)  # machines that round otherwise must choose the same
    return Curves(curves, {name: tuple(order.tolist()) for name, order in same.items()})


def _energies(work: Work, batch: Batch) -> dict[str, Tensor]:
    with work.team.together("the error curves"):
        found: dict[str, Tensor] = {}
        for site, runner in stops(work, batch):
            factor = scale(runner.graph.tails[site.number], runner.fixed)
            for H, consumers in site.products(sorted(site.names), site.unpadded(runner), factor):
                for name, consumer in consumers.items():
                    E = sampled_energy(consumer, H, work.units[name])
                    found[name] = found[name] + E if name in found else E
    return found


# By the output --------------------------------------------------------------------------------------------------
def output_curves(work: Work, found: Curves, batch: Batch) -> Curves:
    """Scale curves by the divergence of the output, measured on a batch at one or two widths a dimension, and at zero.

    Costs one to three passes of the batch from each dimension on: half a pass each, on average.
    """
    blocks = sum(d.name in work.counts for d in work.survey.dimensions if not d.stream)  # alike in scope="all"
    fractions = _WIDTHS if blocks <= _MANY else _WIDTHS[:1]
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in work.counts}
    with work.team.together("the divergences of the output"):
        dense = Runner(work.graphs.of(batch), batch, work.tensors, Edits()).output()
        runner = Runner(work.graphs.of(batch), batch, work.tensors, Edits())
        names = sorted(work.counts, key=lambda name: work.sites.index(work.sites_of(name)[0]))
        for name in track(names, "measuring", len(names), show=work.options.progress):
            runner.advance(runner.graph.contractions[work.sites_of(name)[0].number])
            for width in _measured(work, name, fractions):
                edits = _narrowed(work, name, found.kept(name, width), runner)
                points[name].append((width, divergence(runner.branch(edits).output(), dense, batch)))
    values = torch.tensor([d for rows in points.values() for _, d in rows], dtype=torch.float64)
    mean = iter((work.team.sum_tensors({"divergence": values})["divergence"] / work.team.size).tolist())
    means = {name: [(width, next(mean)) for width, _ in rows] for name, rows in points.items()}
    return replace(found, curves={name: _scaled(found.curves[name], rows) for name, rows in means.items()})


def narrowest(work: Work, name: str) -> int:
    """The fewest units that a budget may leave in a hidden dimension."""
    least, units, step = work.options.least, work.units[name], work.options.round_to or 1
    if least == 0 and name not in work.must_stay:
        return 0
    return min(units, -(-max(least, 1) // step) * step)


def _measured(work: Work, name: str, fractions: Sequence[float]) -> list[int]:
    units, least = work.units[name], narrowest(work, name)
    widths = {min(units - 1, max(1, least, round(fraction * units))) for fraction in fractions}
    return sorted({*widths, 0} if least == 0 else widths)


def _narrowed(work: Work, name: str, kept: tuple[int, ...], runner: Runner) -> Edits:
    """The dense network with one dimension narrowed, and its consumers refitted to what they gave."""
    edits = Edits({site.number: site.cuts({name: kept}) for site in work.sites_of(name)})
    if work.options.compensate:
        for site in work.sites_of(name):
            where = work.slot(site)
            if where.weight:
                cuts = edits.cuts[site.number]
                data = gather(site, [runner], cuts, dense=False)
                edits = edits | refit(site, data, cuts, where, ridge=work.options.ridge).edits
    return edits


def _scaled(curve: Curve, points: Sequence[tuple[int, float]]) -> Curve:
    """A curve that goes through the measured divergences; between them the factor is interpolated on a log scale."""
    known = [(w, math.log(d / e)) for w, d in points if d > 0 and (e := float(curve.at(w))) > 0]
    if not known:
        return curve
    at, logs = zip(*known, strict=True)
    factors = np.exp(np.interp(curve.kept, at, logs))
    error = np.maximum.accumulate((factors * curve.error)[::-1])[::-1]  # never rises with more units
    return Curve(curve.kept, tuple(error.tolist()))


# Spending the budget --------------------------------------------------------------------------------------------
def budget_widths(work: Work, found: Curves, budget: Budget, batch: Batch) -> dict[str, int]:
    """How many units each hidden dimension keeps; dimensions that lose nothing are left out.

    The allocation by the curves, a careful one that is never much below a uniform cut, and the uniform cut are run as
    whole networks, each also without residual streams. The one whose output is nearest to the dense one on held-out
    examples wins. `search=` more are tried.
    """
    limit = budget.limit(work.survey.cost())
    if budget.count(work.survey.costs, {}) <= limit:
        return {}
    count, step = _counter(work, budget), work.options.round_to
    liked = {n: c for n in found.curves if (c := budget.choices(n, work.units[n], step)) is not None}

    def spend(curves: Mapping[str, Curve], least: Mapping[str, int] | None = None) -> dict[str, int]:
        counts = allocate(curves, count, limit, round_to=step, least=least, allowed=liked)
        shared = work.team.same({name: torch.tensor(n, device="cpu") for name, n in counts.items()})
        return {name: int(n) for name, n in shared.items()}

    streams = {d.name: d.units for d in work.survey.dimensions if d.stream and d.name in work.counts}
    narrow = {name: _wide_enough(liked, name, narrowest(work, name)) for name in found.curves}
    if liked:  # else it was checked before calibration
        budget.check(work.survey.cost(), count(narrow))
    candidates: list[dict[str, int]] = []
    for whole in ({}, streams) if streams and count({**narrow, **streams}) <= limit else ({},):
        uniform = _uniform(work, whole, count, limit, liked)
        for floor in _FLOORS if count(uniform) <= limit else (0.0,):  # one unit of each may be too much
            least = {name: _wide_enough(liked, name, int(floor * width)) for name, width in uniform.items()}
            if (candidate := spend(found.curves, {**least, **whole})) not in candidates:
                candidates.append(candidate)
    judges = [_Judge(work, found, count_examples(batch), batches) for batches in (1, 2)]
    start, _ = judges[0].best(candidates)
    other = width_search(work.options.search)
    if other is None:
        best = _search(work, found, spend, judges, start)
    else:
        problem = _problem(work, judges[0], count, limit, narrow, start, liked)
        shared = {name: torch.tensor(n, device="cpu") for name, n in checked(problem, other(problem)).items()}
        best = {name: int(n) for name, n in work.team.same(shared).items()}
    return {name: width for name, width in best.items() if width < work.units[name]}


def _problem(
    work: Work,
    judge: _Judge,
    count: Callable[[Mapping[str, int]], int],
    limit: int,
    least: Mapping[str, int],
    start: Mapping[str, int],
    liked: Mapping[str, Sequence[int]],
) -> WidthProblem:
    """What another search of widths may look at. Hidden dimensions are in the order in which they are read."""
    names = sorted(least, key=lambda name: work.sites.index(work.sites_of(name)[0]))

    def fit(name: str, width: int) -> int:
        nearest = rounded(max(width, least[name]), work.units[name], work.options.round_to)
        return _wide_enough(liked, name, nearest)

    units = {name: work.units[name] for name in names}
    return WidthProblem(
        units, least, limit, count, fit, judge.divergence, judge.network, start, work.survey, work.model,
        list(work.inputs.again()),
    )  # fmt: skip


def uniform_widths(work: Work, budget: Budget) -> dict[str, int]:
    """The widths of a budget that leaves the same fraction of every hidden dimension."""
    found = _uniform(work, {}, _counter(work, budget), budget.limit(work.survey.cost()), {})
    return {name: width for name, width in found.items() if width < work.units[name]}


def _counter(work: Work, budget: Budget) -> Callable[[Mapping[str, int]], int]:
    """Returns the function that counts what a budget limits, new biases among it."""
    gained = _new_biases(work) if isinstance(budget, Params) else []

    def count(widths: Mapping[str, int]) -> int:
        kept = {name: range(width) for name, width in widths.items()}
        return budget.count(work.survey.costs, widths) + sum(kept_length(extent, kept) for extent in gained)

    return count


def _search(
    work: Work,
    found: Curves,
    spend: Callable[[Mapping[str, Curve]], dict[str, int]],
    judges: Sequence[_Judge],
    start: dict[str, int],
) -> dict[str, int]:
    """Exchange widths between two dimensions at a time, and keep what lowers the divergence of the whole network.

    An exchange raises the curve of one dimension, lowers that of another, and spends the budget anew. The second half
    of the search sees twice the sample, where it goes on from the start if that is better.
    """
    wanted: Any = work.options.search  # a number: else another search runs
    steps, names = wanted if len(found.curves) > 1 else 0, list(found.curves)
    best, least, judge = start, math.inf, None
    scales = dict.fromkeys(names, 0.0)
    draw = torch.Generator().manual_seed(0)
    for step in track(range(steps), "searching", steps, show=work.options.progress and steps > 0):
        if judge is not (now := judges[2 * step + 1 >= steps]):
            judge, (best, least) = now, now.best([start] if best is start else [start, best])
        up, down = torch.randperm(len(names), generator=draw)[:2].tolist()
        moved = {**scales, names[up]: scales[names[up]] + _STEP, names[down]: scales[names[down]] - _STEP}
        factors = {name: math.exp(scale) for name, scale in moved.items()}
        tried = spend({n: Curve(c.kept, tuple(factors[n] * e for e in c.error)) for n, c in found.curves.items()})
        if (error := judge.divergence(tried)) < least:
            best, least, scales = tried, error, moved
    return best


def _wide_enough(liked: Mapping[str, Sequence[int]], name: str, width: int) -> int:
    """The narrowest width of at least `width` that the budget allows."""
    return next((each for each in liked.get(name, ()) if each >= width), width)


def _uniform(
    work: Work,
    whole: Mapping[str, int],
    count: Callable[[Mapping[str, int]], int],
    limit: int,
    liked: Mapping[str, Sequence[int]],
) -> dict[str, int]:
    """The same fraction of every hidden dimension that is not to stay whole, as large as the limit allows."""

    def widths(fraction: float) -> dict[str, int]:
        units, step = work.units, work.options.round_to
        cut = {name: rounded(max(1, int(fraction * units[name])), units[name], step) for name in work.counts}
        cut = {name: _wide_enough(liked, name, width) for name, width in cut.items()}
        return {**cut, **whole}

    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if count(widths(middle)) <= limit else (low, middle)
    return widths(low)


class _Judge:
    """The divergence of whole candidate networks, pruned and refitted on a sample; held-out examples decide.

    Samples are the first examples of some batches: no graph of another size has to be traced.
    """

    def __init__(self, work: Work, found: Curves, examples: int, batches: int) -> None:
        self._work = work
        self._found = found
        self._fitted = [first_of(each, examples) for each in islice(work.inputs.again(), batches)]
        held = [first_of(each, examples) for each in work.inputs.held_out()]
        self._judged = held or self._fitted
        self._dense: list[Any] = []

    def best(self, candidates: Sequence[dict[str, int]]) -> tuple[dict[str, int], float]:
        """The candidate with the least divergence."""
        errors = [self.divergence(each) for each in candidates]
        return candidates[int(np.argmin(errors))], min(errors)

    def network(self, widths: Mapping[str, int]) -> nn.Module:
        """The network pruned and refitted on the sample."""
        return _Pruned(self._work, self._edits(widths))

    def _edits(self, widths: Mapping[str, int]) -> Edits:
        counts = {name: width for name, width in widths.items() if width < self._work.units[name]}
        work = replace(self._work, counts=counts, options=replace(self._work.options, progress=False))
        given = {name: Selection(self._found.kept(name, width)) for name, width in counts.items()}
        return walk(work, self._fitted, given).edits

    def divergence(self, widths: Mapping[str, int]) -> float:
        """Prune on the sample, and compare outputs."""
        work, edits = self._work, self._edits(widths)
        with work.team.together("the divergence of a candidate"):
            self._dense = self._dense or [self._output(batch, Edits()) for batch in self._judged]
            pairs = zip(self._judged, self._dense, strict=True)
            mine = sum(divergence(self._output(batch, edits), dense, batch) for batch, dense in pairs)
        return float(work.team.total(mine)) / (work.team.size * len(self._judged))

    def _output(self, batch: Batch, edits: Edits) -> Any:
        return Runner(self._work.graphs.of(batch), batch, self._work.tensors, edits).output()


class _Pruned(nn.Module):
    """A candidate network, run by its graph: called as the model, on batches of any size that can be traced."""

    def __init__(self, work: Work, edits: Edits) -> None:
        super().__init__()
        self._work = work
        self._edits = edits

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the pruned model returns."""
        batch = named or (inputs[0] if len(inputs) == 1 else inputs)
        return Runner(self._work.graphs.of(batch), batch, self._work.tensors, self._edits).output()


def _new_biases(work: Work) -> list[Extent]:
    """Outputs of every layer that may gain a bias by compensation: they count as well."""
    if not work.options.compensate or not work.options.adds_biases:
        return []
    behind = dropwhile(lambda site: not site.names, work.stations)  # nothing is lost before the first consumer
    gaining = [site for site in behind if work.slot(site).into == "new bias"]
    return [work.survey.analysis.extent(site.contraction.made[0]) for site in gaining]
