"""The long test in short: every category runs, and a planted defect is found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ispasp
from ispasp.surgery import remove
from soak.case import FAILED, OK, Case, Refused, attempt
from soak.isolate import isolated
from soak.report import Tally, markdown, read, table
from soak.run import one, prepare, reproduce, soak

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are forked, which this system cannot do")
SEEDS = {
    "networks": 1,
    "branches": 6,
    "faults": 7,
    "files": 2,
    "processes": 4,
    "training": 5,
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    prepare()


@pytest.mark.parametrize("category", SEEDS)
def test_a_case_of_every_category(category: str) -> None:
    record = one(category, SEEDS[category])
    assert record["outcome"] == OK, record
    assert record["options"], "a case says what it chose"


def test_surgery_that_cuts_the_wrong_units_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the library's own proof is blind. The case is well without the defect: see above."""
    cut = remove._cut

    def wrong(tensor: Tensor, *rest: Any) -> Tensor:
        return cut(tensor.roll(1, dims=1) if tensor.dim() > 1 else tensor, *rest)

    monkeypatch.setattr(remove, "_cut", wrong)
    for name in ("ispasp._apply", "ispasp.surgery.trial"):
        monkeypatch.setattr(f"{name}.relative_error", lambda *_: 0.0)
    monkeypatch.setattr("ispasp.result.Evidence.holds", True)
    record = one("networks", SEEDS["networks"])
    assert record["outcome"] == FAILED
    assert "masking" in record["message"]
    assert "network" in record["options"]


def test_a_model_that_is_not_put_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remove.Undo, "close", lambda self: None)
    assert any(one("faults", seed)["outcome"] == FAILED for seed in range(3))


def hangs(case: Case) -> None:
    case.options["kind"] = "hang"
    while True:
        pass


def crashes(case: Case) -> None:
    os.abort()


def refuses(case: Case) -> None:
    with case.may_refuse("the call"):
        ispasp.prune(torch.nn.Linear(2, 2), [torch.ones(2, 2)], 0.5, progress=False)


def test_a_hang_and_a_crash_are_failures() -> None:
    assert isolated("x", hangs, 0, 0.5)["error"] == "Hang"
    assert "signal 6" in isolated("x", crashes, 0, 30.0)["message"]


def test_an_error_of_the_library_is_a_refusal_only_where_it_may_come(tmp_path: Path) -> None:
    record = attempt(refuses, Case("x", 0, tmp_path))
    assert (record["outcome"], record["error"], record["facts"]) == (
        "refused",
        "NothingToPruneError",
        {"refused in": "the call"},
    )
    with pytest.raises(Refused):
        refuses(Case("x", 0, tmp_path))


@pytest.mark.long
def test_runs_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.jsonl"
    for seed in range(2):
        soak(0.0, out, ["training"], seed)
    with out.open("a") as file:
        file.write('{"category": "training", "se')  # killed while it wrote
    tally = read(out)
    assert tally.outcomes["training"].total() == 2
    assert "training" in capsys.readouterr().out
    first = json.loads(out.read_text().splitlines()[0])
    assert first["outcome"] == OK, first
    assert reproduce(f"training:{first['seed']}") == (first["outcome"] == FAILED)


def test_the_report_names_failures_and_refusals() -> None:
    tally = Tally()
    tally.add(
        {"category": "training", "seed": 3, "outcome": FAILED, "error": "Wrong", "message": "lost", "seconds": 1.0}
    )
    tally.add({"category": "training", "seed": 4, "outcome": "refused", "error": "SaveError", "message": "no 12 'a'"})
    page = markdown(tally)
    assert "| training | 2 | 0 | 1 | 1 |" in page
    assert "`training:3` at `unknown`: Wrong: lost" in page
    assert "3 cases, 0 failed" in markdown(tally, "3 cases, 0 failed")
    assert "| 1 | training | SaveError | no N '…' |" in page
    assert "SaveError: no N" in table(tally)
