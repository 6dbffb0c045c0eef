"""A case in a process of its own, with a time limit: crashes and hangs are results like any other."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from soak.case import FAILED, Case, Category, attempt

_TAIL = 4000  # characters kept of what a failing case printed


def isolated(category: str, run: Category, seed: int, seconds: float) -> dict[str, Any]:
    """Fork, run the case, and return its record; what does not end in time is killed with all it has started."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _work(category, run, seed, folder)
    try:
        ended = _wait(child, folder, seconds)
    finally:
        _kill_all(child)
        printed = _read(folder / "printed")
        shutil.rmtree(folder, ignore_errors=True)
    if ended["outcome"] == FAILED:
        ended["printed"] = printed[-_TAIL:]
    return {"category": category, "seed": seed, **ended, "seconds": round(time.monotonic() - began, 2)}


def _work(category: str, run: Category, seed: int, folder: Path) -> NoReturn:
    os.setsid()  # a group of its own, to be killed as a whole
    try:
        out = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2)
        work = folder / "work"
        work.mkdir()
        record = attempt(run, Case(category, seed, work))
        fresh = folder / "record.new"
        fresh.write_text(json.dumps(record))
        fresh.replace(folder / "record")
    finally:
        os._exit(0)  # no teardown: threads of gloo sometimes abort in it


def _wait(child: int, folder: Path, seconds: float) -> dict[str, Any]:
    status = _exit_status(child, time.monotonic() + seconds)
    if status is None:
        os.kill(child, signal.SIGUSR1)  # where it hangs
        time.sleep(0.5)
        return {"outcome": FAILED, "error": "Hang", "message": f"not done after {seconds:.0f} s"}
    if (folder / "record").exists():
        return dict(json.loads((folder / "record").read_text()))
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return {"outcome": FAILED, "error": "Crash", "message": f"the process ended with {how} and no record"}


def _exit_status(child: int, end: float) -> int | None:
    pause = 0.002
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return None


def _kill_all(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError, PermissionError):
        pass


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
