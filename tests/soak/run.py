"""The loop: one case after the other until the time is up."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ispasp
from soak import branches, faults, files, networks, processes, threads, training
from soak.case import FAILED, Case, Category, attempt
from soak.isolate import isolated
from soak.report import Tally, table

_EVERY = 600.0  # seconds between two tables


@dataclass(frozen=True)
class Kind:
    """A category: its cases, how often they come, and the seconds that one may take."""

    run: Category
    weight: float
    limit: float = 180.0


CATEGORIES: dict[str, Kind] = {
    "networks": Kind(networks.run, 10),
    "branches": Kind(branches.run, 8),
    "faults": Kind(faults.run, 8),
    "files": Kind(files.run, 4),
    "processes": Kind(processes.run, 2, 300.0),
    "threads": Kind(threads.run, 2, 300.0),
    "training": Kind(training.run, 3),
}


def soak(seconds: float, out: Path, only: Sequence[str], seed: int) -> Tally:
    """Run random cases for a time, append their records to a file, and say how they ended."""
    prepare()
    end, told, tally = time.monotonic() + seconds, time.monotonic(), Tally()
    print(f"soak: seed {seed}, {seconds:.0f} s, records in {out}", flush=True)
    with out.open("a") as file:
        for number, (category, case_seed) in enumerate(cases(only, seed)):
            if number >= len(only) and time.monotonic() >= end:
                break
            kind = CATEGORIES[category]
            record = {**isolated(category, kind.run, case_seed, kind.limit), "commit": commit()}
            tally.add(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            if record["outcome"] == FAILED:
                print(f"FAILED {category}:{case_seed} {record['error']}: {record['message'][:200]}", flush=True)
            if time.monotonic() - told >= _EVERY:
                told = time.monotonic()
                print(table(tally), flush=True)
    print(table(tally), flush=True)
    return tally


def cases(only: Sequence[str], seed: int) -> Iterator[tuple[str, int]]:
    """Each category once, then categories by their weights."""
    rng = random.Random(seed)  # noqa: S311
    for category in only:
        yield category, rng.randrange(2**31)
    while True:
        category = rng.choices(only, [CATEGORIES[name].weight for name in only])[0]
        yield category, rng.randrange(2**31)


def reproduce(name: str) -> int:
    """Run one case in this process, so that a debugger can look at it."""
    category, seed = name.split(":")
    prepare()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        record = attempt(CATEGORIES[category].run, Case(category, int(seed), Path(folder)))
    for key, value in record.items():
        print(f"{key}: {value}")
    return 1 if record["outcome"] == FAILED else 0


def prepare() -> None:
    """What all cases share: one thread, and a first export and step, whose imports take seconds and change filters."""
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    ispasp.prune(net, [torch.rand(16, 4)], progress=False)
    ispasp.finetune(net, [(torch.rand(4, 4), torch.zeros(4, dtype=torch.long))], progress=False)


_commit: list[str] = []


def commit() -> str:
    """The commit of this checkout, so that records of several runs can be told apart."""
    if not _commit:
        git = ["git", "-C", os.path.dirname(__file__), "rev-parse", "--short", "HEAD"]  # noqa: PTH120
        try:
            _commit.append(subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip())  # noqa: S603
        except (OSError, subprocess.CalledProcessError):
            _commit.append("unknown")
    return _commit[0]


def one(category: str, seed: int, limit: float | None = None) -> dict[str, Any]:
    """One case in its own process; for tests."""
    kind = CATEGORIES[category]
    return isolated(category, kind.run, seed, limit or kind.limit)


if __name__ == "__main__":
    sys.exit("run python -m soak")
