"""Report of `ispasp reproduce runtime`: CSV, bars on a logarithmic scale, Markdown."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from ispasp.report import new_figure
from ispasp_lab.experiments.runtime import Row, Settings

TITLES = {
    "ispasp": "i-SpaSP, library",
    "reference": "i-SpaSP, autodiff as in the paper",
    "gfs-local": "gfs-local, from the Gram matrix",
    "gfs-stochastic": "GFS, stochastic",
    "gfs": "GFS, vanilla",
}
_SHORT = {"ispasp": "i-SpaSP\nlibrary", "reference": "i-SpaSP\nautodiff", "gfs-local": "GFS\nlocal"}
_SHORT |= {"gfs-stochastic": "GFS\nstochastic", "gfs": "GFS\nvanilla"}


def write(rows: Sequence[Row], settings: Settings, folder: Path, command: str) -> list[Path]:
    """Write runtime.csv, runtime.png and runtime.md into the folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"runtime.{ending}" for ending in ("csv", "png", "md")]
    names = [field.name for field in fields(Row)]
    with paths[0].open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*names, "scaling"])
        for row in rows:
            values = [getattr(row, name) for name in names]
            lines.writerow([*(f"{v:.6g}" if isinstance(v, float) else v for v in values), row.scaling])
    _draw(rows, paths[1])
    paths[2].write_text(summary(rows, settings, command), encoding="utf-8")
    return paths


def _draw(rows: Sequence[Row], path: Path) -> None:
    blocks, keeps, methods = _axes(rows)
    figure, axes = new_figure(len(blocks), width=5.4)
    for ax, block in zip(axes, blocks, strict=True):
        for place, keep in enumerate(keeps):
            at = [number + (place - (len(keeps) - 1) / 2) * 0.4 for number in range(len(methods))]
            seconds = [_find(rows, block, keep, method).seconds for method in methods]
            hatch = {"hatch": "..", "alpha": 0.6} if place else {}  # dotted, as in the paper
            ax.bar(at, seconds, 0.38, color="tab:blue", edgecolor="white", label=f"keep {keep}", **hatch)
        ax.set_yscale("log")
        ax.set_xticks(range(len(methods)), [_SHORT[method] for method in methods], fontsize=8)
        ax.set_title(f"ResNet34 block {block} ({_find(rows, block, keeps[0], methods[0]).units} filters)")
        ax.grid(alpha=0.3, axis="y")
    axes[0].set_ylabel("seconds")
    axes[0].legend(loc="upper left")
    figure.savefig(path, dpi=150)


def _axes(rows: Sequence[Row]) -> tuple[list[int], list[float], list[str]]:
    methods = [method for method in TITLES if any(row.method == method for row in rows)]
    return sorted({row.block for row in rows}), sorted({row.keep for row in rows}), methods


def _find(rows: Sequence[Row], block: int, keep: float, method: str) -> Row:
    return next(row for row in rows if (row.block, row.keep, row.method) == (block, keep, method))


def summary(rows: Sequence[Row], settings: Settings, command: str) -> str:
    """Markdown: a table with what was timed, and the paper's three claims."""
    return "\n".join(
        [
            "# Runtime of pruning ResNet34 blocks",
            "",
            f"Made by `{command}` (Section 4.2 of the paper) in one run, threads of the CPU: {torch.get_num_threads()}."
            " Times start from the hidden representation.",
            "",
            "![seconds by method](runtime.png)",
            "",
            "| block | keep | method | seconds | against the library | timed |",
            "|---:|---:|---|---:|---:|---|",
            *(_line(rows, row) for row in rows),
            "",
            "What was timed in part is scaled linearly.",
            "",
            *_claims(rows),
            "",
            f"- i-SpaSP: {settings.examples} examples, T = {settings.iterations}. GFS: a new mini-batch of"
            f" {settings.batch} examples in each step; all units that are out are tried, {settings.candidates} random"
            " ones in the stochastic variant. A try is a forward pass from the block to the logits, with the other"
            " units masked. gfs-local: the Gram matrix of all examples, once.",
            "",
        ]
    )


def _line(rows: Sequence[Row], row: Row) -> str:
    times = row.seconds / _find(rows, row.block, row.keep, "ispasp").seconds
    cells = [row.block, row.keep, TITLES[row.method], _seconds(row.seconds), f"{times:,.0f}x", row.scaling]
    return f"| {' | '.join(map(str, cells))} |"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _claims(rows: Sequence[Row]) -> list[str]:
    blocks, keeps, _ = _axes(rows)

    def seconds(method: str, block: int, keep: float) -> float:
        return _find(rows, block, keep, method).seconds

    least = min(seconds("gfs-stochastic", b, k) / seconds("reference", b, k) for b in blocks for k in keeps)
    growth = {m: [seconds(m, b, keeps[-1]) / seconds(m, b, keeps[0]) for b in blocks] for m in ("gfs", "reference")}
    lines = [
        f"- i-SpaSP against GFS: the paper's procedure is at least {least:,.0f}x faster than stochastic GFS, the faster"
        " variant. The paper: about 10 s against over 1000 s for block 15.",
        f"- From keep {keeps[0]} to {keeps[-1]} the time grows {_times(growth['gfs'])} for vanilla GFS and"
        f" {_times(growth['reference'])} for the paper's i-SpaSP ({_named(blocks)}). The paper: GFS is sensitive to the"
        " size, i-SpaSP is not.",
    ]
    if len(blocks) > 1:
        earlier, later = ([seconds(m, b, keeps[0]) for m in ("ispasp", "reference")] for b in (blocks[0], blocks[-1]))
        ratios = [a / b for a, b in zip(earlier, later, strict=True)]
        lines.append(
            f"- Block {blocks[-1]} against block {blocks[0]}: {ratios[0]:.1f}x faster (library), {ratios[1]:.1f}x (the"
            " paper's procedure). The paper: later blocks are faster."
        )
    return lines


def _times(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.1f}x" for value in values)


def _named(blocks: Sequence[int]) -> str:
    return " and ".join(f"block {block}" for block in blocks)
