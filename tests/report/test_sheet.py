"""Sheets: a title, facts, a table and remarks, as text and as HTML."""

from __future__ import annotations

from html.parser import HTMLParser
from io import BytesIO
from typing import Any

import pytest

from ispasp.report import Column, Sheet, figures, told

NASTY = "<script>alert(1)</script>\x1b[2J"
ROWS = [{"name": f"model.layers.{i}.feed_forward_network.gate_projection", "error": 0.1234} for i in range(3)]
COLUMNS = [Column("name", "hidden dimension", shorten=True), Column("error", "error", "{:.1%}".format)]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_text_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    sheet = Sheet("Net " * 40, [("facts", "word " * 60)], COLUMNS, ROWS, [("frozen", ["layer.0: " + "why " * 50])])
    lines = str(sheet).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("word" in line for line in lines) > 1
    assert {line.index("word") for line in lines if "word" in line} == {9}  # one under the other


def test_nothing_a_terminal_or_a_browser_obeys_gets_through() -> None:
    rows = [{"name": NASTY, "error": None}]
    sheet = Sheet(NASTY, [(NASTY, NASTY)], COLUMNS, rows, [(NASTY, [NASTY])])
    assert "\x1b" not in str(sheet)
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append(tag)

    text = sheet.html()
    Reader().feed(text)
    assert "\x1b" not in text
    assert "script" not in found
    assert "table" in found
    assert text.count("&lt;script&gt;") == 6


def test_long_tables_are_cut_in_notebooks_only() -> None:
    sheet = Sheet("Net", [], COLUMNS, [{"name": f"fc{i}", "error": 0.5} for i in range(300)])
    assert "fc299" in str(sheet)
    assert "fc299" not in sheet.html()
    assert "... 100 more" in sheet.html()


def test_alike_rows_are_told_together_and_only_what_is_common() -> None:
    rows = [(f"layers.{i}.o", f"layers.{i}.o reads {i % 2} of 8") for i in (0, 1, 2, 7)]
    assert told(rows) == ["layers.{0..2,7}.o (4 alike): layers.*.o reads * of 8"]
    assert told([("a", "x 1"), ("b", "x 1")]) == ["a: x 1", "b: x 1"]


def test_figures_draw_names_as_they_are() -> None:
    row: dict[str, Any] = {"name": "a$b$", "units": 8, "kept": 4, "relative_error": 0.2, "held_out_error": 0.3}
    figure = figures.layers([row, {**row, "relative_error": None, "held_out_error": None}], "Net")
    top, bottom = figure.axes
    assert [label.get_text() for label in bottom.get_xticklabels()] == [r"a\$b\$"] * 2
    assert bottom.get_ylim() == (0, 100)
    assert [bar.get_height() for bar in top.patches] == [8, 8, 4, 4]
    assert [list(line.get_ydata()) for line in bottom.lines] == [[20.0], [30.0]]
    figure.savefig(BytesIO(), format="png")
