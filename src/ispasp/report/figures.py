"""Figures by matplotlib, an optional extra. No display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ispasp.errors import needed, visible

_NAMED = 40  # layers with names on the axis
_ERRORS = {
    "uncompensated_error": ("uncompensated", "#c2570c"),
    "relative_error": ("error", "#1f62d6"),
    "held_out_error": ("held out", "#17795e"),
}


def new_figure(columns: int, *, width: float = 4.6, height: float = 3.8, sharey: bool = True) -> tuple[Any, list[Any]]:
    """A figure and its row of axes, which share their vertical scale."""
    figure = _figure((width * columns, height))
    return figure, list(figure.subplots(1, columns, sharey=sharey, squeeze=False)[0])


def layers(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Units before and after, and errors below them, from `Result.rows()`."""
    figure = _figure((min(max(5.0, 0.3 * len(rows) + 2), 18), 6.4))
    top, bottom = figure.subplots(2, 1, sharex=True)
    x = range(len(rows))
    top.bar(x, [row["units"] for row in rows], color="#dbe1e9", label="removed")
    top.bar(x, [row["kept"] for row in rows], color="#1f62d6", label="stay")
    top.set(ylabel="units", title=_plain(title))
    top.legend(frameon=False)
    for key, (label, color) in _ERRORS.items():
        points = [(i, 100 * row[key]) for i, row in enumerate(rows) if row.get(key) is not None]
        if points:
            bottom.plot(*zip(*points, strict=True), "o-", color=color, label=label, markersize=4)
            bottom.legend(frameon=False)
    bottom.set(ylabel="relative error (%)", ylim=(0, max(100, bottom.get_ylim()[1])))
    if len(rows) <= _NAMED:
        bottom.set_xticks(list(x), [_plain(row["name"]) for row in rows], rotation=90, fontsize=8)
    else:
        bottom.set_xlabel("hidden dimension, from first to last")
    return figure


def tradeoffs(rows: Sequence[Mapping[str, Any]], measures: Mapping[str, str]) -> Any:
    """One line per method: each measure (key -> label) against the MACs that stay, from `Comparison.rows()`."""
    figure, axes = new_figure(max(len(measures), 1), sharey=False)
    for ax, (key, label) in zip(axes, measures.items(), strict=False):
        found = [row for row in rows if row.get(key) is not None and row.get("macs") is not None]
        for method in dict.fromkeys(row["method"] for row in found):
            points = sorted((row["macs"], row[key]) for row in found if row["method"] == method)
            ax.plot(*zip(*points, strict=True), "o-", label=_plain(method), markersize=4)
        ax.set(xlabel="MACs", ylabel=_plain(label))
        ax.grid(alpha=0.3)
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


def _plain(text: object) -> str:
    return visible(str(text)).replace("$", r"\$")  # matplotlib sets text between dollars as mathematics


def _figure(size: tuple[float, float]) -> Any:
    return needed("matplotlib.figure", "plotting", "plot").Figure(figsize=size, layout="constrained")
