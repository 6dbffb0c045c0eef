"""Read untrusted files: regular files only, no more bytes than expected, one kind of error."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.parameter import is_lazy

from ispasp.errors import InputError, SaveError, failing_as

LIMIT = 64 * 2**20  # bytes of a text that is read whole
_DIGITS = 19  # most digits of a whole number: it fits into 64 bits
_HEADER = 100_000_000  # bytes; safetensors' own limit


def folder_path(folder: Any) -> Path:
    """The folder as a path."""
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(os.fspath(folder), str):
        raise InputError(f'the folder is a {type(folder).__name__}: pass its path, such as "pruned"')
    return Path(folder)


def is_regular(path: Path) -> bool:
    """Whether the path is a file: no folder, no pipe, no device."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # the name is too long, or holds a null byte
        return False


def memory() -> int:
    """Bytes of this machine's memory; 2^63 if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # pragma: no cover  # Windows
        return 2**63


def read_bytes(path: Path, limit: int = LIMIT) -> bytes:
    """A whole file of at most `limit` bytes."""
    _check_regular(path)
    with (
        failing_as(SaveError, f"{path} cannot be read", "check its permissions, or restore it"),
        path.open("rb") as file,
    ):
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            return file.read(limit)
        raise SaveError(f"{path} has {size:,} bytes, more than the {limit:,} expected: restore the file")


def read_json(path: Path, limit: int = LIMIT) -> Any:
    """The value of a JSON file of at most `limit` bytes."""
    data = read_bytes(path, limit)
    with failing_as(SaveError, f"{path} cannot be read", "restore the file"):
        return parsed(data)


def _check_regular(path: Path) -> None:
    if not is_regular(path):
        raise SaveError(f"{path} is not a file: pass a folder that ispasp.save finished writing")


@final
class TensorFile:
    """An open safetensors file: its metadata, and its tensors on demand."""

    def __init__(self, path: Path, file: Any, size: int) -> None:
        self.metadata: dict[str, str] = file.metadata() or {}
        self._path, self._file, self._size = path, file, size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, without reading them."""
        with _readable(self._path):
            names = self._file.keys()
            return {name: tuple(self._file.get_slice(name).get_shape()) for name in names}

    def tensors(self, limit: int) -> dict[str, Tensor]:
        """All tensors, from a file of at most `limit` bytes."""
        if self._size > limit:
            raise SaveError(
                f"{self._path} has {self._size:,} bytes, more than the {limit:,} that the model explains: pass the "
                "model it was written for, or restore the file"
            )
        with _readable(self._path):
            return {name: self._file.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118  # not a dict


@contextmanager
def opened(path: Path) -> Iterator[TensorFile]:
    """A safetensors file whose header has been checked."""
    _check_regular(path)
    with _readable(path):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = int.from_bytes(file.read(8), "little")
        if not 0 < header <= min(_HEADER, size - 8):
            raise ValueError(f"a header of {header:,} bytes in a file of {size:,}")
        stored = safe_open(path, framework="pt")
        found = TensorFile(path, stored, size)
    with stored:
        yield found


def _readable(path: Path) -> AbstractContextManager[None]:
    return failing_as(SaveError, f"{path} is damaged or cut short", "copy or save it again")


def check_names(needed: Set[str], found: Set[str], path: Path, remedy: str) -> None:
    """Raise unless a file has the tensors that a model needs, and no others."""
    wrong = (("lacks", sorted(needed - found)), ("has unexpected", sorted(found - needed)))
    texts = [f"{what} {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" for what, names in wrong if names]
    if texts:
        raise SaveError(f"{path} {' and '.join(texts)}: {remedy}")


def check_tensor(name: str, found: Tensor, needed: Tensor, path: Path, remedy: str) -> None:
    """Raise unless a tensor in a file fits that of the model."""
    if needed.is_meta or is_lazy(needed):
        raise SaveError(f"{name!r} of the model has no data: build the dense model on a real device")
    if found.shape != needed.shape:
        shapes = f"{tuple(found.shape)} in {path}, {tuple(needed.shape)} in the model"
        raise SaveError(f"{name!r} has shape {shapes}: {remedy}")
    check_dtype(name, found.dtype, needed, path, remedy)


def check_dtype(name: str, found: torch.dtype, needed: Tensor, path: Path, remedy: str) -> None:
    """Raise unless both are whole, real or complex numbers."""
    if (needed.is_floating_point(), needed.is_complex()) != (found.is_floating_point, found.is_complex):
        raise SaveError(f"{name!r} is {found} in {path}, {needed.dtype} in the model: {remedy}")


def digest(tensors: Mapping[str, Tensor], about: str) -> str:
    """Checksum of tensors (names, dtypes, shapes, bytes) and of a text about them."""
    sha = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text of bounded size, without duplicate keys. Raises ValueError."""
    if len(text) > LIMIT:
        raise ValueError(f"{len(text):,} bytes, more than the {LIMIT:,} that a text may have")
    try:
        if not isinstance(text, str):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_int=_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else "..."
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return found


def _number(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a whole number of {len(digits):,} digits")
    return int(digits)
