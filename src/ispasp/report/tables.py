"""Tables as text: rows, columns and how to write a value."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ispasp.errors import visible
from ispasp.report.names import shortened

_WIDEST = 1000
_NAME = 30  # names are shortened to this before a column is dropped, and to less only after all that may be
_SHORTEST = 12


@dataclass(frozen=True)
class Column:
    """One column: the key in a row, its title, and how its values are written.

    Where a table is wider than the terminal, columns with the largest `drop` go first (0: never), and the texts of a
    `shorten` column are cut in the middle. `right` aligns it whatever its values are.

    >>> Column("ratio", "times faster", "{:.0f}x".format).write(114.2)
    '114x'
    """

    key: str
    title: str
    write: Callable[[Any], str] = str
    drop: int = 0
    shorten: bool = False
    right: bool = False


def render(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    note: str = "",
    *,
    width: int | None = None,
) -> str:
    """A table as text that fits the terminal (80 columns where there is none), as far as its columns allow it.

    Numbers are right-aligned, missing values are a dash.

    >>> print(render("Sizes", [Column("name", "layer"), Column("units", "units")], [{"name": "fc1", "units": 64}]))
         Sizes
    ┏━━━━━━━┳━━━━━━━┓
    ┃ layer ┃ units ┃
    ┡━━━━━━━╇━━━━━━━┩
    │ fc1   │    64 │
    └───────┴───────┘
    """
    texts = {column: [cell(column, row) for row in rows] for column in columns}
    gone = _fit(texts, terminal_width() if width is None else width)
    said = [note] if note else []
    said += [f"no room for: {', '.join(column.title for column in gone)}"] if gone else []
    table = Table(title=visible(title) or None, caption=visible("\n".join(said)) or None, caption_justify="left")
    for column in texts:
        table.add_column(column.title, justify="right" if is_number(column, rows) else "left", no_wrap=True)
    for cells in zip(*texts.values(), strict=True):
        table.add_row(*cells)
    # Names and notes are the user's: what looks like markup in them is text, and what a terminal would obey is escaped.
    console = Console(width=_WIDEST, force_terminal=False, color_system=None, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())


def change(before: int, after: int) -> str:
    """A count before and after, with the fraction that is left.

    >>> change(2000, 500)
    '2,000 -> 500 (25.0%)'
    """
    return f"{before:,} -> {after:,} ({after / max(before, 1):.1%})"


def terminal_width() -> int:
    """Columns of the terminal; 80 where the output goes elsewhere."""
    return shutil.get_terminal_size((80, 24)).columns


def is_number(column: Column, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a column is aligned to the right."""
    return column.right or all(isinstance(row.get(column.key), (int, float, type(None))) for row in rows)


def cell(column: Column, row: Mapping[str, Any]) -> str:
    """What stands in one cell: one line that prints, a dash for a missing value."""
    value = row.get(column.key)
    return "-" if value is None else visible(column.write(value)).replace("\n", "\\n").replace("\t", "\\t")


def _fit(texts: dict[Column, list[str]], width: int) -> list[Column]:
    """Shorten names and take out columns until the table fits; returns what was taken out."""
    gone: list[Column] = []
    droppable = sorted((c for c in texts if c.drop), key=lambda column: -column.drop)
    for least in (_NAME, _SHORTEST):
        while True:
            _shorten(texts, width, least)
            if _width(texts) <= width or least != _NAME or not droppable:
                break
            gone.append(droppable.pop(0))
            del texts[gone[-1]]
    return gone


def _shorten(texts: dict[Column, list[str]], width: int, least: int) -> None:
    for column in [c for c in texts if c.shorten]:
        longest = max(map(cell_len, texts[column]), default=0)
        room = max(longest - (_width(texts) - width), least, len(column.title))
        if room < longest and all(map(str.isascii, texts[column])):
            texts[column] = shortened(texts[column], room)


def _width(texts: Mapping[Column, Sequence[str]]) -> int:
    return 1 + sum(3 + max(map(cell_len, [c.title, *cells])) for c, cells in texts.items())
