"""One call of `prune_`, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ispasp.api.budgets import budget_widths, error_curves
from ispasp.api.evaluation import Judge, Scores, check_runs, scored
from ispasp.api.everywhere import ranked_together
from ispasp.api.evidence import Evidence, Setting
from ispasp.api.history import remember_
from ispasp.api.inputs import Inputs, surveyed
from ispasp.api.job import Job
from ispasp.api.oneshot import collect, compensate_locally
from ispasp.api.options import Options
from ispasp.api.proof import Proof
from ispasp.api.recalibrate import recalibrate_
from ispasp.api.result import Layer, Result, Whole
from ispasp.api.sequential import sequential
from ispasp.api.survey import Survey
from ispasp.api.task import with_sensitivities, with_task
from ispasp.api.widths import Widths, prunable, rounded, widths
from ispasp.budget import Budget, Curve
from ispasp.calibrate.alike import alike, graphs_alike, weights_alike
from ispasp.calibrate.batches import signature
from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.team import Team
from ispasp.calibrate.traces import Circuits
from ispasp.errors import SurgeryError
from ispasp.graph.ops import op_of
from ispasp.graph.trace import Batch
from ispasp.select import selector
from ispasp.surgery.fold import Folding
from ispasp.surgery.remove import Undo, all_or_nothing, kept_part, remove_, set_data
from ispasp.surgery.verify import FLOAT32
from ispasp.train.losses import LabelLoss
from ispasp.types import Selection
from ispasp.types.dimension import FrozenAxis
from ispasp.types.layout import names_in
from ispasp.types.plan import Plan, TensorLayout

_ONE_SHAPE = "calibrate with batches of one shape on all ranks"


class Run:
    """One call of `prune_`, step by step."""

    def __init__(
        self, model: nn.Module, batches: Iterable[Any], options: Options, ranks: Team, layers: Folding
    ) -> None:
        """Survey the model; layers that compute their weight are folded for it."""
        self._model = model
        self._layers = layers
        self._options = options
        self._team = ranks
        self._selector = selector(options.method)
        self._curves: dict[str, Curve] = {}
        weights_alike(ranks, model)
        with ranks.together("the survey"):
            self._batches = Inputs(model, batches, options)
            if isinstance(options.loss, LabelLoss):
                options.loss.check(next(self._batches.pairs())[1])
            self._survey, self._example, also = surveyed(model, self._batches, options, layers)
            self._circuits = Circuits(model, self._survey.analysis, self._example, also)
            self._check_keep()
            self._unread = self._without_normal_form()
        graphs_alike(ranks, self._survey.analysis.trace, signature(self._example))
        alike(ranks, "the survey", lambda: _surveyed(self._survey, self._unread), _ONE_SHAPE)

    def result(self) -> Result:
        """Decide, then act."""
        options = self._options
        with self._team.together("the predictions of the dense model"):
            judge = Judge(self._model, self._batches.held_out(), self._batches.first)
        before = scored(options.evaluate, self._model, self._team) if options.evaluate else {}
        chosen = self._widths()
        frozen = [FrozenAxis(name, why) for name, why in self._unread.items() if name in chosen.counts]
        job = self._job({name: n for name, n in chosen.counts.items() if name not in self._unread})
        with self._team.together("the check of the optimizer"):
            self._layers.check(options.optimizer, self._survey.structure.folding(job.counts).folded)
        if options.curves and not self._curves:
            self._curves = error_curves(job, [self._batches.first], self._batches.first)
        decided = {name: Selection(kept) for name, kept in chosen.given.items() if name in job.counts}
        self._decide(job, decided)
        self._share(job)
        with self._team.together("the plan"):
            plan = self._plan(job)
            proof = Proof(self._setting(job), self._example)
        alike(self._team, "the plan", lambda: _planned(plan), "report this, and prune in one process")
        with all_or_nothing() as undo:
            evidence = self._operate(job, plan, proof, undo)
            self._check_divided()
            if options.recalibrate:
                recalibrate_(self._model, self._batches.again(), self._team, undo)
            remember_(self._model, plan, undo)
            agreement = judge.agreement(self._model, self._team)
            after = scored(options.evaluate, self._model, self._team) if options.evaluate else {}
            # Inside, so that Ctrl-C here does not leave a pruned model without a result.
            gained = sum(len(self._model.get_parameter(f"{path}.bias")) for path in job.gained)
            cost = self._survey.cost(plan)
            rewritten = {*plan.structure.folded} - {*self._survey.structure.folding(plan.kept).folded}
            gained -= sum(self._layers.lost(path) for path in rewritten)  # refitted, without losing units
            cost = replace(cost, params=cost.params + gained)
            self._layers.restore(but=plan.structure.folded)
            layers = tuple(self._layer(job, name, evidence.certificates[name]) for name in job.counts)
            curves = {name: (curve.kept, curve.error) for name, curve in self._curves.items()}
            rows = (*self._survey.frozen, *frozen)
            return Result(
                self._model,
                plan,
                layers,
                cost,
                rows,
                evidence,
                {**options.described(), **self._batches.described(self._team)},
                _advice(job, evidence, plan),
                curves,
                Scores(before, after) if options.evaluate else None,
                agreement,
                self._left_whole(layers, frozen),
            )

    def _left_whole(self, layers: Sequence[Layer], frozen: Sequence[FrozenAxis]) -> tuple[Whole, ...]:
        """Hidden dimensions that could have lost units and did not, with the reason."""
        o = self._options
        told = {layer.name for layer in layers} | {row.name for row in frozen}
        why = "the budget leaves it whole" if isinstance(o.keep, Budget) else "keep leaves it whole"
        reasons = dict.fromkeys((d.name for d in prunable(self._survey.dimensions, o.skip)), why) | self._unread
        return tuple(
            Whole(d.name, d.kind, d.units, reasons.get(d.name, "skip names it"))
            for d in self._survey.dimensions
            if d.name not in told
        )

    def _without_normal_form(self) -> dict[str, str]:
        """Hidden dimensions that are read in a way calibration does not understand, with the reason."""
        job = self._job({d.name: d.units for d in self._survey.dimensions})
        passage = Passage(self._circuits.of(self._example), self._example, job.tensors, Edits())
        found: dict[str, str] = {}
        for reader in job.readers:
            op = op_of(reader.contraction.node)
            if op is None or not op.total:
                passage.advance(passage.circuit.contractions[reader.number])
                if not reader.forms(passage.arguments(reader.number)):
                    why = (
                        f"{reader.path} reads it by {reader.contraction.node.target} in a way calibration cannot follow"
                    )
                    found.update(dict.fromkeys(reader.names, why))
        return found

    def _job(self, counts: Mapping[str, int]) -> Job:
        o = self._options
        return Job(
            self._model,
            self._survey,
            self._circuits,
            counts,
            self._selector,
            self._team,
            o.compensate,
            o.ridge,
            o.memory,
            o.loss,
            self._batches.pairs,
            o.refit,
            o.progress,
        )

    def _check_keep(self) -> None:
        """Refuse what this model cannot keep, before calibration."""
        o = self._options
        if isinstance(o.keep, Budget):
            dimensions = prunable(self._survey.dimensions, o.skip)
            least = {d.name: rounded(1, d.units, o.round_to) for d in dimensions}
            o.keep.check(self._survey.cost(), o.keep.count(self._survey.costs, least))
        else:
            widths(self._survey.dimensions, o.keep, o.skip, o.round_to)

    def _widths(self) -> Widths:
        o = self._options
        if not isinstance(o.keep, Budget):
            return widths(self._survey.dimensions, o.keep, o.skip, o.round_to)
        names = [d.name for d in prunable(self._survey.dimensions, o.skip) if d.name not in self._unread]
        job = self._job({d.name: d.units for d in self._survey.dimensions if d.name in names})
        self._curves = error_curves(job, self._batches.again(), self._batches.first)
        return Widths(budget_widths(job, self._curves, o.keep, o.round_to), {})

    def _decide(self, job: Job, decided: dict[str, Selection]) -> None:
        if self._options.order == "sequential":
            sequential(job, self._listed(), decided)
            return
        rest = {name for name in job.counts if name not in decided}
        if rest:
            found = collect(job, self._batches.again(), job.data_needs)
            found = with_sensitivities(job, found, Edits())
            whole = {name: with_task(job, name, found[name], Edits()) for name in job.counts if name in rest}
            if self._options.order == "global":
                decided = {**decided, **ranked_together(job, whole)}
            else:
                decided = {**decided, **{name: job.select(name, statistics) for name, statistics in whole.items()}}
        if job.compensate == "dense":
            sequential(job, self._listed(), decided)
            return
        for name in job.counts:
            job.decide(name, decided[name])
        left = compensate_locally(job, self._batches.again()) if job.compensate == "local" else {}
        measured = replace(job, compensate=None, selections={}, refits={}, progress=False)
        sequential(measured, [self._batches.first], decided)
        for number, why in left.items():
            measured.refits[number] = replace(measured.refits[number], note=f"not compensated: {why}")
        job.refits = {**measured.refits, **job.refits}

    def _listed(self) -> Sequence[Batch]:
        with self._team.together("the reading of the batches"):
            return self._batches.listed()

    def _share(self, job: Job) -> None:
        """Machines that round otherwise must end with the same weights: rank 0's."""
        tensors = {f"t:{name}": value for name, value in job.edits.tensors.items()}
        tensors |= {f"b:{number}": value for number, value in job.edits.biases.items()}
        for key, value in self._team.same(tensors).items():
            kind, _, name = key.partition(":")
            if kind == "t":
                job.edits.tensors[name] = value
            else:
                job.edits.biases[int(name)] = value

    def _plan(self, job: Job) -> Plan:
        structure = self._survey.structure
        tensors = dict(structure.tensors)
        for path, number in job.gained.items():
            analysis = self._survey.analysis
            (made,) = analysis.tracker.contractions[number].made
            extent = analysis.extent(made)
            axes = {0: extent} if names_in(extent) else {}
            tensors[f"{path}.bias"] = TensorLayout((len(job.edits.biases[number]),), axes)
        structure = replace(structure, tensors=tensors, biases=tuple(job.gained))
        gained = [f"{path}.bias" for path in job.gained]
        return Plan(job.kept, structure.folding(job.kept, also=[*job.edits.tensors, *gained]))

    def _setting(self, job: Job) -> Setting:
        return Setting(
            self._model, self._survey.analysis, self._circuits, job.readers, job.edits, job.kept, job.tensors
        )

    def _operate(self, job: Job, plan: Plan, proof: Proof, undo: Undo) -> Evidence:
        """Surgery, verified; where the model's own precision cannot tell, once more against float64."""
        with self._team.together("the surgery"):
            _write(self._model, job, plan, undo, self._options.optimizer)
        with self._team.together("the proof"):
            evidence = proof.compare(self._model, plan)
            if not evidence.holds:
                undo.run()
                if proof.look_closer():
                    _write(self._model, job, plan, undo, self._options.optimizer)
                    evidence = proof.compare(self._model, plan)
            if not evidence.holds:
                raise SurgeryError(_difference(evidence))
        return evidence

    def _check_divided(self) -> None:
        """The pruned model runs on a batch as it was given, of which only a part was calibrated with."""
        with self._team.together("the run on a whole batch"):
            if self._batches.divided is not None:
                check_runs(self._model, self._batches.divided)

    def _layer(self, job: Job, name: str, certificate: float | None) -> Layer:
        dimension = next(d for d in self._survey.dimensions if d.name == name)
        selection = job.selections[name]
        errors = job.errors(name)
        return Layer(
            name,
            dimension.kind,
            dimension.units,
            len(selection.kept),
            selection.iterations,
            errors.now,
            certificate,
            errors.before if job.compensate else None,
            job.notes(name),
            errors.held_out,
            selection.scores or None,
        )


