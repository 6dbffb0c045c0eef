"""Tables as text: rows, columns and how to write a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ispasp.errors import visible

_WIDTH = 240  # tables take what their cells need: module paths are long, and a cut one is of no use


@dataclass(frozen=True)
class Column:
    """One column: the key in a row, its title, and how its values are written.

    >>> Column("ratio", "times faster", "{:.0f}x".format).write(114.2)
    '114x'
    """

    key: str
    title: str
    write: Callable[[Any], str] = str


def render(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], note: str = "") -> str:
    """A table as text; numbers are right-aligned, missing values are a dash.

    >>> print(render("Sizes", [Column("name", "layer"), Column("units", "units")], [{"name": "fc1", "units": 64}]))
         Sizes
    ┏━━━━━━━┳━━━━━━━┓
    ┃ layer ┃ units ┃
    ┡━━━━━━━╇━━━━━━━┩
    │ fc1   │    64 │
    └───────┴───────┘
    """
    table = Table(title=visible(title), caption=visible(note) or None, caption_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column.key), (int, float, type(None))) for row in rows)
        table.add_column(column.title, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        cells = (row.get(column.key) for column in columns)
        table.add_row(*("-" if v is None else _cell(c.write(v)) for c, v in zip(columns, cells, strict=True)))
    # Names and notes are the user's: what looks like markup in them is text, and what a terminal would obey is escaped.
    console = Console(width=_WIDTH, force_terminal=False, color_system=None, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def _cell(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")
