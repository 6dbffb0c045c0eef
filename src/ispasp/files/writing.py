"""Write files whole or not at all, to the same bytes every time."""

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

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX = ".ispasp-"
_OLD = 24 * 3600.0  # seconds after which remains are nobody's, where locks cannot tell


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A fresh folder inside `folder`, removed at the end. Remains of killed processes are removed first."""
    with _lock(folder) as handle:
        _clean(folder, alone=_alone(handle))
        _share(handle)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder, ignore_cleanup_errors=True) as fresh:
            yield Path(fresh)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """A new file that is on the disk, not only in its cache."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A new safetensors file, on the disk. The same tensors and metadata are the same bytes."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # what the umask leaves; safetensors makes private files
    save_file(dict(tensors), path, dict(metadata))
    path.chmod(mode)
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))  # safetensors shuffles them
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise ValueError("safetensors wrote its header in another way than expected")
        file.seek(8)
        file.write(text.ljust(size))
        file.flush()
        os.fsync(file.fileno())


def publish(fresh: Path, path: Path) -> None:
    """Put a file in its place in one step that survives a loss of power."""
    os.replace(fresh, path)  # noqa: PTH105  # one system call, and told apart from other renames in tests
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _lock(folder: Path) -> Iterator[int | None]:
    """A handle on the folder for `_alone` and `_share`. The system lets go of it when the process ends."""
    handle = None
    if fcntl is not None:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def _alone(handle: int | None) -> bool:
    """Whether no other workspace in the folder is alive; none can be made until `_share`."""
    if handle is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by others, or a file system without locks
        return False
    return True


def _share(handle: int | None) -> None:
    if handle is not None:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)


def _clean(folder: Path, *, alone: bool) -> None:
    """Remove what killed processes have left: all of it where nobody else writes, else what is old."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if alone or time.time() - path.lstat().st_mtime > _OLD:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
