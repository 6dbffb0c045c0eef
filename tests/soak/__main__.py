"""The command line: run for a time, reproduce one case, or report what a file of records holds."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from soak.report import Tally, markdown, read
from soak.run import CATEGORIES, reproduce, soak


def main() -> int:
    parser = argparse.ArgumentParser("python -m soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"), help="records, one line each; appended to")
    parser.add_argument("--only", default=",".join(CATEGORIES), help="categories, separated by commas")
    parser.add_argument("--seed", type=int, default=None, help="of the first case; a new one each time if left out")
    parser.add_argument("--reproduce", metavar="CATEGORY:SEED", help="run one case here, without a process of its own")
    parser.add_argument("--report", type=Path, help="print the page that a file of records makes, and end")
    parser.add_argument("--fuzz", type=Path, help="with --report: what `python -m support.files_fuzz` has printed")
    given = parser.parse_args()
    if given.report:
        print(markdown(read(given.report), given.fuzz.read_text() if given.fuzz else ""))
        return 0
    if given.reproduce:
        return reproduce(given.reproduce)
    only = given.only.split(",")
    unknown = sorted(set(only) - set(CATEGORIES))
    if unknown:
        parser.error(f"unknown categories {unknown}: choose from {list(CATEGORIES)}")
    seed = given.seed if given.seed is not None else time.time_ns() % 10**9
    tally: Tally = soak(given.seconds, given.out, only, seed)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
