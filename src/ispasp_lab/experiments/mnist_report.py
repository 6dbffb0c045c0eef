"""Report of `ispasp reproduce mnist`: means over trials, a figure, and Markdown that compares with the paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ispasp.report import new_figure
from ispasp_lab.experiments.mnist import Row
from ispasp_lab.experiments.mnist_network import Settings

TITLES = {"ispasp": "i-SpaSP", "gfs": "GFS", "topk": "Top-K", "random": "random"}
_PAPER = ("ispasp", "gfs", "topk")  # the paper's methods; the random draw is ours
_COLOURS = {"ispasp": "tab:red", "gfs": "tab:blue", "topk": "tab:green", "random": "tab:grey"}


@dataclass(frozen=True)
class Mean:
    """A value over the trials: mean and standard deviation (0 for one trial).

    >>> print(Mean.of([90.0, 92.0]))
    91.00 ± 1.41
    """

    mean: float
    spread: float

    @staticmethod
    def of(values: Sequence[float]) -> Mean:
        """Mean and sample standard deviation."""
        return Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    def __str__(self) -> str:
        """Mean ± spread, with two digits after the point."""
        return f"{self.mean:.2f} ± {self.spread:.2f}"


@dataclass(frozen=True)
class Winner:
    """The paper's method with the highest mean accuracy, and by how much it leads the next.

    `clear` says that the lead is larger than either spread.
    """

    method: str
    lead: float
    clear: bool


def accuracies(rows: Sequence[Row], method: str, kept: int, rate: float | None) -> Mean:
    """Test accuracy over the trials: before fine-tuning for rate None, else after fine-tuning with that learning rate.

    >>> rows = [Row("", t, "gfs", 5, 0.0, 0.5, 80.0 + t, 1.0, 0.01, 90.0, 1.0) for t in (0, 1, 2)]
    >>> print(accuracies(rows, "gfs", 5, None), "|", accuracies(rows, "gfs", 5, 0.01))
    81.00 ± 1.00 | 90.00 ± 0.00
    """
    mine = [row for row in rows if (row.method, row.kept) == (method, kept)]
    if rate is None:  # the same network stands in the row of every learning rate
        return Mean.of(list({row.trial: row.accuracy for row in mine}.values()))
    return Mean.of([row.finetuned_accuracy for row in mine if row.finetune_lr == rate and row.finetuned_accuracy])


def winner(rows: Sequence[Row], kept: int, rate: float | None) -> Winner:
    """Who is best at this size, of the paper's methods that were run.

    >>> rows = [Row("", 0, m, 5, 0.0, 0.5, a, 1.0, 0.01, 90.0, 1.0) for m, a in (("gfs", 80.0), ("topk", 70.0))]
    >>> winner(rows, 5, None)
    Winner(method='gfs', lead=10.0, clear=True)
    """
    found = {m: accuracies(rows, m, kept, rate) for m in _PAPER if any(row.method == m for row in rows)}
    ranked = sorted(found, key=lambda method: -found[method].mean)
    first, second = found[ranked[0]], found[ranked[min(1, len(ranked) - 1)]]
    lead = first.mean - second.mean
    return Winner(ranked[0], lead, lead > max(first.spread, second.spread))


def write(rows: Sequence[Row], settings: Settings, folder: Path, command: str) -> list[Path]:
    """Write mnist.png and mnist.md beside mnist.csv; returns the paths of all three."""
    paths = [folder / f"mnist.{ending}" for ending in ("csv", "png", "md")]
    _draw(rows, paths[1])
    paths[2].write_text(summary(rows, settings, command), encoding="utf-8")
    return paths


def _grid(rows: Sequence[Row]) -> tuple[list[str], list[int], list[float | None]]:
    """Methods, sizes, and None (before) followed by the learning rates of fine-tuning."""
    pruned = [row for row in rows if row.method != "dense"]
    methods = [method for method in TITLES if any(row.method == method for row in pruned)]
    rates = sorted({row.finetune_lr for row in pruned if row.finetune_lr is not None})
    return methods, sorted({row.kept for row in pruned}), [None, *rates]


def _dense(rows: Sequence[Row]) -> Mean:
    return Mean.of([row.accuracy for row in rows if row.method == "dense"])


def _draw(rows: Sequence[Row], path: Path) -> None:
    methods, sizes, stages = _grid(rows)
    figure, axes = new_figure(len(stages))
    for ax, rate in zip(axes, stages, strict=True):
        for method in methods:
            means = [accuracies(rows, method, size, rate) for size in sizes]
            errors = [100 - m.mean for m in means]
            style: dict[str, Any] = {"label": TITLES[method], "color": _COLOURS[method], "marker": "o", "capsize": 3}
            ax.errorbar(sizes, errors, yerr=[m.spread for m in means], **style)
        ax.axhline(100 - _dense(rows).mean, color="black", linestyle=":", linewidth=1, label="dense")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        ax.set_yticks(ticks := [1, 2, 5, 10, 20, 50, 90], [str(tick) for tick in ticks])
        ax.set_title(_stage(rate))
        ax.set_xlabel("units kept")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("test error, %")
    axes[0].legend()
    figure.savefig(path, dpi=150)


def _stage(rate: float | None) -> str:
    return "before fine-tuning" if rate is None else f"fine-tuned with lr {rate:g}"


def summary(rows: Sequence[Row], settings: Settings, command: str) -> str:
    """Markdown: how it was made, accuracies, and where they agree with the paper."""
    methods, sizes, stages = _grid(rows)
    trials = 1 + max(row.trial for row in rows)
    lines = [
        "# Two-layer networks on MNIST",
        "",
        f"Made by `{command}` (Section 6.2 and Appendix A.2 of the paper).",
        "",
        "![test error against units kept](mnist.png)",
        "",
        f"The dense networks (784-{settings.hidden}-10, one for each of {trials} trials) get {_dense(rows)} % of the"
        " test images right. Accuracies are in percent, mean ± standard deviation over the trials; the best of the"
        " paper's three methods is bold.",
        "",
    ]
    for rate in stages:
        lines += [f"## {_stage(rate).capitalize()}", "", *_table(rows, methods, sizes, rate), ""]
    lines += ["## What it took", "", *_costs(rows, methods, sizes), ""]
    lines += ["## Against the paper", "", *_claims(rows, sizes, stages), ""]
    lines += ["## Settings", "", *_settings(settings, trials), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Row], methods: Sequence[str], sizes: Sequence[int], rate: float | None) -> list[str]:
    lines = [_line(["units kept", *(TITLES[m] for m in methods)]), "|---:|" + "---:|" * len(methods)]
    for size in sizes:
        best = winner(rows, size, rate).method
        cells = [str(accuracies(rows, method, size, rate)) for method in methods]
        marked = [f"**{cell}**" if method == best else cell for method, cell in zip(methods, cells, strict=True)]
        lines.append(_line([str(size), *marked]))
    return lines


def _costs(rows: Sequence[Row], methods: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Distance to the dense output, loss before fine-tuning, and seconds of pruning, at every size."""
    lines = [
        "Per method: the relative distance of the pruned network's test logits to the dense ones, their cross entropy"
        " (both before fine-tuning, means over the trials), and the seconds of pruning (the least of the trials: other"
        " work on the machine only adds to them).",
        "",
        _line(["units kept", *(TITLES[m] for m in methods)]),
        "|---:|" + "---:|" * len(methods),
    ]
    for size in sizes:
        cells = []
        for method in methods:
            mine = [row for row in rows if (row.method, row.kept) == (method, size)]
            error, loss = (statistics.fmean(getattr(row, name) for row in mine) for name in ("output_error", "loss"))
            cells.append(f"{error:.2f}, {loss:.2f}, {min(row.pruning_s for row in mine):.2f} s")
        lines.append(_line([str(size), *cells]))
    return lines


