"""Arrays in an .npz file."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.loaded import Loaded
from ispasp.cli.sources.preprocessing import Preprocessing
from ispasp.errors import InputError
from ispasp.files.reading import memory

_FOREIGN = re.compile("pickle|not a zip")
_LABELS = ("y", "labels", "label", "targets")


def from_npz(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """The first array of the file, or the one that `--key` names; floats and token numbers as they are.

    Bytes are taken for images: colours go first, and they are normalised as image files are. A Hugging Face model gets
    all arrays that its forward knows by name.
    """
    arrays = _read(path)
    prepare = wanted.preprocessing(loaded.preprocessing)
    key = wanted.key or next(iter(arrays))
    labels = _labels(path, arrays, wanted, key)
    names = [name for name in arrays if name in loaded.parameters and name != "labels"] if loaded.keyword else []
    if not wanted.key and loaded.keyword in names:
        chosen = {name: _tensor(arrays[name], loaded, prepare) for name in names}
    else:
        names = [key]
        chosen = {"": _tensor(_array(path, arrays, key), loaded, prepare)}
    first = next(iter(chosen.values()))
    if any(not arrays[name].ndim or len(arrays[name]) != len(first) for name in names):
        raise InputError(f"{path}: the first axis of {', '.join(names)} must count the examples: write them so")
    if not len(first):
        raise InputError(f"{path}: {names[0]!r} holds no example: pass an array with at least one")
    if labels is not None and len(labels) != len(first):
        raise InputError(f"{path} has {len(first)} examples and {len(labels)} labels: pass as many of each")

    def read(numbers: Sequence[int]) -> Any:
        index = torch.as_tensor(numbers)
        if "" in chosen:
            return loaded.call(chosen[""][index])
        return loaded.complete({name: value[index] for name, value in chosen.items()})

    told = ", ".join(f"{name} is {arrays[name].dtype} {arrays[name].shape}" for name in names)
    remedy = f"pass --key, or write arrays as the model takes them ({told})"
    pictures = any(_pictures(arrays[name], loaded) for name in names)
    text = f"{len(first):,} examples in {path}"
    return Examples(len(first), read, text, labels, remedy=remedy, preprocessing=prepare if pictures else None)


def _read(path: Path) -> dict[str, Any]:
    try:
        _check_size(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if other := [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]:
            raise InputError(f"{path} holds {other[0]!r}, which is no array: write it with numpy.savez(path, x=...)")
    except InputError:
        raise
    except Exception as error:
        reason = _reason(error)
        raise InputError(f"{path} cannot be read as .npz ({reason}): write it with numpy.savez(path, x=...)") from error
    if not arrays:
        raise InputError(f"{path} holds no array: write it with numpy.savez(path, x=...)")
    return arrays


def _check_size(path: Path) -> None:
    """Refuse arrays that would fill the memory: an archive may be small and unpack to anything."""
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist())
    if size > memory() // 2:
        raise InputError(f"{path} takes {size:,} bytes unpacked, more than half of the memory: pass fewer examples")


def _reason(error: Exception) -> str:
    """numpy takes a file that is no archive for a pickle, and advises to trust it."""
    return "no archive of arrays of numbers" if _FOREIGN.search(str(error)) else " ".join(str(error).split())[:200]


def _array(path: Path, arrays: dict[str, Any], key: str) -> Any:
    if key not in arrays:
        raise InputError(f"{path} has no array {key!r}: it has {', '.join(arrays)}; pass --key or --labels so")
    return arrays[key]


def _labels(path: Path, arrays: dict[str, Any], wanted: Wanted, key: str) -> Tensor | None:
    name = wanted.labels or next((name for name in _LABELS if name in arrays and name != key), "")
    if not name and key.startswith("x_"):  # x_train, y_train
        name = next((other for other in arrays if other == f"y_{key[2:]}"), "")
    if not name:
        return None
    values = _array(path, arrays, name)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(f"{path}: {name!r} is {values.dtype} {values.shape}; labels are whole numbers (examples,)")
    return torch.from_numpy(values.astype(np.int64))


def _pictures(array: Any, loaded: Loaded) -> bool:
    """Whether an array is one of images: bytes, with colours or without."""
    return bool(array.dtype == np.uint8 and (array.ndim == 4 or (array.ndim == 3 and not loaded.reads_text)))


def _tensor(array: Any, loaded: Loaded, prepare: Preprocessing) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise InputError(f"an array of {array.dtype} is no input: pass numbers")
    if _pictures(array, loaded):
        array = array[:, None] if array.ndim == 3 else array  # grey images
        if array.shape[-1] in (1, 3) and array.shape[1] not in (1, 3):
            array = np.moveaxis(array, -1, 1)
        return prepare.normalise(torch.from_numpy(np.ascontiguousarray(array)))
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.float() if array.dtype.kind == "f" else tensor.long()
