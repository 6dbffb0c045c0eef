"""The drawings of the report as SVG. The page styles them, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_DUMBBELL = 140  # length in the table
_FACET = (240, 128)


def _key(shape: str) -> str:
    return f'<svg viewBox="0 0 12 12" aria-hidden="true">{shape}</svg>'


KEPT_KEY, GONE_KEY = (_key(f'<rect class="{kind}" width="12" height="12" rx="3"/>') for kind in ("kept", "track"))
STAYS_KEY = '<i class="stays"></i>'
AFTER_KEY = _key('<circle class="kept" cx="6" cy="6" r="5"/>')
BEFORE_KEY = _key('<circle class="before" cx="6" cy="6" r="4"/>')
_UNITS = ((4, "kept"), (18, "track"), (32, "kept"), (46, "track"))
_BARS = "".join(f'<rect class="{kind}" x="{x}" y="10" width="9" height="40" rx="3"/>' for x, kind in _UNITS)
MARK = f'<svg viewBox="0 0 60 60" aria-hidden="true">{_BARS}</svg>'


def dumbbell(before: float | None, after: float | None) -> str:
    """Two errors on a scale from 0 to 100 %: a ring before compensation, a dot after it. Larger ones are at its end."""
    ring, dot = (
        None if error is None or not math.isfinite(error) else 7 + (_DUMBBELL - 14) * min(max(error, 0.0), 1.0)
        for error in (before, after)
    )
    parts = [_line("axis", 7, _DUMBBELL - 7, 9, 9)]
    if ring is not None:
        parts += [_line("link", dot, ring, 9, 9)] if dot is not None else []
        parts.append(f'<circle class="before" cx="{ring:.1f}" cy="9" r="4.5"/>')
    if dot is not None:
        parts.append(f'<circle class="kept" cx="{dot:.1f}" cy="9" r="5.5"/>')
    return f'<svg width="{_DUMBBELL}" height="18" aria-hidden="true">{"".join(parts)}</svg>'


def curve(kept: Sequence[int], errors: Sequence[float], chosen: int | None) -> str:
    """Relative error from 0 to 100 % against kept units, with the chosen width and its error marked."""
    wide, high = _FACET
    left, right, ground, roof, units = 40, wide - 10, high - 20, 16, max(kept)
    points = [(k, e) for k, e in zip(kept, errors, strict=True) if math.isfinite(e)]

    def place(k: float, e: float) -> tuple[float, float]:
        return left + (right - left) * k / units, ground - (ground - roof) * min(max(e, 0.0), 1.0)

    parts = [_gridline(left, right, place(0, part)[1], f"{100 * part:.0f}%") for part in (0.5, 1.0)]
    parts += [_label(place(k, 0)[0], high - 6, k, anchor) for k, anchor in ((0, "start"), (units, "end"))]
    if points:
        line = " ".join("{:.1f},{:.1f}".format(*place(k, e)) for k, e in points)
        ends = " ".join("{:.1f},{:.1f}".format(*place(k, 0)) for k, _ in (points[-1], points[0]))
        parts.append(f'<polygon class="area" points="{line} {ends}"/><polyline class="curve" points="{line}"/>')
    parts.append(_line("axis", left, right, ground, ground))
    if chosen is not None and points:
        error = float(np.interp(chosen, [k for k, _ in points], [e for _, e in points]))
        x, y = place(chosen, error)
        parts.append(_line("drop", x, x, y, ground) + f'<circle class="here" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        full = x > wide - 84  # no room on the right: write below the falling curve
        text = f"{chosen}: {100 * error:.0f}%"
        at = (x - 9, y + 4) if full else (x + 8, max(y - 9, 10.0))
        parts.append(_label(*at, text, "end" if full else "start", "said"))
    return f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="error against kept units">{"".join(parts)}</svg>'


def _line(kind: str, left: float, right: float, start: float, end: float) -> str:
    return f'<line class="{kind}" x1="{left:.1f}" x2="{right:.1f}" y1="{start:.1f}" y2="{end:.1f}"/>'


def _gridline(left: float, right: float, y: float, text: str) -> str:
    return _line("grid", left, right, y, y) + _label(left - 7, y + 4, text, "end")


def _label(x: float, y: float, text: object, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
