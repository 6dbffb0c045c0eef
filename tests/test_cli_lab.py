"""Commands of the lab: there in a checkout, and one line on how to get them elsewhere."""

from __future__ import annotations

import pytest
import typer

from ispasp.cli.app import add_lab
from support.cli import command, refusal


def test_in_a_checkout_the_commands_are_listed() -> None:
    done = command("--help")
    assert done.code == 0
    names = ("survey", "prune", "evaluate", "finetune", "export", "demo", "reproduce", "bench")
    assert all(name in done.out for name in names)


CALLS = [("bench",), ("bench", "surgery", "--json"), ("demo", "--help"), ("reproduce", "cnn", "--out", "x")]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_without_the_lab_a_command_says_how_to_get_it(call: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    monkeypatch.setattr("ispasp.cli.app.find_spec", {}.get)
    monkeypatch.setattr("ispasp.cli.app.app", app)
    add_lab(app)
    line = refusal(*call)
    assert line.startswith(f"ispasp {call[0]} belongs to the lab")
    assert "pip install -e ." in line
    assert call[0] not in command("--help").out
