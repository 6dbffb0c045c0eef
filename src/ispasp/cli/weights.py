"""Weights from a file into a model: safetensors or a state dict, never anything that can run code."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.errors import InputError, SaveError, failing_as
from ispasp.files.reading import check_names, check_tensor, is_regular, opened

_COUNTER = "num_batches_tracked"  # BatchNorm's counter; old files lack it, and no output depends on it
_WRAPPERS = ("state_dict", "model", "model_state_dict")  # keys of a state dict in a training checkpoint
_DEPTH = 8  # most nested wrappers
_WIDER, _BESIDE = 32, 2**28  # bytes per byte of the model, and more: checkpoints hold optimizers, too


def fill(model: nn.Module, path: Path) -> None:
    """Load the weights of a file into a model, strictly; tied tensors may be stored once."""
    expected = model.state_dict()
    limit = _BESIDE + _WIDER * sum(tensor.nbytes for tensor in expected.values() if isinstance(tensor, Tensor))
    given = _unwrapped(_read(path, limit), path)
    try:
        _check(given, model, path)
    except SaveError as error:
        raise InputError(str(error)) from None
    with failing_as(InputError, f"{path} does not fit {type(model).__name__}", "save model.state_dict()"):
        model.load_state_dict(given, strict=False)  # complete, but for the other names of tied tensors


def _check(given: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    """Raise unless the file has each tensor of the model, tied ones under one of their names, and no others."""
    expected, first = model.state_dict(keep_vars=True), dict[int, str]()
    names = {name: first.setdefault(id(tensor), name) for name, tensor in expected.items()}
    counters = {name for name in names if name.endswith(_COUNTER)}
    remedy = f"pass weights of the same {type(model).__name__}, with the same number of classes, not quantized"
    for name in sorted((given.keys() & names.keys()) - counters):
        check_tensor(name, given[name], expected[name], path, remedy)
    check_names({*names.values()} - counters, {names.get(name, name) for name in given} - counters, path, remedy)


def _read(path: Path, limit: int) -> Any:
    if not is_regular(path):
        raise InputError(f"no weights at {path}: pass --weights FILE, a safetensors file or a state dict (.pt, .pth)")
    with failing_as(InputError, f"{path} cannot be read as weights", "pass safetensors or a state dict"):
        _check_archive(path, limit)
        try:
            if path.suffix == ".safetensors":
                with opened(path) as stored:
                    return stored.tensors(limit)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about pickles, which are errors anyway
                return torch.load(path, map_location="cpu", weights_only=True)
        except SaveError as error:
            raise InputError(str(error)) from None
        except pickle.UnpicklingError as error:
            raise InputError(
                f"{path} holds more than tensors, which could run code when it is read: save it again with "
                "torch.save(model.state_dict(), path) or as safetensors"
            ) from error


def _check_archive(path: Path, limit: int) -> None:
    """Raise for files that torch did not write, and for those that would fill the memory once unpacked."""
    if path.suffix == ".safetensors":
        return
    with path.open("rb") as file:
        start = file.read(2)
    if not start.startswith((b"PK", b"\x80")):  # an archive, or a pickle of old versions
        raise InputError(f"{path} was not written by torch.save: pass safetensors or a state dict (.pt, .pth)")
    size = path.stat().st_size
    if start == b"PK":
        with zipfile.ZipFile(path) as archive:
            size = max(size, sum(part.file_size for part in archive.infolist()))
    if size > limit:
        raise InputError(f"{path} takes {size:,} bytes, far more than the model: pass weights of the same model")


def _unwrapped(found: Any, path: Path) -> Mapping[str, Tensor]:
    """Return the state dict inside a checkpoint, without the prefix of DataParallel."""
    for _ in range(_DEPTH):  # a dict may contain itself
        key = next((k for k in _WRAPPERS if k in found), None) if isinstance(found, Mapping) else None
        if key is None:
            break
        found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"{path} holds a {type(found).__name__}, not a state dict: save model.state_dict()")
    for name, tensor in found.items():
        if not isinstance(name, str) or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise InputError(f"{str(name)[:80]!r} in {path} is not a plain tensor: save model.state_dict()")
    parallel = bool(found) and all(name.startswith("module.") for name in found)
    return {name.removeprefix("module.") if parallel else name: value for name, value in found.items()}
