"""Files: read within limits, one kind of error for all that is wrong with them; written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
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
    with suppress(OSError, ValueError):  # the name is too long, or holds a null byte
        return stat.S_ISREG(path.stat().st_mode)
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
    with failing_as(SaveError, f"{path} cannot be read", "restore the file"):
        return parsed(read_bytes(path, limit))


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
            return {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118

    def tensors(self, limit: int) -> dict[str, Tensor]:
        """All tensors, from a file of at most `limit` bytes."""
        if self._size > limit:
            wrong = f"{self._path} has {self._size:,} bytes, more than the {limit:,} that the model explains"
            raise SaveError(f"{wrong}: pass the model it was written for, or restore the file")
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


# Writing: whole or not at all, and the same bytes every time ---------------------------------------------------------
try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX = ".ispasp-"
_OLD = 24 * 3600.0  # seconds after which leftovers are removed without a lock


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A fresh folder inside `folder`, removed at the end. Leftovers of killed processes are removed first."""
    handle = None
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        # A shared lock marks a workspace in use. While we hold it alone, nobody else has one.
        alone = _locked(handle, exclusive=True)
        for path in folder.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if alone or time.time() - path.lstat().st_mtime > _OLD:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        _locked(handle, exclusive=False)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder, ignore_cleanup_errors=True) as fresh:
            yield Path(fresh)
    finally:
        if handle is not None:
            os.close(handle)  # and with it the lock; the system does so if the process dies


def _locked(handle: int | None, *, exclusive: bool) -> bool:
    """Lock the folder if the file system can. An exclusive lock fails while others hold a shared one."""
    with suppress(OSError):
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
            return True
    return False


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and sync them to the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and sync it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file and sync it to the disk. The same tensors and metadata give the same bytes."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # by the umask; safetensors makes private files
    save_file(dict(tensors), path, dict(metadata))
    path.chmod(mode)
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))  # safetensors shuffles it
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise ValueError("safetensors wrote its header in another way than expected")
        file.seek(8)
        file.write(text.ljust(size))
        file.flush()
        os.fsync(file.fileno())


def write_page(path: str | os.PathLike[str], text: str) -> Path:
    """Write a report. Returns its path."""
    with failing_as(SaveError, f"cannot write the report to {path}", "pass a file in a folder that can be written"):
        Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def publish(fresh: Path, path: Path) -> None:
    """Rename a file in one step that survives a loss of power."""
    os.replace(fresh, path)  # noqa: PTH105  # one system call; tests patch it
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk, if the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
