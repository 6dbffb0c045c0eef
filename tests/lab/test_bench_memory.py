"""The memory benchmark: processes of their own, and numbers that follow from what they measured."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import Future

import pytest
import torch

from ispasp.errors import InputError
from ispasp_lab.benchmarks import memory, timing

requires_vision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="the benchmark runs torchvision's ResNet18: pip install 'ispasp[vision]'",
)


# Run by a fresh process: one that has pruned networks before may give the ballast memory that it already holds.
BALLAST = """
import torch
from ispasp_lab.benchmarks import timing
_, before = timing.memory()
ballast = torch.ones(512 * timing.MB // 4)
during, _ = timing.memory()
del ballast
now, peak = timing.memory()
print(*(value // timing.MB for value in (before, during, now, peak)))
"""


@pytest.mark.long
def test_the_peak_stays_when_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", BALLAST], capture_output=True, text=True, check=True)  # noqa: S603
    before, during, now, peak = map(int, done.stdout.split())
    assert peak > before + 256
    assert during > now + 256
    assert peak > now + 256


@pytest.mark.long
@requires_vision
def test_a_run_is_measured_in_a_process_of_its_own() -> None:
    ballast = torch.ones(1500 * timing.MB // 4)  # a peak of this process must not count as the child's
    (row,) = memory.run((2,), batch=2, size=32, compensations=(None,), progress=False)
    assert (row.compensate, row.batches, row.ratio, row.extra_ratio) == (None, 2, 1.0, 1.0)
    assert 0 < row.extra_mb < row.peak_mb < 1500
    del ballast


def test_ratios_refer_to_the_fewest_batches_of_the_same_compensation(monkeypatch: pytest.MonkeyPatch) -> None:
    megabytes = {(None, 4): (100.0, 10.0), (None, 64): (103.0, 12.0), ("local", 4): (200.0, 20.0)}
    megabytes["local", 64] = (300.0, 110.0)

    class Pool:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, _: object, compensate: str | None, batches: memory.Generated) -> Future[tuple[float, float]]:
            future: Future[tuple[float, float]] = Future()
            future.set_result(megabytes[compensate, batches.count])
            return future

    monkeypatch.setattr(memory, "ProcessPoolExecutor", Pool)
    rows = memory.run((64, 4), progress=False)
    assert [(row.compensate, row.batches, row.ratio, row.extra_ratio) for row in rows] == [
        (None, 4, 1.0, 1.0),
        (None, 64, pytest.approx(1.03), pytest.approx(1.2)),
        ("local", 4, 1.0, 1.0),
        ("local", 64, pytest.approx(1.5), pytest.approx(5.5)),
    ]
    table = memory.as_table(rows)
    assert "+3.0 %" in table
    assert "+50.0 %" in table
    assert memory.as_json(rows)[0]["compensate"] is None


def test_batches_are_the_same_every_time() -> None:
    data = memory.Generated(2, 3, 4)
    assert all(torch.equal(a, b) for a, b in zip(data, data, strict=True))
    first, second = data
    assert not torch.equal(first, second)
    with pytest.raises(InputError, match="no numbers of batches"):
        memory.run(())
