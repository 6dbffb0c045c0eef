"""`ispasp.load`: build a pruned model again from a folder that `ispasp.save` wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ispasp.api.building import build
from ispasp.api.files import CONFIG, WEIGHTS, Slot, slots
from ispasp.api.history import remember_
from ispasp.api.stored import Stored, stored
from ispasp.errors import InputError, SaveError
from ispasp.files.reading import TensorFile, folder_path, is_regular, opened
from ispasp.graph.wrappers import plain
from ispasp.surgery.remove import Undo, all_or_nothing, fitting, remove_, set_data
from ispasp.types.plan import Plan

_WIDER = 8  # a file may take this many times the bytes of the dense model: float64 of what is a byte there
_TOLD = 2**27  # bytes of names and metadata beside the tensors


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Prune a freshly built dense model as the saved one was, in place, and fill it; returns the model.

    dtypes are those of the file (what was saved in bfloat16 is bfloat16 again); devices, requires_grad and the training
    mode are those of `model`; what was tied is tied again. A missing, unexpected or wrongly shaped tensor is an error,
    and on any error `model` is exactly as before.

    A model of a class in transformers may be left out: it is then built from `config.json`, on the CPU and in eval
    mode, with nothing fetched from anywhere.

    >>> load("no/such/folder", nn.Linear(2, 2))
    Traceback (most recent call last):
    ispasp.errors.SaveError: no/such/folder is not a folder: pass the folder that ispasp.save wrote
    """
    folder = _folder(folder)
    with opened(folder / WEIGHTS) as file:
        saved = stored(file, folder)
        if model is None:
            model = build(saved, file.shapes(), folder)
        if not isinstance(model, nn.Module):
            raise InputError(f"model is a {type(model).__name__}: pass the dense torch.nn.Module, freshly built")
        with plain(model) as inner:
            _prune_and_fill(inner, saved, file, folder)
    return model


def _prune_and_fill(model: nn.Module, saved: Stored, file: TensorFile, folder: Path) -> None:
    made_for = saved.plan.structure.model
    if made_for not in {cls.__name__ for cls in type(model).__mro__}:
        raise SaveError(f"{folder} holds a pruned {made_for}, not a {type(model).__name__}: pass a dense {made_for}")
    tensors = file.tensors(_WIDER * _bytes(model) + _TOLD)
    saved.check(tensors, folder)
    with all_or_nothing() as undo:
        with fitting(model):
            remove_(model, saved.plan, undo)
        _fill(model, saved, tensors, undo, folder)
        remember_(model, saved.plan, undo)


def saved_plan(folder: str | os.PathLike[str]) -> tuple[Plan, bool]:
    """The plan of a saved model, and whether `load` can build the model by itself."""
    folder = _folder(folder)
    with opened(folder / WEIGHTS) as file:
        found = stored(file, folder)
    return found.plan, CONFIG in found.texts


def _folder(given: str | os.PathLike[str]) -> Path:
    folder = folder_path(given)
    if not os.path.isdir(folder):  # noqa: PTH112  # False for names that are too long, too
        raise SaveError(f"{folder} is not a folder: pass the folder that ispasp.save wrote")
    if not is_regular(folder / WEIGHTS):
        raise SaveError(f"{folder} has no {WEIGHTS}: pass a folder that ispasp.save wrote to the end")
    return folder


def _bytes(model: nn.Module) -> int:
    tensors = (table[key] for _, (table, key), _ in slots(model))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if not is_lazy(tensor))


def _fill(model: nn.Module, saved: Stored, tensors: Mapping[str, Tensor], undo: Undo, folder: Path) -> None:
    all_slots = {name: (slot, persistent) for name, slot, persistent in slots(model)}
    saved_slots = {name: slot for name, (slot, persistent) in all_slots.items() if persistent}
    _check_names(model, saved_slots, {*tensors, *saved.ties}, folder)
    for name, other in saved.ties.items():
        (table, key), (source, source_key) = saved_slots[name], saved_slots[other]
        if isinstance(table[key], nn.Parameter) != isinstance(source[source_key], nn.Parameter):
            raise SaveError(
                f"{name!r} and {other!r} are tied in {folder}; the model given has a parameter and a buffer"
            )
        _check_tensor(name, table[key], tensors[other], folder)
        undo(_putter(table, key, table[key]))
        table[key] = source[source_key]
    filled: dict[int, str] = {}
    for name, value in tensors.items():
        table, key = saved_slots[name]
        tensor = table[key]
        _check_tensor(name, tensor, value, folder)
        if id(tensor) in filled:
            raise SaveError(
                f"{name!r} and {filled[id(tensor)]!r} are tied in the model given, not in {folder}: untie them"
            )
        filled[id(tensor)] = name
        set_data(tensor, torch.empty_like(tensor.data, dtype=value.dtype).copy_(value.detach()), None, undo)
    for name, dtype in saved.unsaved.items():  # the constructor makes them; only a cast, as by .half(), is repeated
        if name in all_slots:
            (table, key), _ = all_slots[name]
            if table[key].dtype != dtype:
                _check_kind(name, table[key], dtype, folder)
                set_data(table[key], table[key].data.to(dtype), None, undo)


def _check_names(model: nn.Module, slots: Mapping[str, Slot], known: set[str], folder: Path) -> None:
    missing, unexpected = sorted(set(slots) - known), sorted(known - set(slots))
    if missing or unexpected:
        texts = [f"{what} {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
                 for what, names in (("lacks", missing), ("has in excess", unexpected)) if names]  # fmt: skip
        raise SaveError(f"{folder / WEIGHTS} {' and '.join(texts)}: build {type(model).__name__} as it was when saved")


def _check_tensor(name: str, tensor: Tensor, value: Tensor, folder: Path) -> None:
    if tensor.is_meta or is_lazy(tensor):
        raise SaveError(f"{name!r} of the model given has no data: build the dense model on a real device")
    if tensor.shape != value.shape:
        raise SaveError(f"{name!r} has shape {tuple(value.shape)} in {folder / WEIGHTS}, the pruned model needs "
                        f"{tuple(tensor.shape)}: build the dense model as it was when saved")  # fmt: skip
    _check_kind(name, tensor, value.dtype, folder)


def _check_kind(name: str, tensor: Tensor, dtype: torch.dtype, folder: Path) -> None:
    if (tensor.is_floating_point(), tensor.is_complex()) != (dtype.is_floating_point, dtype.is_complex):
        raise SaveError(f"{name!r} is {dtype} in {folder / WEIGHTS}, {tensor.dtype} in the model given: "
                        "build the dense model as it was when saved")  # fmt: skip


def _putter(table: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    return lambda: table.__setitem__(key, value)
