"""The root of the command line: sub-commands, version, and errors in one line."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import ispasp
from ispasp.cli.alive import signs_of_life
from ispasp.cli.evaluate import evaluate
from ispasp.cli.export import export
from ispasp.cli.failures import DEBUG, is_usage, one_line
from ispasp.cli.finetune import finetune
from ispasp.cli.lab import add_lab
from ispasp.cli.prune import prune
from ispasp.cli.survey import survey

app = typer.Typer(name="ispasp", no_args_is_help=True, pretty_exceptions_enable=False)
for command in (survey, prune, evaluate, finetune, export):
    app.command()(command)
add_lab(app)


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
    """Entry point: an error is one line on standard error and exit code 2; with ISPASP_DEBUG=1 a traceback."""
    try:
        with signs_of_life():
            code = app(prog_name="ispasp", standalone_mode=False)  # else typer would draw boxes around usage errors
    except typer.Abort:
        code = 130  # as shells say it of Ctrl-C
    except Exception as error:
        if os.environ.get(DEBUG) and not is_usage(error):
            raise
        text = one_line(error)
        if text:
            typer.echo(f"ispasp: {text}", err=True)
        code = 2
    sys.exit(code or 0)
