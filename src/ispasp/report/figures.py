"""Figures, drawn without a display."""

from __future__ import annotations

from typing import Any


def new_figure(columns: int, *, width: float = 4.6, height: float = 3.8) -> tuple[Any, list[Any]]:
    """A figure with one row of axes that share their vertical scale: (figure, [axes]).

    >>> figure, axes = new_figure(2)
    >>> len(axes)
    2
    """
    from matplotlib.figure import Figure  # matplotlib is slow to import and needed here only

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)
    return figure, list(axes[0])
