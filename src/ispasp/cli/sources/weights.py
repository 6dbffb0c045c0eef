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

from ispasp.errors import InputError, SaveError
from ispasp.files.reading import is_regular, opened

_COUNTER = "num_batches_tracked"  # of BatchNorm; old files lack it, and it changes no output
_WRAPPERS = ("state_dict", "model", "model_state_dict")  # under which training scripts store a state dict
_DEPTH = 8  # of wrappers
_WIDER = 32  # a file may take this many times the bytes of the model: training scripts store optimizers, too
_BESIDE = 2**28


def fill(model: nn.Module, path: Path) -> None:
    """Load the weights of a file into a model, strictly; a mismatch is one sentence about the first of its kind.

    >>> fill(nn.Linear(2, 2), Path("no/such/file.safetensors"))
    Traceback (most recent call last):
    ispasp.errors.InputError: no weights at no/such/file.safetensors: pass --weights FILE, a safetensors file or ...
    """
    expected = model.state_dict()
    limit = _BESIDE + _WIDER * sum(tensor.nbytes for tensor in expected.values() if isinstance(tensor, Tensor))
    given = _unwrapped(_read(path, limit), path)
    for name, tensor in given.items():
        if name in expected and expected[name].shape != tensor.shape:
            raise InputError(
                f"{name!r} has shape {tuple(tensor.shape)} in {path}, {tuple(expected[name].shape)} in the model: "
                "pass weights of this very model (its number of classes, too)"
            )
        if name in expected and _kind(tensor) != _kind(expected[name]) and not name.endswith(_COUNTER):
            raise InputError(
                f"{name!r} is {tensor.dtype} in {path}, {expected[name].dtype} in the model: pass weights of this very "
                "model, not quantized"
            )
    ties = _ties(model)
    missing = [
        name
        for name in expected
        if name not in given and not ties.get(name, set()) & set(given) and not name.endswith(_COUNTER)
    ]
    unexpected = [name for name in given if name not in expected]
    if missing or unexpected:
        said = [
            f"{what} {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for what, names in (("lacks", missing), ("has an unexpected", unexpected))
            if names
        ]
        raise InputError(f"{path} {', and '.join(said)}: pass weights of this very {type(model).__name__}")
    try:
        model.load_state_dict(given, strict=False)  # complete, but for the second names of tied tensors
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} does not fit {type(model).__name__} ({reason}): save model.state_dict()") from error


def _read(path: Path, limit: int) -> Any:
    if not is_regular(path):
        raise InputError(f"no weights at {path}: pass --weights FILE, a safetensors file or a state dict (.pt, .pth)")
    try:
        if path.suffix == ".safetensors":
            with opened(path) as stored:
                return stored.tensors(limit)
        _check_size(path, limit)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles it had rather not read; it says so by an error, too
            return torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except SaveError as error:
        raise InputError(str(error)) from None
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds more than tensors, which could run code when it is read: write it anew with "
            "torch.save(model.state_dict(), path) or as safetensors"
        ) from error
    except Exception as error:
        reason = (str(error).strip() or " ").splitlines()[0]
        reason = reason[:200] if " " in reason.strip() else "it is something else, or cut short"
        raise InputError(f"{path} cannot be read as weights ({reason}): pass safetensors or a state dict") from error


def _check_size(path: Path, limit: int) -> None:
    """Refuse what torch did not write, and what would fill the memory: by its size, or once unpacked."""
    with path.open("rb") as file:
        start = file.read(2)
    if not start.startswith((b"PK", b"\x80")):  # an archive, or in old times a pickle
        raise InputError(f"{path} was not written by torch.save: pass safetensors or a state dict (.pt, .pth)")
    size = path.stat().st_size
    if start == b"PK":
        with zipfile.ZipFile(path) as archive:
            size = max(size, sum(part.file_size for part in archive.infolist()))
    if size > limit:
        raise InputError(f"{path} takes {size:,} bytes, far more than the model: pass weights of this very model")


def _unwrapped(found: Any, path: Path) -> Mapping[str, Tensor]:
    for _ in range(_DEPTH):  # a dict may contain itself
        key = next((k for k in _WRAPPERS if k in found), None) if isinstance(found, Mapping) else None
        if key is None:
            break
        found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"{path} holds a {type(found).__name__}, not a state dict: save model.state_dict()")
    for name, tensor in found.items():
        if not isinstance(name, str) or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise InputError(f"{str(name)[:80]!r} in {path} is no plain tensor: save model.state_dict()")
    wrapped = bool(found) and all(name.startswith("module.") for name in found)  # as DataParallel writes them
    return {name.removeprefix("module.") if wrapped else name: value for name, value in found.items()}


def _kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "float" if tensor.is_floating_point() else "integer"


def _ties(model: nn.Module) -> dict[str, set[str]]:
    """Name -> all names of the same tensor; files may hold it under one of them."""
    names: dict[int, set[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), set()).add(name)
    return {name: group for group in names.values() for name in group}
