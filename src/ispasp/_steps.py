"""The steps of pruning, each a function from values to a frozen value, and the orders that loop over them.

For each consumer: `measure` what it reads, `select` the units that stay, `compensate` it for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ispasp._evaluate import own_labels
from ispasp._options import Inputs, Options
from ispasp._survey import Survey
from ispasp.compensate.refit import Gathered, Refit, Slot, gather, refit, slot, unfitted
from ispasp.compensate.solve import Halves, Sums
from ispasp.engine.graphs import TracedGraphs
from ispasp.engine.runner import Edits, Lockstep, Runner
from ispasp.engine.sites import Positions, Site, Tally, producers, read, sites
from ispasp.engine.task import TaskLoss, attached, fishers, sensitivities
from ispasp.engine.team import Team
from ispasp.errors import InputError, IspaspError
from ispasp.graph.trace import Batch, named_tensors
from ispasp.report import track
from ispasp.select import Selector, selector
from ispasp.select.evidence import descending
from ispasp.types import Fisher, Reading, Selection, Sensitivity, Statistics
from ispasp.types.dimension import kept_mask, names_in
from ispasp.types.statistics import measurable


@dataclass(frozen=True, eq=False)
class Work:
    """Everything that the steps read. No step changes it. `counts[name]` units of each hidden dimension stay.

    `unread` has the hidden dimensions that calibration cannot follow, with the reason; `must_stay` those that cannot be
    removed entirely.
    """

    model: nn.Module
    survey: Survey
    graphs: TracedGraphs
    example: Batch  # what the survey ran on
    inputs: Inputs
    options: Options
    team: Team
    counts: Mapping[str, int]
    unread: Mapping[str, str] = field(default_factory=dict)
    must_stay: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def selector(self) -> Selector:
        return selector(self.options.method)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.model)

    @cached_property
    def units(self) -> dict[str, int]:
        return {d.name: d.units for d in self.survey.dimensions}

    @cached_property
    def sites(self) -> list[Site]:
        """The contractions that read the hidden dimensions to be pruned."""
        return sites(self.survey.analysis, self.counts)

    @cached_property
    def stations(self) -> list[Site]:
        """The contractions where `walk` stops: the sites, or with refit="all" every one."""
        everything = self.options.refit == "all" and self.options.compensate == "dense"
        every = sites(self.survey.analysis, self.counts, others=True) if everything else self.sites
        return [s for s in every if all(s.number in graph.contractions for graph in self.graphs.every)]

    @cached_property
    def fishers(self) -> dict[int, tuple[Fisher, ...]]:
        """Squared gradients at the outputs of every site in the dense network: one pass forward and back."""
        total: dict[int, tuple[Fisher, ...]] = {}
        with self.team.together("the Fisher information"):
            for batch in self.inputs.again():
                for number, parts in fishers(self.sites, self.graphs, self.tensors, batch, own_labels).items():
                    known = total.get(number)
                    total[number] = parts if known is None else tuple(a + b for a, b in zip(known, parts, strict=True))
        return total

    @property
    def needs(self) -> set[str]:
        return set(self.selector.needs) & set(measurable())

    def runner(self, batch: Batch, edits: Edits | None = None) -> Runner:
        """The network with these edits, about to run a batch."""
        return Runner(self.graphs.of(batch), batch, self.tensors, edits or Edits())

    def positions(self, examples: int, *, alone: bool = False) -> Positions:
        """What second moments look at, over so many examples."""
        return Positions(self.options.positions, examples, alone and self.team.size == 1)

    def keeping(self, counts: Mapping[str, int]) -> Work:
        """The same work with other widths; what calibration cannot follow stays whole."""
        return replace(self, counts={name: n for name, n in counts.items() if name not in self.unread})

    def sites_of(self, name: str) -> list[Site]:
        return [site for site in self.sites if name in site.names]

    def slot(self, site: Site) -> Slot:
        found = slot(site, self.graphs, self.model, self.tensors)
        adds = self.options.adds_biases and (bool(site.names) or self.options.bias == "add")
        keeps = found.into == "new bias" and not adds
        return Slot(found.weight, why_not="bias='keep' adds none") if keeps else found


@dataclass(frozen=True, eq=False)
class Decisions:
    """Decisions so far, and the edits that make the dense network the pruned one."""

    selections: Mapping[str, Selection] = field(default_factory=dict)
    edits: Edits = field(default_factory=Edits)
    refits: Mapping[int, Refit] = field(default_factory=dict)  # by contraction

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        return {name: selection.kept for name, selection in self.selections.items()}

    @property
    def gained(self) -> dict[str, int]:
        """Modules that gain a bias, and the contraction it belongs to."""
        return {refit.gained: number for number, refit in self.refits.items() if refit.gained}

    def with_selection(self, work: Work, name: str, selection: Selection) -> Decisions:
        """Record a selection: its consumers now read the kept units only."""
        done = replace(self, selections={**self.selections, name: selection})
        cuts = {site.number: site.cuts(done.kept) for site in work.sites_of(name)}
        return replace(done, edits=self.edits | Edits(cuts))

    def with_refit(self, number: int, refit: Refit) -> Decisions:
        """Record a refit: the consumer now has its new weight."""
        return replace(self, refits={**self.refits, number: refit}, edits=self.edits | refit.edits)


# The orders -----------------------------------------------------------------------------------------------------
def decide(work: Work, given: Mapping[str, Selection]) -> Decisions:
    """Decide every hidden dimension, in the order of the options. `given` ones are decided already."""
    done = _decide(work, given)
    # Ranks may round differently: all take the weights of rank 0.
    tensors = work.team.same(done.edits.tensors)
    biases = work.team.same({str(number): value for number, value in done.edits.biases.items()})
    edits = Edits(tensors=tensors, biases={int(number): value for number, value in biases.items()})
    return replace(done, edits=done.edits | edits)


def _decide(work: Work, given: Mapping[str, Selection]) -> Decisions:
    order, chosen = work.options.order, dict(given)
    if order != "sequential" and set(work.counts) - set(given):
        found = measure_all(work, work.inputs.again(), work.inputs.examples)
        found = {name: statistics for name, statistics in found.items() if name not in given}
        if order == "global":
            chosen |= select_together(work, found)
        else:
            chosen |= {name: select(work, name, statistics) for name, statistics in found.items()}
    if order != "sequential" and work.options.compensate != "dense":
        return compensate_at_once(work, chosen)
    with work.team.together("the reading of the batches"):
        batches = list(work.inputs.again())
    return walk(work, batches, chosen)


def walk(work: Work, batches: Sequence[Batch], given: Mapping[str, Selection]) -> Decisions:
    """Prune from the first consumer to the last, each seeing the pruned ones, in one pass of all batches."""
    done, options = Decisions(), work.options
    lockstep = Lockstep(work.graphs, batches, work.tensors, twin=options.compensate == "dense", memory=options.memory)
    for site in track(work.stations, "pruning", len(work.stations), show=options.progress):
        for name in work.counts:
            if name in site.names and name not in done.selections:
                selection = given.get(name) or select(work, name, measure(work, name, site, lockstep, done))
                done = done.with_selection(work, name, selection)
        if done.selections:  # before that, there is nothing to compensate for
            found = compensate(work, site, lockstep, done)
            done = done if found is None else done.with_refit(site.number, found)
    return done


def compensate_at_once(work: Work, chosen: Mapping[str, Selection]) -> Decisions:
    """Remove units everywhere, then compensate each consumer with the inputs of the dense network."""
    done = Decisions()
    for name in work.counts:
        done = done.with_selection(work, name, chosen[name])
    notes: dict[int, str] = {}
    if work.options.compensate == "local":
        slots = {site.number: work.slot(site) for site in work.sites}
        notes = {number: f"not compensated: {where.why_not}" for number, where in slots.items() if not where.weight}
        data = _gather_all(work, done, slots.keys() - notes.keys())
        for site in work.sites:
            if site.number in data:
                done = done.with_refit(site.number, _refit(work, site, data[site.number], done, slots[site.number]))
    lockstep = Lockstep(work.graphs, [work.inputs.first], work.tensors, twin=False)
    for site in work.stations:
        if site.number not in done.refits:
            done = done.with_refit(site.number, _without_refit(work, site, lockstep, done, notes.get(site.number, "")))
    return done


# Measure --------------------------------------------------------------------------------------------------------
def measure(work: Work, name: str, site: Site, lockstep: Lockstep, done: Decisions) -> Statistics:
    """Measure a hidden dimension at all its consumers, while all batches wait in front of the first."""

    def of_all(runners: Iterator[Runner]) -> Statistics:
        tally = Tally(work.selector.parts, work.team.rank, work.team.size)
        for number, runner in enumerate(runners):
            found = [
                read(at, [name], runner, work.needs, number, _kept_outputs(work, at, done), positions)[name]
                for at in where
            ]
            tally.add(name, tuple(reading for rows in found for reading in rows), number)
            if not work.needs:
                break  # weights are the same for every batch
        return tally.statistics(work.units[name], [name])

    where, positions = work.sites_of(name), work.positions(lockstep.examples)
    with work.team.together(f"the calibration of {name!r}"):
        found = lockstep.over(site.number, done.edits, of_all)
    return with_task(work, {name: found}, done)[name]


def measure_all(work: Work, batches: Iterable[Batch], examples: int) -> dict[str, Statistics]:
    """Measure every hidden dimension in the dense network, in one pass and constant memory."""
    tally = Tally(work.selector.parts, work.team.rank, work.team.size)
    positions = work.positions(examples)
    with work.team.together("the calibration"):
        for number, batch in enumerate(track(batches, "calibrating", show=work.options.progress)):
            for site, runner in stops(work, batch):
                names = sorted(site.names)
                for name, rows in read(site, names, runner, work.needs, number, positions=positions).items():
                    tally.add((name, site.number), rows, number)
    keys = {name: [(name, site.number) for site in work.sites_of(name)] for name in work.counts}
    return with_task(work, {name: tally.statistics(work.units[name], keys[name]) for name in keys}, Decisions())


def stops(work: Work, batch: Batch) -> Iterator[tuple[Site, Runner]]:
    """Run a batch through the dense network; yields in front of each site."""
    runner = work.runner(batch)
    for site in work.sites:
        runner.advance(runner.graph.contractions[site.number])
        yield site, runner


def with_task(work: Work, found: Mapping[str, Statistics], done: Decisions) -> dict[str, Statistics]:
    """Add what else the method needs: producers; sensitivities and task losses in the network as it is now."""
    found, needs, loss = dict(found), work.selector.needs, work.options.loss
    if "producers" in needs:
        dense = Runner(work.graphs.first, work.example, work.tensors, Edits())
        for name, each in found.items():
            found[name] = replace(each, producers=producers(work.survey.analysis, name, dense))
    if "sensitivity" in needs:
        where = [site for site in work.sites if site.names & set(found)]
        totals: dict[tuple[int, str], Sensitivity] = {}
        with work.team.together("the sensitivities"):
            probed = {site.number: site.contraction.data for site in where}
            for batch, given in work.inputs.pairs():
                runner = Runner(work.graphs.of(batch), batch, work.tensors, done.edits, probed=probed)
                parts = sensitivities(where, work.units, runner, given, loss or own_labels)
                totals = {key: totals[key] + part if key in totals else part for key, part in parts.items()}
        found = {name: attached(each, name, work.sites_of(name), totals) for name, each in found.items()}
    if "fisher" in needs:
        for name, each in found.items():
            squares = (part for site in work.sites_of(name) for part in work.fishers[site.number])
            rows = zip(each.readings, squares, strict=True)
            readings = tuple(Reading(row.consumer, *row.statistics.values(), fisher) for row, fisher in rows)
            found[name] = replace(each, readings=readings)
    if "task" in needs:
        pairs = list(work.inputs.pairs())
        for name, each in found.items():
            known = work.sites_of(name), work.graphs, work.tensors, done.edits, done.kept
            found[name] = replace(each, task=TaskLoss(name, *known, pairs, work.team, loss))
    return found


def _kept_outputs(work: Work, site: Site, done: Decisions) -> Tensor | None:
    """Mask of a consumer's outputs: 0 for removed ones, else 1; None if all stay."""
    made = site.contraction.made
    extent = work.survey.analysis.extent(made[0]) if len(made) == 1 else ()
    if not names_in(extent) & set(done.kept):
        return None
    device = work.tensors[sorted(site.contraction.parameters)[0]].device
    return kept_mask(extent, done.kept).double().to(device)


