"""What `ispasp.prune` returns: the pruned model and the evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from ispasp.api.evaluation import Agreement, Scores
from ispasp.api.evidence import Evidence
from ispasp.api.history import plan_from_dense
from ispasp.errors import visible
from ispasp.report import Column, render
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
    where nothing could be compared.
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


@dataclass(frozen=True, eq=False)
class Result:
    """The pruned model, the plan, and what it cost. Print it."""

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
                "unproved": dict(self.unproved),
                "advice": list(self.advice),
                "cost": asdict(self.cost),
                "layers": [asdict(layer) for layer in self.layers],
                "frozen": [asdict(row) for row in self.frozen],
                "curves": {name: {"kept": kept, "error": error} for name, (kept, error) in self.curves.items()},
                "plan": json.loads(self.plan.to_json()),
            }
        )

    def __str__(self) -> str:
        """A table of the layers, then what it cost, what was verified and what stayed."""
        percent = "{:.1%}".format
        columns = [
            Column("name", "hidden dimension"),
            Column("kind", "kind"),
            Column("units", "units"),
            Column("kept", "kept"),
            Column("iterations", "iterations"),
            Column("relative_error", "error", percent),
            Column("held_out_error", "held out", percent),
            Column("uncompensated_error", "uncompensated", percent),
            Column("certificate", "removed = masked", "{:.0e}".format),
        ]
        if not self.settings.get("compensate"):
            columns = [c for c in columns if c.key not in ("uncompensated_error", "held_out_error")]
        s = self.settings
        title = f"{type(self.model).__name__} pruned: method {s['method']}, {s['order']}, compensate={s['compensate']}"
        table = render(title, columns, [vars(layer) for layer in self.layers])
        lines = [
            table,
            *([f"evaluated: {self.scores}"] if self.scores else ()),
            *([f"agreement with the dense model: {self.agreement}"] if self.agreement else ()),
            str(self.cost),
            f"verified: {self.evidence}",
        ]
        lines += [f"note: {line}" for line in self.advice]
        lines += ["not proved:", *(f"  {name}: {why}" for name, why in self.unproved.items())] if self.unproved else []
        notes = [f"  {layer.name}: {note}" for layer in self.layers for note in layer.notes]
        lines += ["notes:", *notes] if notes else []
        lines += ["frozen:", *(f"  {row}" for row in self.frozen)] if self.frozen else []
        return visible("\n".join(lines))


def _plain(scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """JSON has no NaN."""
    return {when: {name: v if math.isfinite(v) else None for name, v in row.items()} for when, row in scores.items()}
