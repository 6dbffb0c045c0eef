"""Checks of what was typed, and warnings."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import typer

from ispasp.api.files import FILES
from ispasp.cli.sources import is_saved
from ispasp.errors import InputError, visible


def listed(text: str) -> tuple[str, ...]:
    """Names separated by commas.

    >>> listed("neuron, head")
    ('neuron', 'head')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def one_of(option: str, text: str, *known: str) -> str:
    """The text, if it is among those known.

    >>> one_of("--order", "backwards", "sequential", "oneshot", "global")
    Traceback (most recent call last):
    ispasp.errors.InputError: --order backwards: choose sequential, oneshot or global
    """
    if text not in known:
        raise InputError(f"{option} {text or repr(text)}: choose {', '.join(known[:-1])} or {known[-1]}")
    return text


def finite(option: str, value: float) -> float:
    """The number, unless it is infinite or none at all.

    >>> finite("--ridge", float("inf"))
    Traceback (most recent call last):
    ispasp.errors.InputError: --ridge inf: pass a finite number
    """
    if not math.isfinite(value):
        raise InputError(f"{option} {value}: pass a finite number")
    return value


def some_of(option: str, text: str, *known: str) -> tuple[str, ...]:
    """Names separated by commas, all among those known, and at least one.

    >>> some_of("--kinds", "head,neuron", "neuron", "filter", "head")
    ('head', 'neuron')
    """
    return tuple(one_of(option, name, *known) for name in listed(text) or ("",))


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers separated by commas: one, or one for each of three colours.

    >>> numbers("--mean", "0.5,0.4,0.3"), numbers("--mean", "")
    ((0.5, 0.4, 0.3), ())
    """
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (math.nan,)
    if (
        len(found) not in (0, 1, 3)
        or not all(map(math.isfinite, found))
        or (option == "--std" and min(found, default=1) <= 0)
    ):
        raise InputError(f"{option} {text}: pass one number or three, such as {option} 0.5,0.5,0.5")
    return found


def writable(out: Path, *, model: bool = False, force: bool = True, option: str = "--out ") -> Path:
    """The folder, if it can be written: told before the work, not after it. `model`: a model is to be saved there.

    Without `force` there must be nothing in it.

    >>> writable(Path(__file__))
    Traceback (most recent call last):
    ispasp.errors.InputError: --out ...checks.py: there is a file of that name: pass the name of a folder
    """
    nearest = out.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        name = "that name" if nearest == out.absolute() else f"the name {nearest}"
        raise InputError(f"{option}{out}: there is a file of {name}: pass the name of a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{option}{out}: {nearest} may not be written: pass another folder")
    foreign = [name for name in FILES if (out / name).exists()]
    if model and foreign and not is_saved(out):
        raise InputError(f"{option}{out} holds {foreign[0]}, which `ispasp prune` did not write: pass another folder")
    if not force and out.is_dir() and any(out.iterdir()):
        raise InputError(f"{option}{out} is not empty: pass another folder, or --force to write into it")
    return out


def warn(warnings: Sequence[str]) -> None:
    """Say what must not be overlooked, on standard error."""
    for text in warnings:
        typer.secho(f"WARNING: {visible(text)}", err=True, fg=typer.colors.YELLOW, bold=True)
