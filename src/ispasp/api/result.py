"""What `ispasp.prune` returns: the pruned model and the evidence."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ispasp.api.evaluation import Agreement, Scores
from ispasp.api.evidence import Evidence
from ispasp.api.history import plan_from_dense
from ispasp.errors import SaveError
from ispasp.report import Column, Sheet, change, figures, told
from ispasp.report.html import html, roots
from ispasp.types.dimension import Cost, FrozenAxis
from ispasp.types.plan import Plan


@dataclass(frozen=True)
class Layer:
    """One pruned hidden dimension.

    `kept` of `units` units stay. `relative_error` is ||Y - Y'|| / ||Y||, Y what its consumers should give and Y' what
    they give now, without their bias: on all calibration batches where the consumer was compensated, else on the first
    one. `held_out_error` is that of a fit to one half of the examples on the other half: what to expect of new data.
    `uncompensated_error` is the same without compensation. `certificate` is the largest relative difference at its
    consumers between the pruned module and the masked dense network: rounding errors, or surgery has gone wrong; None
    where nothing could be compared. `scores`: one number per unit where the method scores units, the largest stay.
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
class Result:
    """The pruned model, the plan, and what it cost. Print it, or show it in a notebook."""

    model: nn.Module = field(repr=False)
    plan: Plan = field(repr=False)
    layers: tuple[Layer, ...]
    cost: Cost
    frozen: tuple[FrozenAxis, ...]
    evidence: Evidence  # what was compared with the masked network, and how much it differed
    settings: Mapping[str, Any]
    advice: tuple[str, ...] = ()  # what would make the result better, or more certain
    curves: Mapping[str, tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict, repr=False)
    """Predicted squared relative error against kept units, without compensation: (units, errors)."""
    scores: Scores | None = None
    """What `evaluate` gave before and after."""
    agreement: Agreement | None = None
    """How often the pruned model predicts what the dense one does."""
    whole: tuple[Whole, ...] = ()
    """Hidden dimensions that a budget, `keep` or `skip` left whole."""

    @property
    def plan_from_dense(self) -> Plan:
        """The plan from the dense model to `model` as it is now; differs from `plan` if it was pruned several times."""
        return plan_from_dense(self.model) or self.plan

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
        order = [*self.plan.structure.units, *found]
        return [found[name] for name in dict.fromkeys(order) if name in found]

    def to_json(self) -> str:
        """Everything but the model's weights, as JSON text."""
        return json.dumps(
            {
                "format": "ispasp-result",
                "version": 1,
                "settings": dict(self.settings),
                "scores": _plain(asdict(self.scores)) if self.scores else None,
                "agreement": asdict(self.agreement) if self.agreement else None,
                "verified": None if math.isnan(self.verified) else self.verified,
                "proof": str(self.evidence),
                "unproved": dict(self.unproved),
                "advice": list(self.advice),
                "cost": asdict(self.cost),
                "layers": [asdict(layer) for layer in self.layers],
                "whole": [asdict(row) for row in self.whole],
                "frozen": [asdict(row) for row in self.frozen],
                "curves": {name: {"kept": kept, "error": error} for name, (kept, error) in self.curves.items()},
                "plan": json.loads(self.plan.to_json()),
            }
        )

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML page that opens offline, without scripts: what `ispasp prune` writes. Returns its path."""
        page = html(json.loads(self.to_json()), roots(self.curves))
        try:
            Path(path).write_text(page, encoding="utf-8")
        except OSError as error:
            raise SaveError(f"cannot write the report to {path}: {error.strerror or error}") from error
        return Path(path)

    def plot(self) -> Any:
        """A matplotlib Figure: units before and after, and errors, layer by layer."""
        return figures.layers(self.rows(), f"{type(self.model).__name__}, pruned")

    def __str__(self) -> str:
        """What happened, a table of the layers, then advice, what is frozen and the proof."""
        return str(self._sheet())

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        return self._sheet().html()

    def _sheet(self) -> Sheet:
        s, rows = self.settings, self.rows()
        done = f"method {s['method']}, keep={s['keep']}, {s['order']}, compensate={s['compensate']}"
        shown = [{**row, "kept": "all" if row["kept"] == row["units"] else f"{row['kept']:,}"} for row in rows]
        return Sheet(
            f"{type(self.model).__name__}, pruned: {done}", self._facts(), _columns(rows), shown, self._remarks()
        )

    def _facts(self) -> list[tuple[str, str]]:
        c = self.cost
        facts = [
            ("parameters", change(c.dense_params, c.params)),
            ("MACs", change(c.dense_macs, c.macs)),
        ]
        facts += _calibrated(self.settings)
        facts += [("agreement", str(self.agreement))] if self.agreement else []
        return [*facts, ("scores", str(self.scores))] if self.scores else facts

    def _remarks(self) -> list[tuple[str, list[str]]]:
        frozen = [(row.name, row.reason) for row in self.frozen]
        found = [
            ("advice", list(self.advice)),
            ("notes", told(_split(note) for layer in self.layers for note in layer.notes)),
            ("left whole", told((row.name, row.reason) for row in self.whole)),
            ("frozen", told(frozen, {row.name: row.node for row in self.frozen})),
            ("not proved", told(self.unproved.items())),
            ("removed = masked", [str(self.evidence)]),
        ]
        return [(heading, lines) for heading, lines in found if lines]


def _split(note: str) -> tuple[str, str]:
    """A remark on a consumer: its name, and what is said."""
    name, _, text = note.partition(": ")
    return name, text


def _row(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "units": layer.units,
        "kept": layer.kept,
        "relative_error": layer.relative_error,
        "held_out_error": layer.held_out_error,
        "uncompensated_error": layer.uncompensated_error,
        "iterations": layer.iterations,
        "certificate": layer.certificate,
        "notes": "; ".join(layer.notes),
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns that have something to say."""
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
    # One pass, a second one that confirms it, or one for each kept unit: no news.
    if not any(row["iterations"] > 2 and row["iterations"] != row["kept"] for row in rows):
        silent.add("iterations")
    return [column for column in columns if column.key not in silent]


def _calibrated(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How many examples calibration took."""
    if "examples" not in settings:
        return []
    held = settings["held_out_examples"]
    apart = f", {held:,} of them held out" if held else ""
    rest = "" if settings["all_examples"] else " (examples=None takes all)"
    return [("calibrated", f"with {settings['examples']:,} examples{apart}{rest}")]


def _plain(scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """JSON has no NaN."""
    return {when: {name: v if math.isfinite(v) else None for name, v in row.items()} for when, row in scores.items()}
