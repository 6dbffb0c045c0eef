"""Results as text: tables that fit the terminal, and sheets of facts, a table and remarks."""

from __future__ import annotations

import re
import shutil
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import prod
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ispasp.errors import visible

Remarks = tuple[str, Sequence[str]]  # a heading and lines
_WIDEST = 1000
_NAME = 30  # names are shortened to this before a column is dropped, and to less only after that
_SHORTEST = 12
_DOTS = "..."
_NUMBER = re.compile("([0-9]+)")
_NOTEBOOK_ROWS = 200


@dataclass(frozen=True)
class Column:
    """One column: the key in a row, its title, and how to write its values.

    If a table is wider than the terminal, columns with the largest `drop` go first (0: never), and the texts of a
    `shorten` column are cut. Numbers are right-aligned; `right` aligns any column.
    """

    key: str
    title: str
    write: Callable[[Any], str] = str
    drop: int = 0
    shorten: bool = False
    right: bool = False

    def cell(self, row: Mapping[str, Any]) -> str:
        """The value in a row as one printable line; a dash if it is missing."""
        value = row.get(self.key)
        return "-" if value is None else visible(self.write(value)).replace("\n", "\\n").replace("\t", "\\t")

    def side(self, rows: Iterable[Mapping[str, Any]]) -> Any:
        """The alignment, "right" or "left"."""
        numbers = all(isinstance(row.get(self.key), (int, float, type(None))) for row in rows)
        return "right" if self.right or numbers else "left"


def render(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], note: str = "") -> str:
    """A table as text that fits the terminal (80 columns if there is none), as far as its columns allow.

    >>> print(render("Sizes", [Column("name", "layer"), Column("units", "units")], [{"name": "fc1", "units": 64}]))
         Sizes
    ┏━━━━━━━┳━━━━━━━┓
    ┃ layer ┃ units ┃
    ┡━━━━━━━╇━━━━━━━┩
    │ fc1   │    64 │
    └───────┴───────┘
    """
    texts = {column: [column.cell(row) for row in rows] for column in columns}
    dropped = _fit(texts, shutil.get_terminal_size().columns)
    caption = [note] if note else []
    caption += [f"no room for: {', '.join(column.title for column in dropped)}"] if dropped else []
    table = Table(title=visible(title) or None, caption=visible("\n".join(caption)) or None, caption_justify="left")
    for column in texts:
        table.add_column(column.title, justify=column.side(rows), no_wrap=True)
    for cells in zip(*texts.values(), strict=True):
        table.add_row(*cells)
    # Names and notes come from users: nothing in them is markup.
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


def _fit(texts: dict[Column, list[str]], width: int) -> list[Column]:
    """Drop columns and shorten names until the table fits. Returns the dropped columns."""
    dropped: list[Column] = []
    for column in sorted((c for c in texts if c.drop), key=lambda c: -c.drop):
        if _width(texts, _NAME) <= width:
            break
        dropped.append(column)
        del texts[column]
    for column, cells in texts.items():
        if column.shorten and all(map(str.isascii, cells)):
            room = max(map(len, [*cells, column.title])) - max(_width(texts) - width, 0)
            texts[column] = shortened(cells, max(room, _SHORTEST, len(column.title)))
    return dropped


def _width(texts: Mapping[Column, Sequence[str]], name: int = _WIDEST) -> int:
    """The width of a table with names shortened to at most `name` letters."""
    longest = {c: max(map(cell_len, [c.title, *cells])) for c, cells in texts.items()}
    return 1 + sum(3 + (min(size, max(name, len(c.title))) if c.shorten else size) for c, size in longest.items())


@dataclass(frozen=True)
class Sheet:
    """A printed object: a title, `facts` as (label, text), a table, and remarks. What is empty is left out.

    >>> print(Sheet("Net", [("parameters", "58")], [Column("name", "layer")], [{"name": "fc"}], [("frozen", ["x"])]))
    Net
      parameters  58
    ┏━━━━━━━┓
    ┃ layer ┃
    ┡━━━━━━━┩
    │ fc    │
    └───────┘
    frozen:
      x
    """

    title: str
    facts: Sequence[tuple[str, str]]
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    remarks: Sequence[Remarks] = ()

    def __str__(self) -> str:
        margin = max((len(label) for label, _ in self.facts), default=0) + 2
        lines = _wrapped("", self.title)
        for label, text in self.facts:
            lines += _wrapped(f"  {label:<{margin}}", text)
        lines += [render("", self.columns, self.rows)] if self.rows else []
        for heading, remarks in self._told():
            lines += [f"{heading}:", *(line for text in remarks for line in _wrapped("  ", text))]
        return visible("\n".join(lines))

    def _told(self) -> list[Remarks]:
        return [(heading, lines) for heading, lines in self.remarks if lines]

    def html(self) -> str:
        """An HTML fragment for notebooks: escaped, without scripts or links."""
        parts = [f"<b>{escape(self.title)}</b>"]
        parts += [_html_table([[_cell("left", text) for text in fact] for fact in self.facts])] if self.facts else []
        if self.rows:
            columns = [(column, column.side(self.rows)) for column in self.columns]
            rows = [[_cell(side, c.title, "th") for c, side in columns]]
            rows += [[_cell(side, c.cell(row)) for c, side in columns] for row in self.rows[:_NOTEBOOK_ROWS]]
            more = len(self.rows) - _NOTEBOOK_ROWS
            parts.append(_html_table([*rows, [_cell("left", f"... {more:,} more")]] if more > 0 else rows))
        for heading, remarks in self._told():
            lines = "".join(f"<li>{escape(text)}</li>" for text in remarks)
            parts.append(f"<details><summary>{escape(heading)}</summary><ul>{lines}</ul></details>")
        return visible(f"<div>{''.join(parts)}</div>")


