"""A title, facts, a table and remarks: one description that is written as text or as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ispasp.errors import visible
from ispasp.report.tables import Column, cell, is_number, render, terminal_width

Remarks = tuple[str, Sequence[str]]  # a heading and lines
_SHOWN = 200  # rows of a notebook's table
_CELL = "padding:1px 10px;white-space:nowrap;text-align:"


@dataclass(frozen=True)
class Sheet:
    """What an object tells of itself. `facts` are (label, text) in front of the table, `remarks` follow it.

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
        """Text that fits the terminal; 80 columns where there is none."""
        width = terminal_width()
        margin = max((len(label) for label, _ in self.facts), default=0) + 2
        lines = _wrapped("", self.title, width)
        for label, text in self.facts:
            lines += _wrapped(f"  {label:<{margin}}", text, width)
        lines += [render("", self.columns, self.rows)] if self.rows else []
        for heading, remarks in self.remarks:
            lines += [f"{heading}:", *(line for text in remarks for line in _wrapped("  ", text, width))]
        return visible("\n".join(lines))

    def html(self) -> str:
        """A fragment for notebooks: everything is escaped, nothing is run or loaded."""
        facts = "".join(f"<tr>{_cell('left', label)}{_cell('left', text)}</tr>" for label, text in self.facts)
        parts = [f"<b>{escape(self.title)}</b>", f"<table>{facts}</table>" if facts else "", self._table()]
        parts += [_details(heading, remarks) for heading, remarks in self.remarks]
        return visible(f"<div>{''.join(parts)}</div>")

    def _table(self) -> str:
        if not self.rows:
            return ""
        sides = ["right" if is_number(column, self.rows) else "left" for column in self.columns]
        head = "".join(_cell(side, c.title, "th") for side, c in zip(sides, self.columns, strict=True))
        rows = [
            "".join(_cell(side, cell(c, row)) for side, c in zip(sides, self.columns, strict=True))
            for row in self.rows[:_SHOWN]
        ]
        more = len(self.rows) - _SHOWN
        rows += [_cell("left", f"... {more:,} more")] if more > 0 else []
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{r}</tr>' for r in rows)}</tbody></table>"


def _cell(side: str, text: str, tag: str = "td") -> str:
    return f'<{tag} style="{_CELL}{side}">{escape(text)}</{tag}>'


def _details(heading: str, remarks: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(text)}</li>" for text in remarks)
    return f"<details><summary>{escape(heading)}</summary><ul>{lines}</ul></details>"


def _wrapped(label: str, text: str, width: int) -> list[str]:
    """Lines of at most so many characters, but names are not broken; what follows stands under the text."""
    indent = " " * (len(label) if label.strip() else len(label) + 2)
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=label,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [label.rstrip()]