def _surveyed(survey: Survey, unread: Mapping[str, str]) -> dict[str, Any]:
    """What must be the same on all machines before their statistics are added."""
    facts: dict[str, Any] = {
        f"hidden dimension {d.name!r}": [d.kind, d.units, list(d.producers), list(d.consumers)]
        for d in survey.dimensions
    }
    facts |= {f"the layout of {name!r}": layout for name, layout in survey.structure.tensors.items()}
    facts["attributes"] = survey.structure.attributes
    facts["weight norms"] = survey.structure.weight_norms
    facts["consumers"] = [[c.kind, sorted(c.parameters)] for c in survey.analysis.tracker.contractions]
    facts["what calibration cannot follow"] = sorted(unread)
    return facts


def _planned(plan: Plan) -> dict[str, Any]:
    kept: dict[str, Any] = {f"hidden dimension {name!r}": units for name, units in plan.kept.items()}
    return {**kept, "the layers that gain a bias": plan.structure.biases, "the folded layers": plan.structure.folded}


def _difference(evidence: Evidence) -> str:
    errors = [(name, error) for name, error in evidence.certificates.items() if error is not None]
    guilty = next((name for name, error in errors if not error <= evidence.limit), "unknown")
    return (
        f"removing units does not equal masking them (relative error {evidence.error:.1e}, hidden dimension {guilty!r} "
        f"first): the model is as it was; pass skip=[{guilty!r}] and report this"
    )