# Select ---------------------------------------------------------------------------------------------------------
def select(work: Work, name: str, statistics: Statistics) -> Selection:
    """Select units by the statistics of all ranks; every rank gets the same answer."""
    total = total_statistics(work.team, statistics)
    try:
        selection = work.selector.select(total, work.counts[name])
    except IspaspError as error:
        raise type(error)(f"hidden dimension {name!r}: {error}") from error
    kept = tuple(work.team.same({"kept": torch.tensor(selection.kept, device="cpu")})["kept"].tolist())
    if kept != selection.kept:  # ranks may round differently: rank 0 decides
        selection = Selection(kept, scores=selection.scores)
    return selection if work.options.compensate else replace(selection, factors=work.selector.factors(total, kept))


def select_together(work: Work, found: Mapping[str, Statistics]) -> dict[str, Selection]:
    """Rank the units of all hidden dimensions together. Their total stays, and each dimension keeps at least one.

    Scores are divided by their l2 norm in each hidden dimension, as Michel et al. (2019) do for heads.
    """
    totals = ((name, total_statistics(work.team, statistics)) for name, statistics in found.items())
    choices = {name: work.selector.select(total, work.units[name]) for name, total in totals}
    if not all(choice.scores for choice in choices.values()):
        raise InputError(
            f"method {work.selector.name!r} does not score units one by one, and order='global' ranks scores: choose "
            "'taylor', 'topk', 'l1', 'l2', 'fpgm' or 'slimming', or another order"
        )
    scores = {name: torch.tensor(choice.scores, dtype=torch.float64, device="cpu") for name, choice in choices.items()}
    scores = work.team.same({name: s / s.norm() if float(s.norm()) > 0 else s for name, s in scores.items()})
    best = {name: int(descending(s)[0]) for name, s in scores.items()}  # none may vanish
    free = [(name, unit) for name, s in scores.items() for unit in range(len(s)) if unit != best[name]]
    values = torch.stack([scores[name][unit] for name, unit in free])
    spare = sum(work.counts[name] for name in found) - len(best)
    kept: dict[str, list[int]] = {name: [unit] for name, unit in best.items()}
    for at in descending(values)[:spare].tolist():
        kept[free[at][0]].append(free[at][1])
    return {name: replace(choices[name], kept=tuple(sorted(units))) for name, units in kept.items()}


