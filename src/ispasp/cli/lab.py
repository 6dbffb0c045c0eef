"""Commands of the lab (package `ispasp_lab`), or a line that says how to get it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import typer

from ispasp.errors import MissingExtraError

_COMMANDS = ("demo", "reproduce", "bench")
_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def add_lab(app: typer.Typer) -> None:
    """Add the lab's commands where it is installed; elsewhere stand-ins that are not listed and refuse to run."""
    if find_spec("ispasp_lab") is not None:
        import_module("ispasp_lab.commands").register(app)
        return
    for name in _COMMANDS:
        app.command(name, hidden=True, context_settings=_ANYTHING)(_refuse)


def _refuse(context: typer.Context) -> None:
    raise MissingExtraError(
        f"ispasp {context.info_name} belongs to the lab, which is not in the wheel: run `pip install -e .` in a "
        "checkout of the repository"
    )
