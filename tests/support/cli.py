"""The command line, called in this process."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from ispasp.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


def command(*arguments: object) -> Done:
    """Exit code, standard output and standard error of `ispasp ARGUMENTS`."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["ispasp", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
    return Done(code, out.getvalue(), without_signs_of_life(err.getvalue()))


def without_signs_of_life(text: str) -> str:
    """Standard error without the lines that come every ten seconds, on a slow machine."""
    return re.sub(r"^ispasp: .*, \d+ s\n", "", text, flags=re.MULTILINE)


def refusal(*arguments: object) -> str:
    """The one line that a wrong call gives, with exit code 2 and nothing on standard output."""
    done = command(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
    return done.err.removeprefix("ispasp: ").strip()
