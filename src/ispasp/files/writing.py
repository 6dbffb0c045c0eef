"""Write files whole or not at all, and the same bytes every time."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ispasp.errors import SaveError

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
    if handle is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except OSError:
        return False
    return True


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
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SaveError(f"cannot write the report to {path}: {error.strerror or error}") from error
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
