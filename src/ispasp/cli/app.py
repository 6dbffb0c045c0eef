"""The root of the command line: sub-commands, version, and errors in one line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import ispasp
from ispasp.cli.bench import bench
from ispasp.cli.demo import demo
from ispasp.cli.reproduce import reproduce
from ispasp.errors import IspaspError

app = typer.Typer(name="ispasp", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(reproduce, name="reproduce")
app.add_typer(bench, name="bench")
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ispasp {ispasp.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Make trained PyTorch networks smaller by removing whole neurons, filters and attention heads."""


def main() -> None:
    """Entry point: a known error is one line on standard error and exit code 2."""
    try:
        app()
    except IspaspError as error:
        typer.echo(f"ispasp: {error}", err=True)
        sys.exit(2)
