"""The command `ispasp`: its sub-commands, errors in one line, and signs of life on standard error."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer

import ispasp
from ispasp.cli.commands import compare, export, finetune, survey
from ispasp.cli.evaluate import evaluate
from ispasp.cli.options import LOG
from ispasp.cli.prune import prune
from ispasp.errors import IspaspError, MissingExtraError, visible

_LOGS = (LOG, logging.getLogger("ispasp.progress"))
_DEBUG = "ISPASP_DEBUG"
_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

app = typer.Typer(name="ispasp", no_args_is_help=True, pretty_exceptions_enable=False)


def add_lab(app: typer.Typer) -> None:
    """Add the commands of `ispasp_lab`, or hidden stand-ins that say how to get it."""
    if find_spec("ispasp_lab") is not None:
        import_module("ispasp_lab.commands").register(app)
        return
    for name in ("demo", "reproduce", "bench"):
        app.command(name, hidden=True, context_settings=_ANYTHING)(_refuse)


def _refuse(context: typer.Context) -> None:
    told = f"ispasp {context.info_name} belongs to the lab, which is not in the wheel"
    raise MissingExtraError(f"{told}: run `pip install -e .` in a checkout of the repository")


for command in (survey, prune, evaluate, compare, finetune, export):
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
    """Run the command; an error is one line on standard error and exit code 2, or a traceback with ISPASP_DEBUG=1."""
    try:
        with signs_of_life():
            code = app(prog_name="ispasp", standalone_mode=False)  # standalone, typer draws boxes around usage errors
    except typer.Abort:
        code = 130  # the shell's code for Ctrl-C
    except Exception as error:
        text = one_line(error)
        if os.environ.get(_DEBUG) and not hasattr(error, "format_message"):
            raise
        if text:
            typer.echo(f"ispasp: {text}", err=True)
        code = 2
    sys.exit(code or 0)


def one_line(error: Any) -> str:
    """One line of printable characters with the remedy; empty after the help page."""
    usage = hasattr(error, "format_message")  # typer's own error; its class differs between versions of typer
    text = " ".join((error.format_message() if usage else str(error)).split())
    if isinstance(error, IspaspError):
        return text
    if type(error).__name__ == "NoArgsIsHelpError":  # the help page is on the screen
        return ""
    if usage:
        context = getattr(error, "ctx", None)
        text = f"{text.rstrip('.')}: see `{context.command_path if context else 'ispasp'} --help`"
    elif isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
        text = "memory ran out: pass a smaller --batch-size or fewer --examples; `ispasp prune` also takes --memory 2G"
    elif isinstance(error, OSError) and error.filename and error.strerror:
        remedy = "check that this path is right and writable, and that the disk is not full"
        text = f"{error.filename}: {error.strerror}: {remedy}"
    else:
        text = f"{type(error).__name__}: {text}: this is unexpected; {_DEBUG}=1 shows where it happened"
    return visible(text)


class _Lines(logging.Handler):
    """Writes INFO records as lines; a DEBUG record names the current stage."""

    stage, since, last = "", 0.0, 0.0  # seconds

    def emit(self, record: logging.LogRecord) -> None:
        self.last = time.monotonic()
        if record.levelno < logging.INFO:
            self.stage, self.since = record.getMessage(), self.last
        else:
            print(f"ispasp: {record.getMessage()}", file=sys.stderr, flush=True)

    def beat(self, every: float, done: threading.Event) -> None:
        """Until done, log the stage whenever nothing was logged for `every` seconds."""
        while not done.wait(every / 4):
            if self.stage and time.monotonic() - self.last >= every:
                LOG.info("%s, %.0f s", self.stage, time.monotonic() - self.since)


@contextmanager
def signs_of_life(every: float = 10.0) -> Iterator[None]:
    """Unless standard error is a terminal, write progress to it, and the stage every `every` seconds."""
    if sys.stderr.isatty():
        yield
        return
    lines, done, levels = _Lines(), threading.Event(), [logger.level for logger in _LOGS]
    thread = threading.Thread(target=lines.beat, args=(every, done), daemon=True)
    for logger in _LOGS:
        logger.addHandler(lines)
        logger.setLevel(logging.DEBUG)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for logger, level in zip(_LOGS, levels, strict=True):
            logger.removeHandler(lines)
            logger.setLevel(level)
