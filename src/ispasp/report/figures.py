"""Figures, drawn without a display. They need matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ispasp.errors import MissingExtraError, visible

_NAMED = 40  # layers that are named on the axis; more are numbered
_ERRORS = {"uncompensated_error": "uncompensated", "relative_error": "error", "held_out_error": "held out"}
_COLORS = {"uncompensated_error": "#c2570c", "relative_error": "#1f62d6", "held_out_error": "#17795e"}


def new_figure(columns: int, *, width: float = 4.6, height: float = 3.8) -> tuple[Any, list[Any]]:
    """A figure with one row of axes that share their vertical scale: (figure, [axes]).

    >>> figure, axes = new_figure(2)
    >>> len(axes)
    2
    """
    figure = _figure((width * columns, height))
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)
    return figure, list(axes[0])


def layers(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Units before and after, and errors below, from `Result.rows()`.

    >>> row = {"name": "fc", "units": 8, "kept": 2, "relative_error": 0.1, "held_out_error": None}
    >>> [axes.get_ylabel() for axes in layers([row], "Net").axes]
    ['units', 'relative error (%)']
    """
    figure = _figure((min(max(5.0, 0.3 * len(rows) + 2), 18), 6.4))
    top, bottom = figure.subplots(2, 1, sharex=True)
    x = range(len(rows))
    top.bar(x, [row["units"] for row in rows], color="#dbe1e9", label="removed")
    top.bar(x, [row["kept"] for row in rows], color="#1f62d6", label="stay")
    top.set(ylabel="units", title=plain(title))
    top.legend(frameon=False)
    for key, label in _ERRORS.items():
        points = [(i, 100 * row[key]) for i, row in enumerate(rows) if row.get(key) is not None]
        if points:
            bottom.plot(*zip(*points, strict=True), "o-", color=_COLORS[key], label=label, markersize=4)
            bottom.legend(frameon=False)
    bottom.set(ylabel="relative error (%)", ylim=(0, max(100, bottom.get_ylim()[1])))
    if len(rows) <= _NAMED:
        bottom.set_xticks(list(x), [plain(row["name"]) for row in rows], rotation=90, fontsize=8)
    else:
        bottom.set_xlabel("hidden dimension, from first to last")
    return figure


def tradeoffs(rows: Sequence[Mapping[str, Any]], measures: Mapping[str, str]) -> Any:
    """A line for every method: each measure (key -> label) against the MACs that stay, from `Comparison.rows()`.

    >>> row = {"method": "l1", "macs": 5, "agreement": 0.9}
    >>> [axes.get_xlabel() for axes in tradeoffs([row], {"agreement": "agreement"}).axes]
    ['MACs']
    """
    figure = _figure((4.8 * max(len(measures), 1), 4.0))
    axes = figure.subplots(1, max(len(measures), 1), squeeze=False)[0]
    for ax, (key, label) in zip(axes, measures.items(), strict=False):
        found = [row for row in rows if row.get(key) is not None and row.get("macs") is not None]
        for method in dict.fromkeys(row["method"] for row in found):
            points = sorted((row["macs"], row[key]) for row in found if row["method"] == method)
            ax.plot(*zip(*points, strict=True), "o-", label=plain(method), markersize=4)
        ax.set(xlabel="MACs", ylabel=plain(label))
        ax.grid(alpha=0.3)
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


def plain(text: object) -> str:
    """A text that matplotlib draws as it is.

    >>> plain("a$b$")
    'a\\\\$b\\\\$'
    """
    return visible(str(text)).replace("$", r"\$")


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure  # slow to import, and needed here only
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib: pip install 'ispasp[plot]'") from error
    return Figure(figsize=size, layout="constrained")
