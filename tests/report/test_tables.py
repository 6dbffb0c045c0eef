"""Tables as text."""

from __future__ import annotations

from ispasp.report import Column, render


def test_what_looks_like_markup_is_text() -> None:
    text = render("sizes [a]", [Column("name", "layer [b]")], [{"name": "layers[0].fc [red]"}], "said :smile: [c]")
    for said in ("sizes [a]", "layer [b]", "layers[0].fc [red]", "said :smile: [c]"):
        assert said in text
