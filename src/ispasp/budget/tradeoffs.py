"""Trade-offs: what the report needs to predict other budgets, as plain values.

A length is a sum of products: `[[64, 0, 2], [8]]` is 64 w0 w2 + 8, where w0 and w2 are widths of hidden dimensions. A
term is a factor times lengths; a length that has a table counts as the table says. A measure is the sum of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ispasp.budget.allocate import choices
from ispasp.budget.curve import Curves
from ispasp.budget.latency import LatencyModel
from ispasp.graph.analyse import Analysis, CostModel, layers_of
from ispasp.types.dimension import Extent, names_in

Record = dict[str, Any]
_STEPS = 16  # widths of a dimension that the page may stop at, besides the corners of its curve
_DIGITS = 4


@dataclass(frozen=True, eq=False)
class Tradeoffs:
    """The curves and the costs of a network, as functions of the widths of hidden dimensions."""

    found: Curves
    costs: CostModel
    gained: Sequence[Extent] = ()  # biases that compensation adds
    latency: LatencyModel | None = None
    step: int | None = None

    def record(self, analysis: Analysis, plan: Record, reasons: Mapping[str, str], counts: Mapping[str, int]) -> Record:
        """Everything for the page: `plan` keeps all units, `reasons` tell why layers stay, `counts` are the widths."""
        curves = self.found.curves
        names = {name: i for i, name in enumerate(curves)}
        return {
            "plan": plan,
            "dimensions": [self._dimension(name, counts.get(name, curve.units)) for name, curve in curves.items()],
            "measures": dict(self._measures(names)),
            "layers": [
                {"name": name, "length": _length(extent, names), "reason": _reason(name, extent, reasons)}
                for name, extent in layers_of(analysis)
            ],
        }

    def _dimension(self, name: str, pruned: int) -> Record:
        curve, order = self.found.curves[name], self.found.order[name]
        liked = self.latency.liked(name, curve.units, self.step or 1) if self.latency else None
        options = choices(curve, self.step, allowed=liked)
        even = np.linspace(0, options.last, _STEPS + 1).round().astype(int).tolist()
        grid = options.widths[sorted({*options.corners, *even})]
        hull = np.interp(grid, options.widths[options.corners], options.errors[options.corners])
        return {
            "name": name,
            "units": curve.units,
            "pruned": pruned,
            "order": order,
            "curve": [curve.kept, [_short(error) for error in curve.error]],
            "widths": grid.tolist(),
            "hull": [_short(error) for error in hull.tolist()],
            "step": 0 if liked else self.step or 1,
        }

    def _measures(self, names: Mapping[str, int]) -> Iterator[tuple[str, Record]]:
        costs, time = self.costs, self.latency
        macs = [(factor, [(extent, None) for extent in extents]) for factor, extents in costs.products]
        rows = [*costs.parameters, *((1, (extent,)) for extent in self.gained)]
        params = [(factor, [(extent, None) for extent in extents]) for factor, extents in rows]
        folded = [[count, [names[n] for n in sorted(among) if n in names]] for count, among in costs.folded]
        yield "macs", {**_measure(macs, names), "per": costs.examples, "dense": costs.macs({})}
        yield "params", {**_measure(params, names), "folded": folded, "dense": costs.params({})}
        if time is not None:
            found = _measure([(1e3 * time.factor, term) for term in time.terms], names)
            yield "latency", {**found, "fixed": found["fixed"] + 1e3 * time.fixed, "dense": 1e3 * time.dense}


def _measure(rows: Iterable[tuple[float, Iterable[tuple[Extent, Any]]]], names: Mapping[str, int]) -> Record:
    """Add up the terms that differ only in their factors; those without widths become one number."""
    fixed: float = 0
    terms: dict[str, list[Any]] = {}
    tables: dict[tuple[float, ...], int] = {}
    for factor, axes in rows:
        lengths: list[list[Any]] = []
        size = factor
        for extent, times in axes:
            length = _length(extent, names)
            if any(len(part) > 1 for part in length):
                table = -1 if times is None else tables.setdefault(tuple(map(_short, times.tolist())), len(tables))
                lengths.append([length, table])
            else:
                whole = sum(part[0] for part in length)
                size *= whole if times is None else float(times[whole])
        if lengths:
            terms.setdefault(str(lengths), [0, lengths])[0] += size
        else:
            fixed += size
    return {"terms": [*terms.values()], "fixed": fixed, "tables": [*tables]}


def _length(extent: Extent, names: Mapping[str, int]) -> list[list[int]]:
    """An extent as a sum of products; dimensions without a curve are as long as they are."""
    rows: dict[tuple[int, ...], int] = {}
    for segment in extent:
        which = tuple(sorted(names[name] for name, _ in segment if name is not None and name in names))
        rows[which] = rows.get(which, 0) + math.prod(size for name, size in segment if name not in names)
    return [[size, *which] for which, size in rows.items()]


def _reason(layer: str, extent: Extent, reasons: Mapping[str, str]) -> str:
    """Why a layer stays, by its own name or that of the hidden dimension it makes."""
    return next((reasons[name] for name in (layer, *sorted(names_in(extent))) if name in reasons), "")


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
