"""Read files that may come from anyone: regular files only, and no more bytes than expected."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor

from ispasp.errors import InputError, SaveError
from ispasp.files.text import LIMIT, parsed

_HEADER = 100_000_000  # bytes; safetensors' own limit
_REASON = 200  # characters of somebody else's error message


def folder_path(folder: Any) -> Path:
    """The folder as a path.

    >>> folder_path(None)
    Traceback (most recent call last):
    ispasp.errors.InputError: the folder is a NoneType: pass its path, such as "pruned"
    """
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(os.fspath(folder), str):
        raise InputError(f'the folder is a {type(folder).__name__}: pass its path, such as "pruned"')
    return Path(folder)


def is_regular(path: Path) -> bool:
    """Whether there is a file that can be read: no folder, no pipe, no device.

    >>> is_regular(Path(__file__)), is_regular(Path("x" * 5000))
    (True, False)
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # a name that is too long, or that holds a null byte
        return False


def memory() -> int:
    """Bytes of this machine's memory; where it cannot be asked, more than any file has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # pragma: no cover  # Windows
        return 2**63


def read_bytes(path: Path, limit: int = LIMIT) -> bytes:
    """A whole file of at most `limit` bytes."""
    try:
        if not is_regular(path):
            raise SaveError(f"{path} is not a file: pass a folder that ispasp.save wrote to the end")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise SaveError(f"{path} has {size:,} bytes, more than the {limit:,} expected: restore the file")
            return file.read(limit)
    except SaveError:
        raise
    except (OSError, ValueError) as error:
        raise SaveError(f"{path} cannot be read ({error}): check its permissions, or restore it") from None


def read_json(path: Path, limit: int = LIMIT) -> Any:
    """The value of a JSON file of at most `limit` bytes."""
    data = read_bytes(path, limit)
    try:
        return parsed(data)
    except ValueError as error:
        raise SaveError(f"{path} cannot be read ({error}): restore the file") from None


@final
class TensorFile:
    """An open safetensors file: its metadata, and its tensors on demand."""

    def __init__(self, path: Path, file: Any, size: int) -> None:
        """Made by `opened`."""
        self.metadata: dict[str, str] = file.metadata() or {}
        self._path, self._file, self._size = path, file, size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, without reading them."""
        with readable(self._path):
            names = self._file.keys()
            return {name: tuple(self._file.get_slice(name).get_shape()) for name in names}

    def tensors(self, limit: int) -> dict[str, Tensor]:
        """All tensors, from a file of at most `limit` bytes."""
        if self._size > limit:
            raise SaveError(f"{self._path} has {self._size:,} bytes, more than the {limit:,} that the model explains: "
                            "pass the model it was written for, or restore the file")  # fmt: skip
        with readable(self._path):
            return {name: self._file.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118  # not a dict


@contextmanager
def opened(path: Path) -> Iterator[TensorFile]:
    """A safetensors file whose header has been checked."""
    if not is_regular(path):
        raise SaveError(f"{path} is not a file: pass a folder that ispasp.save wrote to the end")
    with readable(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = int.from_bytes(file.read(8), "little")
        if not 0 < header <= min(_HEADER, size - 8):
            raise ValueError(f"a header of {header:,} bytes in a file of {size:,}")
    with readable(path):
        stored = safe_open(path, framework="pt")
        found = TensorFile(path, stored, size)
    with stored:
        yield found


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside is one SaveError. The cause is left out: it may quote the file raw."""
    try:
        yield
    except SaveError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_REASON] or type(error).__name__
        raise SaveError(f"{path} is damaged or cut short ({reason}): copy or save it again") from None


def digest(tensors: Mapping[str, Tensor], about: str) -> str:
    """Checksum of tensors (names, dtypes, shapes, bytes) and of what is said about them."""
    sha = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
