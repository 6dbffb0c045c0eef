"""The sweep of `cnn` as figure and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ispasp.report import new_figure
from ispasp_lab.experiments.cnn import COMPENSATIONS, DENSE, Row, Settings
from ispasp_lab.experiments.records import read_rows

_WORDS = {"none": "no compensation", "local": "compensated locally", "dense": "compensated towards the dense network"}
_MARKERS = "osv^D*PX<>hdp8"
_NOTHING = 1.0  # percent: near chance for the classes of ImageNet, where a rank says nothing


def write(settings: Settings, folder: Path, command: str) -> list[Path]:
    """Draw and describe all rows that the CSV file in the folder has; returns the paths of the three files."""
    paths = [folder / f"{settings.stem}.{ending}" for ending in ("csv", "png", "md")]
    rows = read_rows(paths[0], Row)
    _draw(rows, paths[1])
    paths[2].write_text(summary(rows, command, paths[1].name), encoding="utf-8")
    return paths


def _draw(rows: Sequence[Row], path: Path) -> None:
    panels = _panels(rows)
    figure, axes = new_figure(len(panels))
    names = _names(rows)
    for ax, compensate in zip(axes, panels, strict=True):
        for number, name in enumerate(names):
            curve = sorted((r.keep, r.accuracy) for r in rows if (r.method, r.compensate) == (name, compensate))
            points = [(keep, value) for keep, value in curve if value is not None]
            style = {"marker": _MARKERS[number % len(_MARKERS)], "color": f"C{number % 10}", "markersize": 4}
            width = 2.5 if name == "ispasp" else 1
            ax.plot(*zip(*points, strict=True), label=name, linewidth=width, **style) if points else None
        for row in rows:
            if row.method == DENSE and row.accuracy is not None:
                ax.axhline(row.accuracy, color="grey", linestyle=":", linewidth=1)
        ax.set_title(_WORDS[compensate], fontsize=10)
        ax.set_xlabel("keep")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("top-1 accuracy, %")
    axes[0].legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=150)


def summary(rows: Sequence[Row], command: str, figure: str) -> str:
    """Markdown: one table of accuracies, the sizes, and what they say.

    >>> row = Row("net", "cifar10", 64, 0, 0, "l1", "none", 0.5, 88.0, 5e6, 1e5, 1.0)
    >>> "| l1 | **88.0** |" in summary([row], "ispasp reproduce cnn", "cnn-cifar10.png")
    True
    """
    first, dense = rows[0], next((r for r in rows if r.method == DENSE), None)
    tested = f"the first {first.tested:,} test images" if first.tested else "all test images"
    cells = {row.key: row for row in rows}
    columns = [
        (c, k) for c in _panels(rows) for k in sorted({r.keep for r in rows if r.compensate == c and r.keep < 1})
    ]
    heads = [f"{c} {k:g}" for c, k in columns]
    lines = [
        f"# Pruning {first.model} on {first.data} without fine-tuning",
        "",
        f"Made by `{command}`: {first.examples:,} calibration images drawn at random (seed {first.seed}), top-1"
        f" accuracy in percent on {tested}. The hidden dimensions of all blocks are pruned to the same fraction `keep`,"
        " from first to last layer; methods that need gradients decide all layers at once. The paper fine-tunes: these"
        " are the networks right after pruning.",
        "",
        f"![accuracy against keep]({figure})",
        "",
        *([] if dense is None else [f"Dense network: {dense.accuracy:.2f} %, {_size(dense)}.", ""]),
        "Columns: compensation (none, local, dense) and keep. Best of a column in bold, `-`: not run.",
        "",
        "| method | " + " | ".join(heads) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    best = {c: max((r.accuracy for r in rows if (r.compensate, r.keep) == c and r.accuracy is not None), default=0)
            for c in columns}  # fmt: skip
    for name in _names(rows):
        row = [_cell(cells.get((name, *column)), best[column]) for column in columns]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    lines += ["", *_sizes(rows), "", *(f"- {text}" for text in findings(rows)), ""]
    return "\n".join(lines)


def findings(rows: Sequence[Row]) -> list[str]:
    """Sentences on i-SpaSP and on compensation, from the numbers.

    >>> a = Row("net", "cifar10", 64, 0, 0, "l1", "none", 0.5, 88.0, 5e6, 1e5, 1.0)
    >>> b = Row("net", "cifar10", 64, 0, 0, "ispasp", "none", 0.5, 80.0, 5e6, 1e5, 1.0)
    >>> findings([a, b])
    ['Without compensation: at keep 0.5 best is l1 (88.0 %), i-SpaSP is number 2 of 2 (80.0 %).']
    >>> from dataclasses import replace
    >>> findings([replace(a, accuracy=0.1), replace(b, accuracy=0.2)])
    ['Without compensation: at keep 0.5 nothing is left (at most 0.2 %).']
    """
    found = []
    for compensate in _panels(rows):
        parts = []
        for keep in sorted({r.keep for r in rows if r.compensate == compensate and r.keep < 1}):
            order = _ranked(rows, compensate, keep)
            place = next((n for n, r in enumerate(order, 1) if r.method == "ispasp"), None)
            if place is not None:
                best, own = order[0], order[place - 1]
                if best.accuracy is not None and best.accuracy < _NOTHING:
                    parts.append(f"at keep {keep:g} nothing is left (at most {best.accuracy:.1f} %)")
                    continue
                parts.append(
                    f"at keep {keep:g} best is {best.method} ({best.accuracy:.1f} %), i-SpaSP is number {place} of "
                    f"{len(order)} ({own.accuracy:.1f} %)"
                )
        word = "Without compensation" if compensate == "none" else f"With compensate={compensate}"
        found += [f"{word}: {'; '.join(parts)}."] if parts else []
    found += _gains(rows)
    failed = {row.method: row.note for row in rows if row.accuracy is None}
    return found + [f"{name} did not run: {note}" for name, note in failed.items()]


def _gains(rows: Sequence[Row]) -> list[str]:
    """The gain by compensation, over the pairs of rows that differ in nothing else."""
    found = []
    cells = {row.key: row.accuracy for row in rows}
    for compensate in ("local", "dense"):
        pairs = [(before, cells.get((m, compensate, k))) for (m, c, k), before in cells.items() if c == "none"]
        gains = sorted(after - before for before, after in pairs if before is not None and after is not None)
        if gains:
            better = sum(gain > 0 for gain in gains)
            found.append(
                f"compensate={compensate} is better than none in {better} of {len(gains)} cases, by "
                f"{gains[len(gains) // 2]:.1f} points in the median, from {gains[0]:.1f} to {gains[-1]:.1f}."
            )
    return found


def _ranked(rows: Sequence[Row], compensate: str, keep: float) -> list[Row]:
    here = [r for r in rows if (r.compensate, r.keep) == (compensate, keep) and r.accuracy is not None]
    return sorted(here, key=lambda r: -(r.accuracy or 0.0))


def _panels(rows: Sequence[Row]) -> list[str]:
    return [c for c in COMPENSATIONS if any(r.compensate == c and r.method != DENSE for r in rows)]


def _names(rows: Sequence[Row]) -> list[str]:
    return sorted({r.method for r in rows} - {DENSE}, key=lambda name: (name != "ispasp", name))


def _cell(row: Row | None, best: float) -> str:
    if row is None or row.accuracy is None:
        return "-"
    return f"**{row.accuracy:.1f}**" if row.accuracy == best else f"{row.accuracy:.1f}"


def _size(row: Row) -> str:
    return f"{(row.macs or 0) / 1e6:,.1f} M MACs, {(row.params or 0) / 1e6:,.3f} M parameters"


def _sizes(rows: Sequence[Row]) -> list[str]:
    sizes: Mapping[float, Row] = {r.keep: r for r in rows if r.accuracy is not None and r.keep < 1}
    return [f"Size at keep {keep:g}: {_size(sizes[keep])}." for keep in sorted(sizes)]
