"""Counts of how cases ended: a table for the terminal, and the page in docs/results."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak.case import FAILED, OK, REFUSED

Record = dict[str, Any]


@dataclass
class Tally:
    """Counts per category, of any number of runs."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    facts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[Record] = field(default_factory=list)
    commits: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        category = record["category"]
        self.outcomes[category][record["outcome"]] += 1
        self.seconds[category] += record.get("seconds", 0.0)
        self.commits[record.get("commit", "unknown")] += 1
        for name, value in record.get("facts", {}).items():
            if name.startswith("worst "):
                self.worst[name[6:]] = max(self.worst.get(name[6:], 0.0), value)
            elif value is True or isinstance(value, str):
                self.facts[category][name if value is True else f"{name}: {value}"] += 1
        if record["outcome"] == REFUSED:
            self.refusals[category, record["error"], template(record["message"])] += 1
        if record["outcome"] == FAILED:
            self.failures.append(record)


def read(path: Path) -> Tally:
    """The tally of a file of records; a last line that was cut short is left out."""
    tally = Tally()
    for record in _records(path.read_text().splitlines()):
        tally.add(record)
    return tally


def _records(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def template(message: str) -> str:
    """A message without its names and numbers, so that equal reasons are counted together.

    >>> template("fc1 has 64 units; keep=80 asks for more: pass keep <= 64")
    'fc1 has N units; keep=N asks for more: pass keep <= N'
    """
    first = message.strip().splitlines()[0] if message.strip() else ""
    first = re.sub(r"'[^']*'", "'…'", first)
    first = re.sub(r"/tmp/\S+", "FOLDER", first)  # noqa: S108
    return re.sub(r"(?<![A-Za-z])\d[\d,.]*(e-?\d+)?", "N", first)[:240]


def rows(tally: Tally) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    total: Counter[str] = Counter()
    for category, ended in tally.outcomes.items():
        total += ended
        found.append((category, *_counts(ended), f"{tally.seconds[category] / max(1, ended.total()):.1f}"))
    seconds = sum(tally.seconds.values()) / max(1, total.total())
    return [*found, ("all", *_counts(total), f"{seconds:.1f}")]


def _counts(ended: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{n:,}" for n in (ended.total(), ended[OK], ended[REFUSED], ended[FAILED]))


HEAD = ("category", "cases", "ok", "refused", "failed", "s/case")


def table(tally: Tally) -> str:
    """For the terminal."""
    lines = [HEAD, *rows(tally)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    refused = "\n".join(f"  {n} x {c}: {e}: {m}" for (c, e, m), n in tally.refusals.most_common(12))
    return f"{text}\nrefused:\n{refused}" if refused else text


_HEAD = """# Reliability

Made by `make soak SECONDS=7200` (records in `soak.jsonl`), `make fuzz-files > fuzz.txt` and then
`python -m soak --report soak.jsonl --fuzz fuzz.txt` with `PYTHONPATH=tests`.

A soak runs random cases, each in a process of its own with a time limit. It asks whether removal equals masking (by an
oracle of the tests' own), whether model and process are as before, and whether all that is refused is refused by one
`IspaspError`. `refused` ends a case well, `failed` does not. `python -m soak --reproduce CATEGORY:SEED` runs one again.
"""


def markdown(tally: Tally, fuzz: str = "") -> str:
    """The counts as a page of docs/results, with what was found on the way."""
    hours = sum(tally.seconds.values()) / 3600
    lines = [
        _HEAD,
        f"{sum(c.total() for c in tally.outcomes.values()):,} cases in {hours:.1f} hours of processes, at "
        f"{', '.join(f'`{name}`' for name in tally.commits)}.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
        *(f"| {' | '.join(row)} |" for row in rows(tally)),
        "",
    ]
    if tally.worst:
        lines += [f"Largest {name}: {value:.1e}." for name, value in sorted(tally.worst.items())] + [""]
    lines += ["## What the cases did", ""]
    for category, facts in tally.facts.items():
        lines.append(f"- {category}: {', '.join(f'{name} {n:,}' for name, n in sorted(facts.items()))}")
    lines += ["", "## Refused", "", "| cases | category | error | message |", "|---|---|---|---|"]
    for (category, error, message), n in tally.refusals.most_common():
        lines.append(f"| {n:,} | {category} | {error} | {message.replace('|', ' ')} |")
    lines += ["", "## Failed", ""]
    lines += [_told(f) for f in tally.failures] or ["None."]
    if fuzz:
        lines += ["", "## Damaged files", "", "```", fuzz.strip(), "```"]
    return "\n".join([*lines, "", (Path(__file__).parent / "found.md").read_text().strip()])


def _told(failure: Record) -> str:
    name, commit = f"{failure['category']}:{failure['seed']}", failure.get("commit", "unknown")
    return f"- `{name}` at `{commit}`: {failure['error']}: {failure['message'][:200]}"