def total_statistics(team: Team, statistics: Statistics) -> Statistics:
    """Add the statistics of all ranks. Mini-batches that no rank had are left out."""
    parts = [team.sum(part) for part in statistics.parts]
    with_data = tuple(part for part in parts if any(reading.statistics for reading in part.readings))
    return replace(team.sum(statistics), parts=with_data)


# Compensate -----------------------------------------------------------------------------------------------------
def compensate(work: Work, site: Site, lockstep: Lockstep, done: Decisions) -> Refit | None:
    """Refit one consumer, or measure its error as it is; None for a layer that reads nothing pruned and stays."""
    note = ""
    if work.options.compensate:
        where = work.slot(site)
        if where.weight:
            cuts, dense = done.edits.cuts.get(site.number, ()), work.options.compensate == "dense"
            positions = work.positions(lockstep.examples, alone=True)
            with work.team.together(f"the compensation of {site.path}"):
                gathered = lambda all_: gather(site, all_, cuts, positions, dense=dense)  # noqa: E731
                found = lockstep.over(site.number, done.edits, gathered)
            return _refit(work, site, found, done, where)
        note = f"not compensated: {where.why_not}"
    return _without_refit(work, site, lockstep, done, note) if site.names else None


def _refit(work: Work, site: Site, data: Gathered, done: Decisions, where: Slot) -> Refit:
    first, second = (Sums(**work.team.sum_tensors(s.tensors())) for s in (data.sums.first, data.sums.second))
    total = replace(data, sums=Halves(first, second), examples=work.team.total(data.examples))
    return refit(site, total, done.edits.cuts.get(site.number, ()), where, ridge=work.options.ridge)


