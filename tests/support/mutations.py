"""Try every mutation of `support.mutants` in a copy of the library: `make mutations` writes docs/results/mutations.md.

`python -m support.mutations [--out FILE] [--log FILE] [--only TEXT] [--again LOG]`. A test that fails kills a mutation.
Each runs in a forked process that has torch and pytest loaded already. What stands in the log is not tried again.
`--again` tries those of an older log first with the test that killed them then.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest

from support.mutants import HARMLESS, MUTANTS

ROOT = Path(__file__).parents[2]
SECONDS = 300  # one that loops for ever is killed, too
SURVIVED = "survived"


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests to run."""

    file: str
    tests: tuple[str, ...]
    text: str
    replacement: str

    @property
    def name(self) -> str:
        return f"{self.file}: {_line(self.text)} -> {_line(self.replacement) or 'nothing'}"

    def source(self) -> str:
        """The mutated file."""
        source = (ROOT / "src" / "ispasp" / self.file).read_text(encoding="utf-8")
        if source.count(self.text) != 1:
            raise SystemExit(f"{self.name}: the text stands {source.count(self.text)} times in the file: correct it")
        return source.replace(self.text, self.replacement)


class Noting:
    """Remembers the test that failed first."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid.replace("::ispasp", "the doctest of ispasp")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} does not load"


def _line(text: str) -> str:
    return " ".join(text.split())


def mutants(only: str) -> Iterator[Mutant]:
    for (file, tests), pairs in MUTANTS.items():
        for text, replacement in pairs:
            mutant = Mutant(file, tests, text, replacement)
            if only in mutant.name:
                yield mutant


def outcome(mutant: Mutant, folder: Path) -> str:
    """The test that kills the mutant, or that it survived."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source)  # with what is compiled already
    (source / "ispasp" / mutant.file).write_text(mutant.source(), encoding="utf-8")
    child = os.fork()
    if not child:
        _run(mutant, folder)
    end = time.monotonic() + SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, 9)
            os.waitpid(child, 0)
            return "a test that does not end"
        time.sleep(0.2)
    found = folder / "found"
    return found.read_text() if found.exists() else "a crash"


def _run(mutant: Mutant, folder: Path) -> None:
    """Run the tests on the copy, one file after the other until one fails, and leave the process."""
    try:
        os.setpgid(0, 0)
        os.chdir(ROOT)
        os.environ |= {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(folder / "src"))
        sys.stdout = sys.stderr = (folder / "log").open("w")
        noting = Noting()
        options = ["-x", "-q", "-m", "not long", "-p", "no:cacheprovider", "--assert=plain"]
        doctests = ["--doctest-modules", str(folder / "src" / "ispasp" / mutant.file)]
        for part in (*([test] for test in mutant.tests), doctests):  # doctests load the file a second time
            pytest.main(["-c", str(_settings(folder)), f"--rootdir={ROOT}", *options, *part], plugins=[noting])
            if noting.failed:
                break
        (folder / "found").write_text(noting.failed or SURVIVED)
    finally:
        sys.stdout.flush()
        os._exit(0)


def _settings(folder: Path) -> Path:
    """Settings of pytest for the copy: those of pyproject.toml, without the doctests of all files."""
    path = folder / "pytest.ini"
    lines = ("[pytest]", f"pythonpath = {ROOT / 'tests'}", "addopts = --import-mode=importlib", "markers = long")
    path.write_text("\n".join((*lines, "doctest_optionflags = NORMALIZE_WHITESPACE ELLIPSIS", "")))
    return path


def tried(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = outcome(mutant, Path(folder))
    print(f"{found}: {mutant.name}", flush=True)
    return found


def logged(log: Path | None) -> dict[str, str]:
    """The outcomes in a log, by the names of mutants."""
    lines = log.read_text(encoding="utf-8").splitlines() if log is not None and log.exists() else []
    return dict(json.loads(line) for line in lines)


def quicker(mutant: Mutant, killers: dict[str, str]) -> Mutant:
    """The mutant, with the test first that killed it before."""
    killer = killers.get(mutant.name, "")
    return replace(mutant, tests=(killer, *mutant.tests)) if killer.startswith("tests/") else mutant


def results(every: Sequence[Mutant], log: Path) -> list[tuple[Mutant, str]]:
    """The mutants with their outcomes. New outcomes go to the log; Ctrl-C leaves the rest for the next time."""
    known = logged(log)
    with suppress(KeyboardInterrupt):  # those that are left can be tried another time
        for mutant in every:
            if mutant.name not in known:
                known[mutant.name] = tried(mutant)
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([mutant.name, known[mutant.name]]) + "\n")
    return [(mutant, known[mutant.name]) for mutant in every if mutant.name in known]


def page(found: Sequence[tuple[Mutant, str]]) -> str:
    """The table of all mutants."""
    killed, total = sum(result != SURVIVED for _, result in found), sum(map(len, MUTANTS.values()))
    lines = [
        "# Mutations",
        "",
        f"Made by `make mutations`: {len(found)} of {total} one-line changes were tried, and {killed} noticed.",
        "For each, only the tests named in `tests/support/mutants.py` run, without long ones, then the doctests of its "
        "file, until one fails. Other tests may notice what these do not.",
        "",
        "| file | text | becomes | killed by |",
        "|---|---|---|---|",
    ]
    for mutant, result in found:
        told = result if result != SURVIVED else f"survived: {HARMLESS.get(mutant.text, 'not explained yet')}"
        cells = (f"`{mutant.file}`", _code(mutant.text), _code(mutant.replacement), told)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{_line(text)}`".replace("|", "\\|") if text.strip() else "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, default=ROOT / ".mutations.jsonl")
    parser.add_argument("--only", default="")
    parser.add_argument("--again", type=Path)
    given = parser.parse_args()
    for name in ("torch.export._trace", "torch.distributed", "hypothesis", "numpy", "safetensors.torch"):
        import_module(name)
    compileall.compile_dir(ROOT / "src", quiet=1)
    every = [quicker(mutant, logged(given.again)) for mutant in mutants(given.only)]
    for mutant in every:
        mutant.source()
    found = results(every, given.log)
    survivors = [mutant.name for mutant, result in found if result == SURVIVED]
    print(f"{len(found) - len(survivors)} of {len(found)} are killed", *survivors, sep="\n")
    killers = tuple(dict.fromkeys(result for _, result in found if result.startswith("tests/")))
    blamed = tried(Mutant(every[0].file, killers, every[0].text, every[0].text))
    if blamed != SURVIVED:
        raise SystemExit(f"{blamed} fails without any mutation")
    if given.out:
        given.out.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
