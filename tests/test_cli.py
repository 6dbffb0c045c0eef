"""The command line as users see it: output, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ispasp


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from ispasp.cli import main; main()"
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_help_lists_the_commands_and_version_is_shown() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("reproduce", "bench", "demo"))
    assert run("--version").stdout.strip() == f"ispasp {ispasp.__version__}"


def test_synthetic_writes_its_files(tmp_path: Path) -> None:
    done = run("reproduce", "synthetic", "--matrices", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"synthetic.csv", "synthetic.png", "synthetic.md"}
    assert "Theorem 2" in done.stdout
    assert done.stderr == ""  # no progress bar where there is no terminal


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision: pip install 'ispasp[vision]'")
def test_bench_json_is_a_list_of_rows() -> None:
    done = run("bench", "selection", "--examples", "2", "--reference-examples", "1", "--iterations", "1", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["block"], row["keep"]) for row in rows] == [(2, 0.2), (2, 0.4), (15, 0.2), (15, 0.4)]
    assert all(row["same_sets"] for row in rows)


def test_an_error_is_one_line_and_exit_code_2() -> None:
    done = run("demo", "--keep", "1.5")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("ispasp: keep=1.5")
    assert len(done.stderr.strip().splitlines()) == 1
    assert run("bench", "nonsense").returncode == 2