def _without_refit(work: Work, site: Site, lockstep: Lockstep, done: Decisions, note: str) -> Refit:
    """The error of a consumer on the first batch, after the method's own rescaling."""
    chosen = {name: done.selections[name].factors for name in sorted(site.names)}
    factors = {name: values for name, values in chosen.items() if values}
    where = work.slot(site) if factors else Slot()
    with work.team.together(f"the error at {site.path}"):
        one = lambda all_: unfitted(site, next(all_), factors, done.kept, where)  # noqa: E731
        found = lockstep.over(site.number, done.edits, one)
    before, after, size = map(work.team.total, (found.before, found.after, found.size))
    return replace(found, before=before, after=after, size=size, note=note or found.note)


def _gather_all(work: Work, done: Decisions, numbers: Collection[int]) -> dict[int, Gathered]:
    """Sums for the local compensation of these sites, in one pass of the dense network."""
    found: dict[int, Gathered] = {}
    positions = work.positions(work.inputs.examples)
    with work.team.together("the compensation"):
        for count, batch in enumerate(track(work.inputs.again(), "compensating", show=work.options.progress)):
            for site, runner in stops(work, batch):
                if site.number in numbers:
                    cuts = done.edits.cuts.get(site.number, ())
                    part = gather(site, [runner], cuts, positions, dense=False, first=count)
                    found[site.number] = found[site.number] + part if site.number in found else part
    return found
