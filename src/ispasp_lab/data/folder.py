"""Where data and pretrained weights lie."""

from __future__ import annotations

import os
from pathlib import Path

from ispasp.errors import InputError

_INSIDE = ("", "data", "weights")


def data_folder() -> Path:
    """The folder that the variable ISPASP_DATA names; without it `~/.cache/ispasp`.

    >>> data_folder().is_absolute()
    True
    """
    return Path(os.environ.get("ISPASP_DATA") or "~/.cache/ispasp").expanduser().absolute()


def find(name: str) -> Path:
    """The file or folder of this name, in the data folder itself or in its `data` or `weights`.

    >>> find("no-such-file.npz")
    Traceback (most recent call last):
    ispasp.errors.InputError: 'no-such-file.npz' is not in ..., nor in its data or weights: put it there, or set
    ISPASP_DATA to a folder that holds it
    """
    path = _found(name)
    if path is None:
        raise InputError(
            f"{name!r} is not in {data_folder()}, nor in its data or weights: put it there, or set ISPASP_DATA to a "
            "folder that holds it"
        )
    return path


def available(name: str) -> bool:
    """Whether `find` would find it.

    >>> available("no-such-file.npz")
    False
    """
    return _found(name) is not None


def _found(name: str) -> Path | None:
    paths = (data_folder() / inside / name for inside in _INSIDE)
    return next((path for path in paths if path.exists()), None)
