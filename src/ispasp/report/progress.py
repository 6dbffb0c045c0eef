"""A progress bar for long work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")


def track(items: Iterable[Item], what: str, total: int | None = None, *, show: bool = True) -> Iterator[Item]:
    """Yield the items behind a bar on standard error; silent where that is not a terminal.

    >>> list(track([1, 2, 3], "counting"))
    [1, 2, 3]
    """
    if not show or not sys.stderr.isatty():
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(items, total=total, description=what)
