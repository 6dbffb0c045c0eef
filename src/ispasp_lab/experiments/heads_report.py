"""The experiment on heads as figure and Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ispasp.report import new_figure
from ispasp_lab.experiments.heads import DENSE, MAGNITUDE, NAME, VARIANTS, Row
from ispasp_lab.experiments.records import read_rows

PAPER = {  # Table 2: mBERT on XNLI, after fine-tuning
    ("random", 0.25): 62.73,
    ("random", 0.4): 66.43,
    ("taylor", 0.25): 62.97,
    ("taylor", 0.4): 67.31,
    ("ispasp", 0.25): 63.70,
    ("ispasp", 0.4): 68.11,
}
PAPER_DENSE = 71.02
_NAMES = {"ispasp": "i-SpaSP", MAGNITUDE: "i-SpaSP by magnitude", "random": "random"}
_NAMES |= {"taylor": "Taylor, global (Michel et al.)"}


def write(folder: Path, command: str) -> list[Path]:
    """Draw and describe all rows of heads.csv in the folder; returns the paths of the three files."""
    paths = [folder / f"heads.{ending}" for ending in ("csv", "png", "md")]
    rows = read_rows(folder / NAME, Row)
    _draw(rows, paths[1])
    paths[2].write_text(summary(rows, command), encoding="utf-8")
    return paths


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard deviation of the values (0 for one).

    >>> mean_and_spread([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))


def _finetuned(rows: Sequence[Row], data: str, method: str, compensate: str, keep: float) -> list[float]:
    return [r.finetuned for r in _trials(rows, data, method, compensate, keep) if r.finetuned is not None]


def _trials(rows: Sequence[Row], data: str, method: str, compensate: str, keep: float) -> list[Row]:
    return [r for r in rows if (r.data, r.method, r.compensate, r.keep) == (data, method, compensate, keep)]


def _draw(rows: Sequence[Row], path: Path) -> None:
    datas = list(dict.fromkeys(row.data for row in rows))
    keeps = _keeps(rows)
    figure, axes = new_figure(len(datas))
    width = 0.8 / len(VARIANTS)
    for ax, data in zip(axes, datas, strict=True):
        for number, (method, compensate) in enumerate(VARIANTS):
            label = _label(method, compensate)
            for place, keep in enumerate(keeps):
                trials = _trials(rows, data, method, compensate, keep)
                before = [r.accuracy for r in trials if r.accuracy is not None]
                after = [r.finetuned for r in trials if r.finetuned is not None]
                if not before or not after:
                    continue
                x = place + (number - (len(VARIANTS) - 1) / 2) * width
                mean, spread = mean_and_spread(after)
                error = {"yerr": spread, "capsize": 2} if len(after) > 1 else {}
                ax.bar(x, mean, width, color=f"C{number}", alpha=0.35, **error)
                ax.bar(x, mean_and_spread(before)[0], width, color=f"C{number}", label=label if not place else None)
        for row in rows:
            if (row.data, row.method) == (data, DENSE) and row.accuracy is not None:
                ax.axhline(row.accuracy, color="grey", linestyle=":", linewidth=1)
        ax.set_xticks(range(len(keeps)), [f"keep {keep:g}" for keep in keeps])
        ax.set_title(data)
        ax.grid(alpha=0.3, axis="y")
    axes[0].set_ylabel("accuracy, % (pale: fine-tuned again)")
    axes[0].set_ylim(bottom=30)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=150)


def summary(rows: Sequence[Row], command: str) -> str:
    """Markdown: a table for every data set beside the paper's numbers, and where the two agree.

    >>> row = Row("s", "sst2", 0, "ispasp", "none", 0.25, "3 3", 60.0, 80.0, 0.75, 1.0)
    >>> "| i-SpaSP | 0.25 | 60.0 | 80.0 | 63.70 |" in summary([row], "ispasp reproduce heads")
    True
    """
    lines = [
        "# Pruning attention heads",
        "",
        f"Made by `ispasp reproduce heads` with the data of each section, last by `{command}` (Section 6.4 and"
        f" Appendix A.4 of the paper). The paper's column is Table 2: mBERT on XNLI (dense {PAPER_DENSE} %), another"
        " network on other data, so only the order of methods can be compared.",
        "",
        "![accuracy](heads.png)",
        "",
    ]
    for data in dict.fromkeys(row.data for row in rows):
        lines += _section([row for row in rows if row.data == data])
    return "\n".join(lines)


def _section(rows: Sequence[Row]) -> list[str]:
    data = rows[0].data
    full = next((row.accuracy for row in rows if row.method == DENSE), None)
    trials = 1 + max(row.trial for row in rows)
    lines = [
        f"## {data}",
        "",
        f"Settings: `{rows[0].settings}` (epochs: before pruning + after it). Accuracy in percent,"
        f" {f'mean and standard deviation of {trials} trials from one dense network' if trials > 1 else 'one trial'}.",
        "",
        *([] if full is None else [f"Dense network: {full:.2f} %.", ""]),
        "| method | keep | pruned | fine-tuned again | paper, fine-tuned |",
        "|---|---:|---:|---:|---:|",
    ]
    for method, compensate in VARIANTS:
        for keep in _keeps(rows):
            found = _trials(rows, data, method, compensate, keep)
            before = [r.accuracy for r in found if r.accuracy is not None]
            after = [r.finetuned for r in found if r.finetuned is not None]
            if before and after:
                paper = PAPER.get((method, keep)) if compensate == "none" else None
                cells = _cell(before), _cell(after), "-" if paper is None else f"{paper:.2f}"
                lines.append(f"| {_label(method, compensate)} | {keep:g} | {' | '.join(cells)} |")
    failed = {_label(r.method, r.compensate): r.note for r in rows if r.note}
    texts = [*findings(rows), *(f"{name} did not run: {note}" for name, note in failed.items())]
    return [*lines, "", *(f"- {text}" for text in texts), ""]


def findings(rows: Sequence[Row]) -> list[str]:
    """Whether the paper's order after fine-tuning (i-SpaSP, then sensitivities, then random) is found on one data set.

    A difference below twice its standard error, from the spread of the trials, is called a tie.

    >>> a = Row("s", "sst2", 0, "ispasp", "none", 0.25, "3 3", 60.0, 80.0, 0.75, 1.0)
    >>> b = Row("s", "sst2", 0, "random", "none", 0.25, "3 3", 60.0, 79.0, 0.75, 1.0)
    >>> findings([a, b])
    ['keep 0.25: i-SpaSP against random +1.0 (one trial): agrees with the paper.']
    """
    found = []
    data = rows[0].data
    for keep in _keeps(rows):
        own = _finetuned(rows, data, "ispasp", "none", keep)
        for other in ("taylor", "random"):
            against = _finetuned(rows, data, other, "none", keep)
            if own and against:
                found.append(f"keep {keep:g}: i-SpaSP against {_NAMES[other]} {_verdict(own, against)}.")
        by_size = _finetuned(rows, data, MAGNITUDE, "none", keep)
        if own and by_size:
            gain = f"{_difference(by_size, own)[0]:+.1f}"
            found.append(f"keep {keep:g}: ranking by magnitude changes i-SpaSP after fine-tuning by {gain} points.")
        with_, control = (_finetuned(rows, data, m, "dense", keep) for m in ("ispasp", "random"))
        if own and with_:
            gain = f"{_difference(with_, own)[0]:+.1f}"
            extra = f"; a random choice with it {_difference(control, own)[0]:+.1f}" if control else ""
            found.append(f"keep {keep:g}: compensation changes i-SpaSP after fine-tuning by {gain} points{extra}.")
    return found


def _verdict(own: Sequence[float], other: Sequence[float]) -> str:
    difference, error = _difference(own, other)
    if error is None:
        return f"{difference:+.1f} (one trial): {'agrees' if difference > 0 else 'disagrees'} with the paper"
    said = "a tie" if abs(difference) < 2 * error else "agrees with the paper"
    if abs(difference) >= 2 * error and difference < 0:
        said = "disagrees with the paper"
    return f"{difference:+.1f} (standard error {error:.1f}): {said}"


def _difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None]:
    (x, dx), (y, dy) = mean_and_spread(a), mean_and_spread(b)
    error = math.sqrt(dx**2 / len(a) + dy**2 / len(b)) if min(len(a), len(b)) > 1 else None
    return x - y, error


def _keeps(rows: Sequence[Row]) -> list[float]:
    return sorted({row.keep for row in rows if row.method != DENSE})


def _label(method: str, compensate: str) -> str:
    return _NAMES[method] + ("" if compensate == "none" else f", compensate={compensate}")


def _cell(values: Sequence[float]) -> str:
    mean, spread = mean_and_spread(values)
    return f"{mean:.1f} ± {spread:.1f}" if len(values) > 1 else f"{mean:.1f}"