def _advice(job: Job, evidence: Evidence, plan: Plan) -> tuple[str, ...]:
    """What would make the result better, and what to know about it."""
    return (*_few_examples(job), *_amplified(evidence), *_folded(plan.structure.folded))


def _folded(paths: Sequence[str]) -> tuple[str, ...]:
    if not paths:
        return ()
    return (
        f"{len(paths)} layers computed their weight in the forward, as weight standardisation and spectral norm do: "
        f"{paths[0]} and others hold it as a plain weight now. Outputs are the same, training no longer normalises it",
    )


def _amplified(evidence: Evidence) -> tuple[str, ...]:
    if evidence.precise is None and evidence.limit > FLOAT32:
        return (
            "the pruned model is compared in half precision only, since it does not run in float64: a single wrong "
            "unit of a wide layer could hide in rounding; prune it in float32, and convert it afterwards",
        )
    if evidence.precise is None or evidence.error <= evidence.limit:
        return ()
    return (
        f"rounding is amplified: in the model's own precision outputs differ by {evidence.error:.0e} from the masked "
        f"network's, in float64 by {evidence.precise:.0e}; more examples or a larger ridge= make the refit steadier",
    )


def _few_examples(job: Job) -> tuple[str, ...]:
    short = [refit for refit in job.refits.values() if refit.wanted]
    if not short:
        return _unsteady(job)
    worst = max(short, key=lambda refit: refit.wanted)
    given = "1 example makes" if worst.examples == 1 else f"{worst.examples:,} examples make"
    return (
        f"{given} {worst.rows:,} rows, fewer than the columns that {len(short)} of {len(job.refits)} layers are "
        f"refitted by: about {worst.wanted:,} examples would do",
    )