class Printed(ABC):
    """An object that prints itself as a sheet: text in a terminal, a table in a notebook."""

    @abstractmethod
    def _sheet(self) -> Sheet: ...

    def __str__(self) -> str:
        return str(self._sheet())

    def _repr_html_(self) -> str:
        return self._sheet().html()


def _html_table(rows: Iterable[Iterable[str]]) -> str:
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table>{lines}</table>"


def _cell(side: str, text: str, tag: str = "td") -> str:
    return f'<{tag} style="padding:1px 10px;white-space:nowrap;text-align:{side}">{escape(text)}</{tag}>'


def _wrapped(label: str, text: str) -> list[str]:
    """Lines as wide as the terminal, indented under the text. Names are not broken."""
    indent = " " * (len(label) if label.strip() else len(label) + 2)
    wrapper = textwrap.TextWrapper(max(shutil.get_terminal_size().columns, 40), label, indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text) or [label.rstrip()]


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Names of at most `width` letters, without their middle or front. Different names stay different, or none is cut.

    >>> shortened(["encoder.layer.11.attention.output", "encoder.layer.9.mlp"], 20)
    ['encode...tion.output', 'encoder.layer.9.mlp']
    """
    for front in ((width - len(_DOTS)) * 2 // 5, 0):  # the end of a path tells more than its beginning
        back = width - len(_DOTS) - front
        found = [name if len(name) <= width else name[:front] + _DOTS + name[-back:] for name in names]
        if len(set(found)) == len(set(names)):
            return found
    return list(names)


def told(rows: Iterable[tuple[str, str]], details: Mapping[str, str] | None = None) -> list[str]:
    """Lines "name: text", one for all rows that differ only in numbers. A name that stands alone gets its detail.

    >>> told([("a.0", "why"), ("a.1", "why"), ("b", "else")], {"a.0": "node 1", "b": "node 2"})
    ['a.{0..1} (2 alike): why', 'b: else (node 2)']
    """
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, text in rows:
        groups.setdefault((_NUMBER.sub("#", name), _NUMBER.sub("#", text)), []).append((name, text))
    lines = []
    for group in groups.values():
        parts = zip(*(_NUMBER.split(text) for _, text in group), strict=True)
        text = "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)  # numbers that differ are stars
        for name, count in _patterns(list(dict.fromkeys(name for name, _ in group))):
            detail = (details or {}).get(name) if count == 1 else None
            lines.append(f"{name}{f' ({count} alike)' if count > 1 else ''}: {text}{f' ({detail})' if detail else ''}")
    return lines


def _patterns(names: Sequence[str]) -> list[tuple[str, int]]:
    """Names that differ only in numbers, as patterns that stand for exactly these, each with its count."""
    if len(names) == 1:
        return [(names[0], 1)]
    parts = [_NUMBER.split(name) for name in names]
    numbers = [sorted({part[k] for part in parts}, key=_size) for k in range(1, len(parts[0]), 2)]
    if prod(map(len, numbers)) == len(names):
        words = parts[0][2::2]
        return [(parts[0][0] + "".join(_span(n) + word for n, word in zip(numbers, words, strict=True)), len(names))]
    first = 2 * next(k for k, values in enumerate(numbers) if len(values) > 1) + 1
    rows = sorted(zip((part[first] for part in parts), names, strict=True), key=lambda row: _size(row[0]))
    return [found for _, group in groupby(rows, lambda row: row[0]) for found in _patterns([name for _, name in group])]


def _size(number: str) -> tuple[int, str]:
    return len(number), number  # numbers in names may have thousands of digits, or begin with zeros


def _span(values: Sequence[str]) -> str:
    """Ascending numbers in braces, neighbours together: {0..2,5,8..9}."""
    if len(values) == 1:
        return values[0]
    runs = [[value] for value in values]
    if len(values[-1]) <= 9 and all(value == str(int(value)) for value in values):
        pairs = groupby(enumerate(map(int, values)), lambda pair: pair[1] - pair[0])  # the same in a run of neighbours
        runs = [[str(value) for _, value in group] for _, group in pairs]
    return f"{{{','.join('..'.join(dict.fromkeys((run[0], run[-1]))) for run in runs)}}}"
