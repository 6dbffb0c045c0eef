"""The errors of the library: each says what was given, what was expected and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_LONGEST = 4000  # most characters of an error


def visible(text: str) -> str:
    """Escape characters that do not print, except line ends and tabs: names from files could control a terminal.

    >>> visible("fc\\x1b[2J"), visible("größe")
    ('fc\\\\x1b[2J', 'größe')
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def _shown(text: str) -> str:
    """Escape the text, and cut the middle out if it is too long: the remedy is at the end."""
    text, half = visible(text), _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


class IspaspError(Exception):
    """Base of every error this library raises on purpose. Its text is printable and bounded, whatever it quotes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_shown(arg) if isinstance(arg, str) else arg for arg in args))


class InputError(IspaspError, ValueError):
    """An argument cannot be used: a shape, a count or a value is wrong."""


class OptionError(InputError, TypeError):
    """An option has a name that the function does not know."""


class MissingExtraError(IspaspError, ImportError):
    """An optional package is needed and not installed."""


class TraceError(IspaspError, RuntimeError):
    """A model could not be turned into a graph."""


class NothingToPruneError(IspaspError, ValueError):
    """A model has no hidden dimension that can lose units."""


class PlanError(IspaspError, ValueError):
    """A plan is malformed, or does not fit the model."""


class SurgeryError(IspaspError, RuntimeError):
    """Removing units did not equal masking them; the model is as it was before."""


class SaveError(IspaspError, OSError):
    """A folder cannot be written or read."""


class ExportError(IspaspError, RuntimeError):
    """A model could not be exported, or the exported one does not compute the same."""


class DistributedError(IspaspError, RuntimeError):
    """Another rank failed, died or did not answer in time."""


def needed(package: str, what: str, extra: str = "") -> Any:
    """Import an optional package, or raise `MissingExtraError`: "WHAT needs PACKAGE: pip install ..."."""
    try:
        return import_module(package)
    except ImportError as error:
        install = f"'ispasp[{extra}]'" if extra else package
        raise MissingExtraError(f"{what} needs {package}: pip install {install}") from error


@contextmanager
def failing_as(kind: type[IspaspError], what: str, remedy: str) -> Iterator[None]:
    """Turn an exception that is not ours into one of this kind: "WHAT (REASON): REMEDY"."""
    try:
        yield
    except IspaspError:
        raise
    except Exception as error:
        text = re.sub(r"\x1b\[[\d;]*m", "", f"{type(error).__name__}: {error}")  # colours
        reason = " ".join(text.split())[:200]
        cause = None if kind is SaveError else error  # the cause may quote a damaged file raw
        raise kind(f"{what} ({reason}): {remedy}") from cause