def _unsteady(job: Job) -> tuple[str, ...]:
    """Enough rows to fit, but too few to fit well."""
    fitted = {number: refit for number, refit in job.refits.items() if refit.steady}
    if not fitted:
        return ()
    number, worst = max(fitted.items(), key=lambda item: item[1].steady)
    inside, outside = (math.sqrt(error) for error in worst.errors or (0.0, 0.0))
    path = next((reader.path for reader in job.readers if reader.number == number), "one")
    return (
        f"{len(fitted)} of {len(job.refits)} layers fit the calibration examples much better than new ones, {path} "
        f"most of all (error {inside:.1%}, held out {outside:.1%}): about {worst.steady:,} examples would do",
    )


def _write(model: nn.Module, job: Job, plan: Plan, undo: Undo, optimizer: torch.optim.Optimizer | None) -> None:
    """New weights, then surgery."""
    for name, value in job.edits.tensors.items():
        tensor = job.tensors[name]
        new = torch.empty_like(tensor).copy_(value)  # in the same memory format
        set_data(tensor, new, tensor.grad, undo)
    remove_(model, plan, undo, optimizer)
    for path, number in job.gained.items():
        bias = model.get_submodule(path).bias
        small = kept_part(f"{path}.bias", job.edits.biases[number], plan)
        assert isinstance(bias, torch.Tensor)  # noqa: S101  # surgery has just put it there
        bias.data = small.to(bias)
