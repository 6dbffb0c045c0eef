"""The result of `ispasp.prune`: the pruned model and the evidence."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from torch import nn

from ispasp._evaluate import Agreement, Scores
from ispasp._heal import HealResult
from ispasp._keep import Widths, prunable
from ispasp._latency import LatencyResult
from ispasp._steps import Decisions, Work
from ispasp._store import SavedFolder, save
from ispasp.budget import Budget
from ispasp.budget.tradeoffs import Tradeoffs
from ispasp.compensate.refit import Refit
from ispasp.files import write_page
from ispasp.graph.analyse import NOT_CALLED
from ispasp.report import Column, Printed, Sheet, change, figures, told
from ispasp.report.html import html
from ispasp.surgery.fold import Folding
from ispasp.surgery.remove import plans_of
from ispasp.surgery.verify import FLOAT32
from ispasp.types.dimension import Cost, FrozenAxis
from ispasp.types.plan import Plan

_PRECISE = 1e-6  # in float64: rounding amplified by a condition of up to 1e10


@dataclass(frozen=True)
class Evidence:
    """Comparison with the masked network. A certificate is None if nothing could be compared; `unproved` says why."""

    error: float
    limit: float
    certificates: Mapping[str, float | None]
    unproved: Mapping[str, str]
    outputs: int  # entries of the model's outputs that were compared
    consumers: int  # consumers whose outputs were compared
    kinds: int  # kinds of batches that the pruned model ran on
    precise: float | None = None  # the error in float64, where the model's own precision could not tell

    def __str__(self) -> str:
        parts = [f"{self.outputs:,} output values"] if self.outputs else []
        parts += [f"{self.consumers} consumers"] if self.consumers else []
        where = f" on {self.kinds} kinds of batches" if self.kinds > 1 else ""
        compared = " and ".join(parts) or "nothing"
        text = f"{compared} compared with the masked network{where}: relative difference {self.error:.0e}"
        return text if self.precise is None else f"{text}, in float64 {self.precise:.0e}"

    @property
    def holds(self) -> bool:
        """Whether removing equals masking, as far as it could be compared."""
        return self.precise <= _PRECISE if self.precise is not None else self.error <= self.limit


@dataclass(frozen=True)
class Layer:
    """One pruned hidden dimension.

    `kept` of `units` units stay. `relative_error` is ||Y - Y'|| / ||Y|| at its consumers, without their bias: Y is the
    target and Y' the output now, on all calibration batches where the consumer was compensated, else on the first.
    `held_out_error` is the error of a fit to one half of the examples on the other half: what to expect of new data.
    `uncompensated_error` is the error without compensation. `certificate` is the largest relative difference at its
    consumers between the pruned module and the masked dense network, which must be rounding; None where nothing could
    be compared. `scores`: one number per unit if the method scores units; the units with the largest stay.
    """

    name: str
    kind: str
    units: int
    kept: int
    iterations: int
    relative_error: float | None
    certificate: float | None
    uncompensated_error: float | None = None
    notes: tuple[str, ...] = ()
    held_out_error: float | None = None
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Whole:
    """A hidden dimension that could have lost units and did not, and why."""

    name: str
    kind: str
    units: int
    reason: str


@dataclass(frozen=True, eq=False)
class Result(Printed):
    """The pruned model, its plan, cost and evidence. Print it, or show it in a notebook.

    `curves` are predicted errors against kept units, (units, errors): of consumers, or of the output where a budget
    was spent. `tradeoffs` are plain values for predictions of other budgets, empty without curves; the report has a
    page of them. `scores` are by `evaluate`, before and after; `agreement` is that of predictions with the dense
    model's. `whole` are hidden dimensions that a budget, `keep` or `skip` left whole. `latency` is the time of a call
    before and after, where `keep` is a `Latency`. `example` is a small calibration batch, on which `save` compares
    outputs.
    """

    model: nn.Module = field(repr=False)
    plan: Plan = field(repr=False)
    layers: tuple[Layer, ...]
    cost: Cost
    frozen: tuple[FrozenAxis, ...]
    evidence: Evidence  # of what was compared with the masked network
    settings: Mapping[str, Any]
    advice: tuple[str, ...] = ()  # on how to make the result better, or more certain
    curves: Mapping[str, tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict, repr=False)
    scores: Scores | None = None
    agreement: Agreement | None = None
    whole: tuple[Whole, ...] = ()
    healed: HealResult | None = None
    latency: LatencyResult | None = None
    example: Any = field(default=None, repr=False)
    tradeoffs: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def plan_from_dense(self) -> Plan:
        """The plan from the dense model to `model` as it is now; differs from `plan` if it was pruned several times."""
        plans = plans_of(self.model)
        return reduce(Plan.then, plans) if plans else self.plan

    @property
    def verified(self) -> float:
        """Largest relative difference between the pruned model and the masked one; NaN if nothing could be compared."""
        return self.evidence.error if self.evidence.outputs or self.evidence.consumers else math.nan

    @property
    def unproved(self) -> Mapping[str, str]:
        """Hidden dimensions for which nothing could be compared, and why."""
        return self.evidence.unproved

    def rows(self) -> list[dict[str, Any]]:
        """One record of plain values for every hidden dimension, in the order of the network.

        Dimensions that stay whole are there as well, with `kept` equal to `units`: `pandas.DataFrame(result.rows())`.
        """
        found = {layer.name: _row(layer) for layer in self.layers}
        for d in self.whole:
            found[d.name] = _row(Layer(d.name, d.kind, d.units, d.units, 0, None, None, notes=(d.reason,)))
        return [found[name] for name in dict.fromkeys([*self.plan.structure.units, *found]) if name in found]

    def to_json(self) -> str:
        """Everything but the model's weights, as JSON text."""
        named = asdict(self.scores).items() if self.scores else ()
        finite = {when: {name: v if math.isfinite(v) else None for name, v in row.items()} for when, row in named}
        plain = ("settings", "agreement", "latency", "unproved", "advice", "cost", "layers", "whole", "frozen")
        record = {
            "format": "ispasp-result",
            "version": 1,
            **{name: getattr(self, name) for name in plain},
            "scores": finite or None,
            "healed": self.healed.record() if self.healed else None,
            "verified": None if math.isnan(self.verified) else self.verified,
            "proof": str(self.evidence),
            "curves": {name: {"kept": kept, "error": error} for name, (kept, error) in self.curves.items()},
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(record, default=asdict)

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> SavedFolder:
        """Write a folder that `from_pretrained` opens, where it can: `ispasp.save`. Returns it, `.note` says how."""
        return save(self, folder, overwrite=overwrite)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML page that opens offline, with a slider for the budget if there are curves."""
        return write_page(path, html(json.loads(self.to_json()), self.curves, self.tradeoffs))

    def plot(self) -> Any:
        """A matplotlib Figure: units before and after, and errors, layer by layer."""
        return figures.layers(self.rows(), f"{type(self.model).__name__}, pruned")

    def _sheet(self) -> Sheet:
        s, rows = self.settings, self.rows()
        options = f"method {s['method']}, keep={s['keep']}, {s['order']}, compensate={s['compensate']}"
        shown = [{**row, "kept": "all" if row["kept"] == row["units"] else f"{row['kept']:,}"} for row in rows]
        title = f"{type(self.model).__name__}, pruned: {options}"
        return Sheet(title, self.facts(), _columns(rows), shown, self._remarks())

    def facts(self) -> list[tuple[str, str]]:
        """What it cost and what was measured, as names and texts."""
        c = self.cost
        facts = [("parameters", change(c.dense_params, c.params)), ("MACs", change(c.dense_macs, c.macs))]
        facts += [("latency", str(self.latency))] if self.latency else []
        used, held = self.settings["examples"], self.settings["held_out_examples"]
        apart = f", {held:,} of them held out" if held else ""
        rest = "" if self.settings["all_examples"] else " (examples=None takes all)"
        facts.append(("calibrated", f"with {used:,} examples{apart}{rest}"))
        measured = {"healing": self.healed, "agreement": self.agreement, "scores": self.scores}
        return [*facts, *((name, str(value)) for name, value in measured.items() if value is not None)]

    def _remarks(self) -> list[tuple[str, list[str]]]:
        notes = (note.partition(": ") for layer in self.layers for note in layer.notes)  # of consumers, by name
        frozen = [(row.name, row.reason) for row in self.frozen]
        return [
            ("advice", list(self.advice)),
            ("notes", told((name, text) for name, _, text in notes)),
            ("left whole", told((row.name, row.reason) for row in self.whole)),
            ("frozen", told(frozen, {row.name: row.node for row in self.frozen})),
            ("not proved", told(self.unproved.items())),
            ("removed = masked", [str(self.evidence)]),
        ]


def _row(layer: Layer) -> dict[str, Any]:
    names = ("name", "kind", "units", "kept", "relative_error", "held_out_error", "uncompensated_error", "iterations")
    row = {name: getattr(layer, name) for name in (*names, "certificate")}
    return {**row, "notes": "; ".join(layer.notes)}


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    percent = "{:.1%}".format
    columns = [
        Column("name", "hidden dimension", shorten=True),
        Column("kind", "kind", drop=3),
        Column("units", "units", "{:,}".format),
        Column("kept", "kept", right=True),
        Column("relative_error", "error", percent),
        Column("held_out_error", "held out", percent),
        Column("uncompensated_error", "uncompensated", percent, drop=1),
        Column("iterations", "iterations", drop=2),
        Column("certificate", "proof", "{:.0e}".format, drop=4),
    ]
    silent = {c.key for c in columns if c.key != "relative_error" and all(row[c.key] is None for row in rows)}
    # Not worth a column: one pass, a second one that confirms it, or one for each kept unit.
    if not any(row["iterations"] > 2 and row["iterations"] != row["kept"] for row in rows):
        silent.add("iterations")
    return [column for column in columns if column.key not in silent]


# From the steps of `prune` --------------------------------------------------------------------------------------
def result_of(work: Work, chosen: Widths, done: Decisions, plan: Plan, evidence: Evidence, folds: Folding) -> Result:
    """Assemble the result from the steps of `prune`, without what is measured on the pruned model."""
    unread = {name: why for name, why in work.unread.items() if name in chosen.counts}
    layers, cost = _layers(work, done, evidence), _cost(work, done, plan, folds)
    frozen = (*work.survey.frozen, *(FrozenAxis(name, why) for name, why in unread.items()))
    settings = {**work.options.described(), **work.inputs.described(work.team)}
    curves = {name: (curve.kept, curve.error) for name, curve in chosen.found.curves.items()}
    advice, whole = _advice(work, done, evidence, plan), _left_whole(work, {*work.counts, *unread})
    found = Result(work.model, plan, layers, cost, frozen, evidence, settings, advice, curves, whole=whole)
    return replace(found, example=work.example, tradeoffs=_tradeoffs(work, chosen, done))


def _tradeoffs(work: Work, chosen: Widths, done: Decisions) -> dict[str, Any]:
    """Collect what predicts other budgets, if curves were measured."""
    if not chosen.found.curves:
        return {}
    analysis, survey = work.survey.analysis, work.survey
    gained = [analysis.extent(analysis.tracker.contractions[number].made[0]) for number in done.gained.values()]
    reasons = {row.name: row.reason for row in _left_whole(work, {*chosen.found.curves})}
    reasons |= {row.name: row.reason for row in survey.frozen}
    known = Tradeoffs(chosen.found, survey.costs, gained, chosen.latency, work.options.round_to)
    return known.record(analysis, json.loads(Plan({}, survey.structure).to_json()), reasons, chosen.counts)


def _layers(work: Work, done: Decisions, evidence: Evidence) -> tuple[Layer, ...]:
    dimensions = {d.name: d for d in work.survey.dimensions}
    found = []
    for name in work.counts:
        selection, dimension = done.selections[name], dimensions[name]
        at = {site.path: done.refits[site.number] for site in work.sites_of(name) if site.number in done.refits}
        before, after, unseen = _errors([*at.values()])
        notes = tuple(f"{path}: {refit.note}" for path, refit in at.items() if refit.note)
        counts = dimension.units, len(selection.kept), selection.iterations
        errors = after, evidence.certificates[name], before if work.options.compensate else None
        found.append(Layer(name, dimension.kind, *counts, *errors, notes, unseen, selection.scores or None))
    return tuple(found)


def _errors(refits: Sequence[Refit]) -> tuple[float | None, float | None, float | None]:
    """Relative errors at the consumers of a hidden dimension: before and after compensation, on held-out examples."""
    size = sum(r.size for r in refits)
    unseen = [r.held_out for r in refits if r.held_out is not None]
    whole = sum(total for _, total in unseen)
    return (
        math.sqrt(sum(r.before for r in refits) / size) if size > 0 else None,
        math.sqrt(sum(r.after for r in refits) / size) if size > 0 else None,
        math.sqrt(sum(error for error, _ in unseen) / whole) if whole > 0 else None,
    )


def _left_whole(work: Work, others: set[str]) -> tuple[Whole, ...]:
    """Hidden dimensions that could have lost units and did not, with the reason."""
    options = work.options
    why = "the budget leaves it whole" if isinstance(options.keep, Budget) else "keep leaves it whole"
    reasons = {**dict.fromkeys((d.name for d in prunable(work.survey.dimensions, options.skip)), why), **work.unread}
    left = [d for d in work.survey.dimensions if d.name not in others]
    return tuple(Whole(d.name, d.kind, d.units, reasons.get(d.name, "skip names it")) for d in left)


def _cost(work: Work, done: Decisions, plan: Plan, layers: Folding) -> Cost:
    """Parameters and MACs, biases that were gained and parameters of folded layers counted in."""
    gained = sum(len(work.model.get_parameter(f"{path}.bias")) for path in done.gained)
    rewritten = {*plan.structure.folded} - {*work.survey.structure.folding(plan.kept).folded}
    gained -= sum(layers.lost(path) for path in rewritten)  # refitted, without losing units
    cost = work.survey.cost(plan)
    return replace(cost, params=cost.params + gained)


def _advice(work: Work, done: Decisions, evidence: Evidence, plan: Plan) -> tuple[str, ...]:
    found = [_few_examples(done) or _unsteady(work, done), _amplified(evidence)]
    if idle := [row.name for row in work.survey.frozen if row.reason == NOT_CALLED]:
        found.append(
            f"no batch reaches {', '.join(idle[:3])}{' and others' if len(idle) > 3 else ''}: what is not called stays "
            "as it is, so calls that reach it may fail now; pass a batch that reaches it, or skip= what feeds it"
        )
    folded = plan.structure.folded
    if folded:
        found.append(
            f"{len(folded)} layers computed their weight in the forward, as weight standardisation and spectral norm "
            f"do: {folded[0]} and others hold it as a plain weight now. Outputs are the same, training no longer "
            "normalises it"
        )
    return tuple(text for text in found if text)


def _amplified(evidence: Evidence) -> str:
    if evidence.precise is None and evidence.limit > FLOAT32:
        only = "the pruned model is compared in half precision only, since it does not run in float64"
        hidden = "a single wrong unit of a wide layer could hide in rounding"
        return f"{only}: {hidden}; prune it in float32, and convert it afterwards"
    if evidence.precise is None or evidence.error <= evidence.limit:
        return ""
    own = f"in the model's own precision outputs differ by {evidence.error:.0e} from the masked network's"
    remedy = "more examples or a larger ridge= make the refit steadier"
    return f"rounding is amplified: {own}, in float64 by {evidence.precise:.0e}; {remedy}"


def _few_examples(done: Decisions) -> str:
    short = [refit for refit in done.refits.values() if refit.wanted]
    if not short:
        return ""
    worst = max(short, key=lambda refit: refit.wanted)
    given = "1 example makes" if worst.examples == 1 else f"{worst.examples:,} examples make"
    wrong = f"{given} {worst.rows:,} rows, but {len(short)} of {len(done.refits)} layers have more columns to refit"
    return f"too few examples: {wrong}; pass about {worst.wanted:,} examples"


def _unsteady(work: Work, done: Decisions) -> str:
    """Enough rows to fit, but too few to fit well."""
    fitted = {number: refit for number, refit in done.refits.items() if refit.steady}
    if not fitted:
        return ""
    number, worst = max(fitted.items(), key=lambda item: item[1].steady)
    inside, outside = (math.sqrt(error) for error in worst.errors or (0.0, 0.0))
    path = next((site.path for site in work.sites if site.number == number), "one")
    which = f"{len(fitted)} of {len(done.refits)} layers fit the calibration examples much better than new ones"
    most = f"{path} most of all (error {inside:.1%}, held out {outside:.1%})"
    return f"{which}, {most}: pass about {worst.steady:,} examples"
