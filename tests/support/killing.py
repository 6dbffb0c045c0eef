"""A process that is killed at its k-th step on disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "fcntl.flock"}


def killed(work: Callable[[], object], folder: Path, step: int) -> bool:
    """Run `work` in a fork that dies by SIGKILL before its step-th call that touches `folder`; whether it died.

    Calls are told by Python's audit events, and by fsync, which does nothing here: a killed process loses no writes.
    """
    child = os.fork()
    if child == 0:  # no cleanup of the parent's may run here
        try:
            _die_at(step, str(folder))
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed"
    return False


def _die_at(step: int, folder: str) -> None:
    left = step

    def count(*_: object) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and (event == "fcntl.flock" or any(folder in str(arg) for arg in args)):
            count()

    os.fsync = count  # type: ignore[assignment]
    sys.addaudithook(audit)
