"""From a budget to widths, by what the output of the network says.

A curve predicts the error of a hidden dimension at every width. It is scaled by the divergence of the network's output,
measured at a few widths: one dimension is narrowed and its consumers refitted, and the network runs on from there. The
allocation by these curves then competes with simpler ones on the measured divergence of the whole candidate network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, dropwhile, islice
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


@dataclass(frozen=True, eq=False)
class Sample:
    """Batches to refit on, and others to measure the output on."""

    fitted: Sequence[Batch]
    judged: Sequence[Batch]


def sample_of(work: Work, times: int = 1) -> Sample:
    """Take `times` an eighth of the examples, but at least 32 examples or 1,024 tokens.

    Others judge: held-out ones first. There are twice as many of them where hidden dimensions are few, and so runs are.
    """
    inputs = work.inputs
    size = times * _size(inputs.first, inputs.examples)
    fitted = first_batches(inputs.again(), size)
    others = chain(inputs.held_out(), islice(inputs.again(), len(fitted), None))
    return Sample(fitted, first_batches(others, size if _has_many(work) else 2 * size) or fitted)


def _has_many(work: Work) -> bool:
    """Whether hidden dimensions are many. Residual streams do not count: `scope="all"` measures blocks alike."""
    return sum(d.name in work.counts for d in work.survey.dimensions if not d.stream) > _MANY


def _size(batch: Batch, examples: int) -> int:
    """The number of examples in a sample.

    >>> _size(torch.ones(256, 3), 1024), _size(torch.ones(256, 3), 64), _size(torch.ones(8, 256, dtype=torch.long), 64)
    (128, 32, 8)
    """
    tokens = next((t.shape[1] for t in tensors_of(batch) if t.ndim == 2 and not t.is_floating_point()), 0)
    return max(-(-_TOKENS // tokens) if tokens else _FEWEST, math.ceil(_SAMPLE * examples))


def first_batches(batches: Iterable[Batch], examples: int) -> list[Batch]:
    """The first batches that hold that many examples, whole ones: another size must be traced. Only the first is cut.

    >>> [len(batch) for batch in first_batches([torch.ones(4, 3)] * 4, 6)], len(first_batches([torch.ones(9, 3)], 6)[0])
    ([4, 4], 6)
    """
    found: list[Batch] = []
    taken = 0
    for batch in batches:
        found.append(batch if found else first_of(batch, examples))
        taken += count_examples(found[-1])
        if taken >= examples:
            break
    return found


def error_curves(work: Work, batches: Sequence[Batch]) -> Curves:
    """Error at the consumers against kept units, predicted from a sample, compensation counted in if there is one."""
    energies = work.team.sum_tensors(_energies(work, batches))
    found = measure_all(work, batches, sum(map(count_examples, batches)))
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


def _energies(work: Work, batches: Sequence[Batch]) -> dict[str, Tensor]:
    with work.team.together("the error curves"):
        found: dict[str, Tensor] = {}
        for site, runner in chain.from_iterable(stops(work, batch) for batch in batches):
            factor = scale(runner.graph.tails[site.number], runner.fixed)
            for H, consumers in site.products(sorted(site.names), site.unpadded(runner), factor):
                for name, consumer in consumers.items():
                    E = sampled_energy(consumer, H, work.units[name])
                    found[name] = found[name] + E if name in found else E
    return found


# By the output --------------------------------------------------------------------------------------------------
def output_curves(work: Work, found: Curves, sample: Sample) -> Curves:
    """Scale curves by the divergence of the output, measured at one or two widths a dimension, and at zero.

    Costs one to three passes of the judged examples from each dimension on: half a pass each, on average. They are not
    the ones that the consumers are refitted on, if there are enough: a wide layer fits a few examples exactly.
    """
    fractions = _WIDTHS[:1] if _has_many(work) else _WIDTHS
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in work.counts}
    with work.team.together("the divergences of the output"):
        same = sample.fitted is sample.judged
        judges, fitted = ([work.runner(batch) for batch in each] for each in (sample.judged, sample.fitted))
        dense = [runner.branch(Edits()).output() for runner in judges]
        examples = sum(map(count_examples, sample.fitted))
        for name in track(_in_order(work), "measuring", len(work.counts), show=work.options.progress):
            for runner in judges if same else (*judges, *fitted):
                runner.advance(runner.graph.contractions[work.sites_of(name)[0].number])
            for width in _measured(work, name, fractions):
                edits = _narrowed(work, name, found.kept(name, width), judges if same else fitted, examples)
                outputs = [runner.branch(edits).output() for runner in judges]
                errors = [divergence(*each) for each in zip(outputs, dense, sample.judged, strict=True)]
                points[name].append((width, sum(errors) / len(errors)))
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


def _narrowed(work: Work, name: str, kept: tuple[int, ...], runners: Sequence[Runner], examples: int) -> Edits:
    """The dense network with one dimension narrowed, and its consumers refitted to what they gave."""
    edits = Edits({site.number: site.cuts({name: kept}) for site in work.sites_of(name)})
    if work.options.compensate:
        for site in work.sites_of(name):
            where = work.slot(site)
            if where.weight:
                cuts = edits.cuts[site.number]
                data = gather(site, runners, cuts, work.positions(examples, alone=True), dense=False)
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
def budget_widths(work: Work, found: Curves, budget: Budget) -> dict[str, int]:
    """How many units each hidden dimension keeps; dimensions that lose nothing are left out.

    The allocation by the curves, a careful one that is never much below a uniform cut, and the uniform cut are run as
    whole networks, each also without residual streams. The one whose output is nearest to the dense one on held-out
    examples wins. `search=` more are tried.
    """
    if budget.count(work.survey.costs, {}) <= budget.limit(work.survey.cost()):
        return {}
    limit = _Limit(work, budget)
    streams = {d.name: d.units for d in work.survey.dimensions if d.stream and d.name in work.counts}
    if limit.liked:  # else it was checked before calibration
        budget.check(work.survey.cost(), limit.count(limit.least))
    candidates: list[dict[str, int]] = []
    for whole in ({}, streams) if streams and limit.fits({**limit.least, **streams}) else ({},):
        uniform = limit.uniform(whole)
        for floor in _FLOORS if limit.fits(uniform) else (0.0,):  # one unit of each may be too much
            least = {name: limit.wide_enough(name, int(floor * width)) for name, width in uniform.items()}
            if (candidate := limit.spend(found.curves, {**least, **whole})) not in candidates:
                candidates.append(candidate)
    judges = [_Judge(work, found, sample_of(work, times)) for times in (1, 2)]
    start, _ = judges[0].best(candidates)
    other = width_search(work.options.search)
    if other is None:
        best = _search(limit, found, judges, start)
    else:
        problem = limit.problem(judges[0], start)
        best = limit.shared(checked(problem, other(problem)))
    return {name: width for name, width in best.items() if width < work.units[name]}


def uniform_widths(work: Work, budget: Budget) -> dict[str, int]:
    """The widths of a budget that leaves the same fraction of every hidden dimension."""
    found = _Limit(work, budget).uniform({})
    return {name: width for name, width in found.items() if width < work.units[name]}


class _Limit:
    """What a budget counts, new biases among it, and the widths that it allows."""

    def __init__(self, work: Work, budget: Budget) -> None:
        self.work = work
        self._budget, self._most = budget, budget.limit(work.survey.cost())
        self._gained = _new_biases(work) if isinstance(budget, Params) else []
        choices = {name: budget.choices(name, work.units[name], work.options.round_to) for name in work.counts}
        self.liked = {name: widths for name, widths in choices.items() if widths is not None}
        self.least = {name: self.wide_enough(name, narrowest(work, name)) for name in work.counts}

    def count(self, widths: Mapping[str, int]) -> int:
        kept = {name: range(width) for name, width in widths.items()}
        return self._budget.count(self.work.survey.costs, widths) + sum(kept_length(e, kept) for e in self._gained)

    def fits(self, widths: Mapping[str, int]) -> bool:
        return self.count(widths) <= self._most

    def wide_enough(self, name: str, width: int) -> int:
        """The narrowest width of at least `width` that the budget allows."""
        return next((each for each in self.liked.get(name, ()) if each >= width), width)

    def uniform(self, whole: Mapping[str, int]) -> dict[str, int]:
        """The same fraction of every hidden dimension that is not to stay whole, as large as the limit allows."""
        units = self.work.units

        def widths(fraction: float) -> dict[str, int]:
            cut = {name: self._rounded(name, max(1, int(fraction * units[name]))) for name in self.work.counts}
            return {**cut, **whole}

        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if self.fits(widths(middle)) else (low, middle)
        return widths(low)

    def _rounded(self, name: str, width: int) -> int:
        return self.wide_enough(name, rounded(width, self.work.units[name], self.work.options.round_to))

    def spend(self, curves: Mapping[str, Curve], least: Mapping[str, int] | None = None) -> dict[str, int]:
        """The widths of the least error by these curves."""
        step = self.work.options.round_to
        return self.shared(allocate(curves, self.count, self._most, round_to=step, least=least, allowed=self.liked))

    def shared(self, widths: Mapping[str, int]) -> dict[str, int]:
        """The widths of rank 0."""
        found = self.work.team.same({name: torch.tensor(n, device="cpu") for name, n in widths.items()})
        return {name: int(n) for name, n in found.items()}

    def problem(self, judge: _Judge, start: Mapping[str, int]) -> WidthProblem:
        """What another search of widths may look at. Hidden dimensions are in the order in which they are read."""
        work, least, batches = self.work, self.least, list(self.work.inputs.again())
        units = {name: work.units[name] for name in _in_order(work)}

        def fit(name: str, width: int) -> int:
            return self._rounded(name, max(width, least[name]))

        network, error = judge.network, judge.divergence
        return WidthProblem(
            units, least, self._most, self.count, fit, error, network, start, work.survey, work.model, batches
        )


def _in_order(work: Work) -> list[str]:
    return sorted(work.counts, key=lambda name: work.sites.index(work.sites_of(name)[0]))


def _search(limit: _Limit, found: Curves, judges: Sequence[_Judge], start: dict[str, int]) -> dict[str, int]:
    """Exchange widths between two dimensions at a time, and keep what lowers the divergence of the whole network.

    An exchange raises the curve of one dimension, lowers that of another, and spends the budget anew. The second half
    of the search sees twice the sample, where it goes on from the start if that is better.
    """
    wanted: Any = limit.work.options.search  # a number: else another search runs
    steps, names = wanted if len(found.curves) > 1 else 0, list(found.curves)
    best, least, judge = start, math.inf, None
    scales = dict.fromkeys(names, 0.0)
    draw = torch.Generator().manual_seed(0)
    for step in track(range(steps), "searching", steps, show=limit.work.options.progress and steps > 0):
        if judge is not (now := judges[2 * step + 1 >= steps]):
            judge, (best, least) = now, now.best([start] if best is start else [start, best])
        up, down = torch.randperm(len(names), generator=draw)[:2].tolist()
        moved = {**scales, names[up]: scales[names[up]] + _STEP, names[down]: scales[names[down]] - _STEP}
        factors = {name: math.exp(scale) for name, scale in moved.items()}
        tried = limit.spend({n: Curve(c.kept, tuple(factors[n] * e for e in c.error)) for n, c in found.curves.items()})
        if (error := judge.divergence(tried)) < least:
            best, least, scales = tried, error, moved
    return best


class _Judge:
    """The divergence of whole candidate networks, pruned and refitted on a sample; held-out examples decide."""

    def __init__(self, work: Work, found: Curves, sample: Sample) -> None:
        self._work, self._found, self._sample = work, found, sample
        self._dense: list[Any] = []

    def best(self, candidates: Sequence[dict[str, int]]) -> tuple[dict[str, int], float]:
        errors = [self.divergence(each) for each in candidates]
        return candidates[int(np.argmin(errors))], min(errors)

    def network(self, widths: Mapping[str, int]) -> nn.Module:
        return _Pruned(self._work, self._edits(widths))

    def _edits(self, widths: Mapping[str, int]) -> Edits:
        counts = {name: width for name, width in widths.items() if width < self._work.units[name]}
        work = replace(self._work, counts=counts, options=replace(self._work.options, progress=False))
        given = {name: Selection(self._found.kept(name, width)) for name, width in counts.items()}
        return walk(work, self._sample.fitted, given).edits

    def divergence(self, widths: Mapping[str, int]) -> float:
        work, edits = self._work, self._edits(widths)
        with work.team.together("the divergence of a candidate"):
            batches = self._sample.judged
            self._dense = self._dense or [work.runner(batch).output() for batch in batches]
            outputs = (work.runner(batch, edits).output() for batch in batches)
            mine = sum(divergence(*each) for each in zip(outputs, self._dense, batches, strict=True))
        return float(work.team.total(mine)) / (work.team.size * len(batches))


class _Pruned(nn.Module):
    """A candidate network, run by its graph: called as the model, on batches of any size that can be traced."""

    def __init__(self, work: Work, edits: Edits) -> None:
        super().__init__()
        self._work, self._edits = work, edits

    def forward(self, *inputs: Any, **named: Any) -> Any:
        batch = named or (inputs[0] if len(inputs) == 1 else inputs)
        return self._work.runner(batch, self._edits).output()


def _new_biases(work: Work) -> list[Extent]:
    """Outputs of every layer that may gain a bias by compensation: they count as well."""
    if not work.options.compensate or not work.options.adds_biases:
        return []
    behind = dropwhile(lambda site: not site.names, work.stations)  # nothing is lost before the first consumer
    gaining = [site for site in behind if work.slot(site).into == "new bias"]
    return [work.survey.analysis.extent(site.contraction.made[0]) for site in gaining]
