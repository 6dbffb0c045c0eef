"""Time and memory as the benchmarks take them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ispasp.errors import InputError, MissingExtraError
from ispasp.report import track

T = TypeVar("T")
MB = 2**20


@dataclass(frozen=True)
class Timing:
    """Seconds of every run of one job, and what its last run gave.

    >>> Timing((3.0, 1.0, 2.0), "a result").median
    2.0
    """

    runs: tuple[float, ...]
    value: Any

    @property
    def median(self) -> float:
        """The middle one of the runs."""
        return statistics.median(self.runs)


def timed(job: Callable[[], T]) -> tuple[float, T]:
    """Seconds that a call took, and what it gave.

    >>> seconds, value = timed(lambda: 1 + 1)
    >>> seconds >= 0, value
    (True, 2)
    """
    started = time.perf_counter()
    value = job()
    return time.perf_counter() - started, value


def interleaved(
    jobs: Mapping[str, Callable[[], Any]], repeats: int, what: str = "timing", *, progress: bool = False
) -> dict[str, Timing]:
    """Run all jobs in turn, `repeats` rounds of them, so that a busy machine slows all of them alike.

    >>> order = []
    >>> found = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    >>> order, len(found["a"].runs)
    (['a', 'b', 'a', 'b'], 2)
    """
    if repeats < 1:
        raise InputError(f"repeats={repeats}: pass 1 or more")
    runs: dict[str, list[float]] = {name: [] for name in jobs}
    values: dict[str, Any] = {}
    for name in track([name for _ in range(repeats) for name in jobs], what, show=progress):
        values.pop(name, None)  # two results of one job need not fit in memory
        seconds, values[name] = timed(jobs[name])
        runs[name].append(seconds)
    return {name: Timing(tuple(runs[name]), values[name]) for name in jobs}


def this_process() -> Any:
    """This process as psutil sees it."""
    try:
        import psutil  # type: ignore[import-untyped]  # comes with accelerate
    except ImportError as error:
        raise MissingExtraError("measuring memory needs psutil: pip install 'ispasp[train]'") from error
    return psutil.Process()


def memory() -> tuple[int, int]:
    """Resident bytes of this process: now, and at their peak.

    >>> now, peak = memory()
    >>> 0 < now <= peak
    True
    """
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux a new process inherits the peak of the one that started it.
        rows = dict(line.split(":", 1) for line in status.read_text().splitlines() if line.startswith("Vm"))
        now, peak = (int(rows[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return now, max(now, peak)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    now = this_process().memory_info().rss
    return now, max(now, peak)