def _claims(rows: Sequence[Row], sizes: Sequence[int], stages: Sequence[float | None]) -> list[str]:
    lines = []
    for rate in stages:
        claimed, when = ("gfs", "before") if rate is None else ("ispasp", "after")
        found = {size: winner(rows, size, rate) for size in sizes}
        held = sum(w.method == claimed for w in found.values())
        verdict = "Agrees" if held == len(sizes) else "Disagrees" if held == 0 else "Agrees in part"
        best = ", ".join(
            f"{size}: {TITLES[w.method]} by {w.lead:.2f}{'' if w.clear else ' (within the spread)'}"
            for size, w in found.items()
        )
        lines.append(
            f"- {verdict}: {TITLES[claimed]} is best {when} fine-tuning, says the paper. {_stage(rate).capitalize()},"
            f" it is at {held} of {len(sizes)} sizes. Best at each size, and its lead in points: {best}."
        )
    if {"ispasp", "random"} <= {row.method for row in rows}:
        lines.append(f"- The random draw has at least the accuracy of i-SpaSP {_beaten(rows, sizes, stages)}.")
    return lines


def _beaten(rows: Sequence[Row], sizes: Sequence[int], stages: Sequence[float | None]) -> str:
    """In how many sizes the control is as good as i-SpaSP, stage by stage."""
    parts = []
    for rate in stages:
        pairs = [[accuracies(rows, method, size, rate).mean for method in ("random", "ispasp")] for size in sizes]
        parts.append(f"at {sum(drawn >= chosen for drawn, chosen in pairs)} of {len(sizes)} sizes {_stage(rate)}")
    return ", ".join(parts)


def _settings(settings: Settings, trials: int) -> list[str]:
    shorter = "" if settings.epochs >= 200 else " (the paper: 200, so its networks have converged further)"
    fresh = "a new mini-batch in each iteration" if settings.fresh else "one mini-batch for all iterations"
    return [
        f"- Dense networks: no biases, {settings.examples} training images without augmentation, SGD with batches of"
        f" {settings.batch}, learning rate {settings.lr:g} (a tenth after 50 % and again after 75 %), momentum 0.9, no"
        f" weight decay, {settings.epochs} epochs{shorter}.",
        f"- Pruning: mini-batches of {settings.prune_batch}. i-SpaSP: T = {settings.iterations}, {fresh}. Top-K: one"
        " mini-batch. GFS: all units tried in every step, on a new mini-batch, by cross entropy; the logits are sums"
        " over the units that are in, as the paper's Appendix A.2 describes it, not averages as in Ye et al. (2020)."
        " Without biases a factor on all logits changes no accuracy, but it would change the loss that GFS follows.",
        f"- Fine-tuning: {settings.finetune_epochs} epochs, otherwise like training. The paper gives neither epochs nor"
        " learning rate for these networks.",
        "- The sizes of the paper's figure are not in its text, so they are ours. The random draw is ours too: it says"
        " how much of a result is fine-tuning.",
        f"- `{settings}`, {trials} trials (seeds {settings.seed} to {settings.seed + trials - 1}).",
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
