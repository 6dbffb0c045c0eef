"""What went wrong, in one line with the remedy."""

from __future__ import annotations

from typing import Any

import torch

from ispasp.errors import IspaspError, visible

DEBUG = "ISPASP_DEBUG"


def one_line(error: Exception) -> str:
    """The error as one line of characters that print; empty if all has been said already.

    >>> from ispasp.errors import InputError
    >>> one_line(InputError("keep=2.0:\\npass less"))
    'keep=2.0: pass less'
    >>> one_line(FileExistsError(17, "File exists", "results"))
    'results: File exists: check that this path can be written, is what it should be, and that the disk is not full'
    """
    return visible(_line(error))


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if is_usage(error):
        return _usage(error)
    if isinstance(error, IspaspError):
        return text
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
        return "memory ran out: pass a smaller --batch-size or fewer --examples; `ispasp prune` also takes --memory 2G"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return (
            f"{error.filename}: {error.strerror}: check that this path can be written, is what it should be, and that "
            "the disk is not full"
        )
    return f"{type(error).__name__}: {text}: this was not foreseen; {DEBUG}=1 shows where it happened"


def is_usage(error: Exception) -> bool:
    """Whether typer itself refused the call. Told by what it can do: typer has changed the class it comes from.

    >>> is_usage(ValueError())
    False
    """
    return hasattr(error, "format_message")


def _usage(error: Any) -> str:
    if type(error).__name__ == "NoArgsIsHelpError":  # help was asked for by saying nothing, and shown
        return ""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ispasp"
    return f"{' '.join(error.format_message().split()).rstrip('.')}: see `{path} --help`"
