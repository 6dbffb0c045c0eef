"""Signs of life: where there is no terminal, long work writes a line on standard error every ten seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

LOG = logging.getLogger("ispasp.cli")  # a DEBUG record is a stage of the work
_PROGRESS = logging.getLogger("ispasp.progress")
_EVERY = 10.0  # seconds


class Lines(logging.Handler):
    """Writes INFO records as lines, and remembers the stage that the work has come to."""

    def __init__(self, stream: TextIO, every: float) -> None:
        """Nothing has begun."""
        super().__init__()
        self._stream, self._every = stream, every
        self._start = self._last = time.monotonic()
        self._what = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or begin a stage."""
        if record.levelno < logging.INFO:
            self._what, self._start = record.getMessage(), time.monotonic()
            return
        self._last = time.monotonic()
        print(f"ispasp: {record.getMessage()}", file=self._stream, flush=True)

    def beat(self) -> None:
        """Log the stage, unless a line was written a moment ago."""
        now = time.monotonic()
        if self._what and now - self._last >= self._every:
            LOG.info("%s, %.0f s", self._what, now - self._start)


@contextmanager
def signs_of_life(every: float = _EVERY) -> Iterator[None]:
    """Write what `ispasp.progress` and `ispasp.cli` log, and now and then the stage; on a terminal bars do that."""
    if sys.stderr.isatty():
        yield
        return
    lines, done = Lines(sys.stderr, every), threading.Event()
    loggers = {LOG: LOG.level, _PROGRESS: _PROGRESS.level}

    def live() -> None:
        while not done.wait(every / 4):
            lines.beat()

    thread = threading.Thread(target=live, daemon=True)
    for logger in loggers:
        logger.addHandler(lines)
        logger.setLevel(logging.DEBUG)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for logger, level in loggers.items():
            logger.removeHandler(lines)
            logger.setLevel(level)
