"""The drawings of the report: small SVG texts, styled by the page so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

_WIDE, _HIGH = 1040, 210  # of the widths chart
_LEFT, _BOTTOM, _TOP = 46, 22, 20
_LETTER = 7  # room for one letter of a name
_COUNT = 30  # room for a number of units
_BAR = 120  # length of a bar in the table
_DUMBBELL = 140
_FACET = (240, 128)

MARK = (
    '<svg viewBox="0 0 60 60" aria-hidden="true"><rect class="kept" x="4" y="10" width="9" height="40" rx="3"/>'
    '<rect class="track" x="18" y="10" width="9" height="40" rx="3"/>'
    '<rect class="kept" x="32" y="10" width="9" height="40" rx="3"/>'
    '<rect class="track" x="46" y="10" width="9" height="40" rx="3"/></svg>'
)
KEPT_KEY = '<svg viewBox="0 0 12 12" aria-hidden="true"><rect class="kept" width="12" height="12" rx="3"/></svg>'
GONE_KEY = '<svg viewBox="0 0 12 12" aria-hidden="true"><rect class="track" width="12" height="12" rx="3"/></svg>'
AFTER_KEY = '<svg viewBox="0 0 12 12" aria-hidden="true"><circle class="kept" cx="6" cy="6" r="5"/></svg>'
BEFORE_KEY = '<svg viewBox="0 0 12 12" aria-hidden="true"><circle class="before" cx="6" cy="6" r="4"/></svg>'


def bar(kept: int, units: int) -> str:
    """A track filled as far as units stay. All are of one length: 12 heads stand beside 4,096 neurons.

    >>> bar(2, 4).count("<rect")
    2
    """
    part = max(2.0, _BAR * kept / max(units, 1))
    return (
        f'<svg width="{_BAR}" height="12" role="img" aria-label="{kept} of {units} units stay">'
        f'<rect class="track" width="{_BAR}" height="12" rx="3"/>'
        f'<rect class="kept" width="{part:.1f}" height="12" rx="3"/></svg>'
    )


def dumbbell(before: float | None, after: float | None) -> str:
    """Two errors on a scale from 0 to 100 %: a ring before compensation, a dot after it. What is larger is at its end.

    >>> dumbbell(None, 0.2).count("<circle"), dumbbell(0.4, 0.2).count("<circle")
    (1, 2)
    """
    at = {
        key: 7 + (_DUMBBELL - 14) * min(max(value, 0.0), 1.0)
        for key, value in (("before", before), ("after", after))
        if value is not None and math.isfinite(value)
    }
    parts = [f'<line class="axis" x1="7" x2="{_DUMBBELL - 7}" y1="9" y2="9" opacity="0.2"/>']
    if len(at) == 2:
        parts.append(f'<line class="link" x1="{at["after"]:.1f}" x2="{at["before"]:.1f}" y1="9" y2="9"/>')
    if "before" in at:
        parts.append(f'<circle class="before" cx="{at["before"]:.1f}" cy="9" r="4.5"/>')
    if "after" in at:
        parts.append(f'<circle class="kept" cx="{at["after"]:.1f}" cy="9" r="5.5"/>')
    return f'<svg width="{_DUMBBELL}" height="18" aria-hidden="true">{"".join(parts)}</svg>'


def skyline(layers: Sequence[Mapping[str, Any]]) -> str:
    """Every hidden dimension as a column from first to last: as high as it was, filled as high as it is.

    >>> skyline([{"name": "fc1", "units": 8, "kept": 2}]).count("<title>")
    1
    """
    top = ceiling(max((layer["units"] for layer in layers), default=1))
    ground = _HIGH - _BOTTOM
    height = ground - _TOP
    step = (_WIDE - _LEFT) / max(len(layers), 1)
    wide = min(step * 0.72, 64.0)
    radius = min(4.0, wide / 4)
    parts = []
    for share in (0.5, 1.0):
        y = ground - height * share
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDE}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(top * share)}</text>')
    every = max(1, math.ceil(len(layers) / 26))
    named = max((len(str(layer["name"])) for layer in layers), default=0) * _LETTER < step
    for i, layer in enumerate(layers):
        middle = _LEFT + step * (i + 0.5)
        columns = "".join(
            f'<rect class="{kind}" x="{middle - wide / 2:.1f}" y="{ground - height * layer[key] / top:.1f}" '
            f'width="{wide:.1f}" height="{height * layer[key] / top:.1f}" rx="{radius:.1f}"/>'
            for kind, key in (("track", "units"), ("kept", "kept"))
        )
        said = escape(f"{i + 1}. {layer['name']}: {layer['kept']} of {layer['units']} units stay")
        parts.append(f'<g class="column"><title>{said}</title>{columns}</g>')
        if step >= _COUNT:
            y = ground - height * layer["units"] / top - 4
            parts.append(f'<text class="said" x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{layer["kept"]}</text>')
        if i % every == 0:
            said = escape(str(layer["name"])) if named else str(i + 1)
            parts.append(f'<text x="{middle:.1f}" y="{_HIGH - 6}" text-anchor="middle">{said}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDE}" y1="{ground}" y2="{ground}"/>')
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="units before and after, layer by layer" '
        f'style="width:100%;height:auto;display:block">{"".join(parts)}</svg>'
    )


def curve(kept: Sequence[int], errors: Sequence[float], chosen: int | None) -> str:
    """Relative error from 0 to 100 % against kept units, with the chosen width and its error marked.

    >>> curve([1, 2, 4], [0.9, 0.5, 0.0], 2).count("<circle")
    1
    """
    wide, high = _FACET
    left, bottom, roof = 40, 20, 16
    ground, units = high - bottom, max(kept)
    points = [(k, e) for k, e in zip(kept, errors, strict=True) if math.isfinite(e)]

    def x(k: float) -> float:
        return left + (wide - left - 10) * k / units

    def y(e: float) -> float:
        return ground - (ground - roof) * min(max(e, 0.0), 1.0)

    line = " ".join(f"{x(k):.1f},{y(e):.1f}" for k, e in points)
    parts = []
    for share in (0.5, 1.0):
        at = y(share)
        parts.append(f'<line class="grid" x1="{left}" x2="{wide - 10}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{100 * share:.0f}%</text>')
    if points:
        ends = f"{x(points[-1][0]):.1f},{ground} {x(points[0][0]):.1f},{ground}"
        parts.append(f'<polygon class="area" points="{line} {ends}"/><polyline class="curve" points="{line}"/>')
    parts.append(f'<line class="axis" x1="{left}" x2="{wide - 10}" y1="{ground}" y2="{ground}"/>')
    for k, anchor in ((0, "start"), (units, "end")):
        parts.append(f'<text x="{x(k):.1f}" y="{high - 6}" text-anchor="{anchor}">{k}</text>')
    error = None if chosen is None or not points else _between(points, chosen)
    if chosen is not None and error is not None:
        right = x(chosen) > wide - 84  # there below the falling curve, elsewhere above it
        parts.append(
            f'<line class="drop" x1="{x(chosen):.1f}" x2="{x(chosen):.1f}" y1="{y(error):.1f}" y2="{ground}"/>'
            f'<circle class="here" cx="{x(chosen):.1f}" cy="{y(error):.1f}" r="5"/>'
            f'<text class="said" x="{x(chosen) + (-9 if right else 8):.1f}" y="{y(error) + (4 if right else -9):.1f}" '
            f'text-anchor="{"end" if right else "start"}">{chosen}: {100 * error:.0f}%</text>'
        )
    return f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="error against kept units">{"".join(parts)}</svg>'


def ceiling(value: float) -> float:
    """The next round number: an axis that ends there is easy to read.

    >>> ceiling(384), ceiling(0.067), ceiling(1.0), ceiling(0)
    (400.0, 0.08, 1.0, 1.0)
    """
    if not (math.isfinite(value) and value > 0):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    step = next(s for s in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if value <= s * power * (1 + 1e-9))
    return float(f"{step * power:.6g}")


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:,.1f}"


def _between(points: Sequence[tuple[int, float]], k: int) -> float:
    for (a, low), (b, high) in pairwise(points):
        if a <= k <= b:
            return low + (high - low) * (k - a) / (b - a)
    return points[0][1] if k < points[0][0] else points[-1][1]
