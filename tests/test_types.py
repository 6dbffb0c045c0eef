"""Type checkers see a wrong option of `prune`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # mypy reads half of the library
SRC = Path(__file__).parents[1] / "src"
# What no option below is of the type of counts as Any: reading torch takes a minute.
CONFIG = """
[mypy]
mypy_path = {src}
follow_imports = silent
warn_unused_ignores = True
[mypy-torch.*,numpy.*,safetensors.*,rich.*,accelerate.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-ispasp.graph.*,ispasp.engine.*,ispasp.compensate.*,ispasp.surgery.*,ispasp.report.*,ispasp.integrations.*]
follow_imports = skip
"""
SCRIPT = """
from typing import Any
import ispasp
model: Any
batches: list[Any]
options: dict[str, Any]
def by_weight(statistics: ispasp.select.Statistics) -> Any: ...
ispasp.prune(model, batches)
ispasp.prune(model, batches, 0.5, method="l1", compensate="local", order="oneshot", kinds="head", progress=False)
ispasp.prune(model, batches, 64, method=by_weight, compensate=None, kinds=("head",), skip=["layer1.*"])
ispasp.prune(model, batches, kinds=["head", "filter"], skip=model.fc)
ispasp.prune_(model, batches, {"fc": [0, 1], "head.*": 0.5, "*": 3}, optimizer=model, evaluate=lambda model: 1.0)
ispasp.prune(model, batches, keep=ispasp.Macs(0.5), **options)
ispasp.prune(model, batches, keep=ispasp.recipes["resnet34-2.69G"], method=ispasp.select.L1())
ispasp.prune(model, batches, keep=ispasp.survey(model, batches[0]).plan(0.5))
"""
WRONG = {
    'methd="l1"': "methd",
    'compensate="dens"': "compensate",
    "order=3": "order",
    'keep="half"': "keep",
    'kinds="heads"': "kinds",
    "optimizer=model": "optimizer",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of a right script that is followed by one wrong call a line."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    (folder / "mypy.ini").write_text(CONFIG.format(src=SRC))
    calls = [f"ispasp.prune(model, batches, {option})\n" for option in WRONG]
    (folder / "script.py").write_text(SCRIPT + "".join(calls))
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--hide-error-context", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


@pytest.mark.parametrize("option", WRONG)
def test_mypy_sees_a_wrong_option(option: str, found: list[str]) -> None:
    line = SCRIPT.count("\n") + 1 + [*WRONG].index(option)
    (error,) = [text for text in found if text.startswith(f"script.py:{line}:")]
    assert f'"{WRONG[option]}"' in error


def test_mypy_has_nothing_against_right_options(found: list[str]) -> None:
    lines = [int(text.split(":")[1]) for text in found]
    assert min(lines) > SCRIPT.count("\n")
