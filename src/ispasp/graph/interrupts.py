"""Ctrl-C that waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A block that Ctrl-C cannot cut in two: it takes effect when the block has ended.

    For work that leaves things broken if it stops half-way. Only the main thread gets signals at all.

    >>> with uninterrupted():
    ...     done = "all of it"
    >>> done
    'all of it'
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])
