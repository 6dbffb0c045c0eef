"""Progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")
_EVERY = 10.0  # seconds between lines
_LOG = logging.getLogger("ispasp.progress")


def track(items: Iterable[Item], what: str, total: int | None = None, *, show: bool = True) -> Iterator[Item]:
    """Yield the items and show a bar on standard error; if that is no terminal, write a line every ten seconds.

    Lines go to the logger `ispasp.progress` instead if an application listens to it.

    >>> list(track([1, 2, 3], "counting"))
    [1, 2, 3]
    """
    if not show:
        yield from items
    elif not sys.stderr.isatty():
        yield from _lines(items, what, total)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield from progress.track(items, total=total, description=what)


def _lines(items: Iterable[Item], what: str, total: int | None) -> Iterator[Item]:
    start = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - last >= _EVERY:
            last = now
            line = f"{what}: {done}{f' of {total}' if total else ''}, {now - start:.0f} s"
            if _LOG.hasHandlers() and _LOG.isEnabledFor(logging.INFO):
                _LOG.info(line)
            else:
                print(f"ispasp: {line}", file=sys.stderr, flush=True)
        yield item
