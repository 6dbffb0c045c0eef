"""`ispasp.load`: build a pruned model again from a folder that `ispasp.save` wrote."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ispasp.api.files import CONFIG, FORMAT, GENERATION, PLAN, VERSION, WEIGHTS, Slot, digest, slots
from ispasp.errors import InputError, MissingExtraError, SaveError
from ispasp.surgery.remove import Undo, all_or_nothing, remove_, set_data
from ispasp.types.plan import Plan


@dataclass(frozen=True)
class _Saved:
    """What a folder holds. `ties`: name -> name under which its tensor is stored; `unsaved`: buffer -> dtype."""

    plan: Plan
    tensors: Mapping[str, Tensor]
    ties: Mapping[str, str]
    unsaved: Mapping[str, str]


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
    folder = Path(folder)
    saved = _read(folder)
    if model is None:
        model = _build(folder)
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: pass the dense torch.nn.Module, freshly built")
    made_for = saved.plan.structure.model
    if made_for not in {cls.__name__ for cls in type(model).__mro__}:
        raise SaveError(f"{folder} holds a pruned {made_for}, not a {type(model).__name__}: pass a dense {made_for}")
    with all_or_nothing() as undo:
        remove_(model, saved.plan, undo)
        _fill(model, saved, undo, folder)
    return model


def _read(folder: Path) -> _Saved:
    """Everything in the folder, checked against its checksums."""
    if not folder.is_dir():
        raise SaveError(f"{folder} is not a folder: pass the folder that ispasp.save wrote")
    for name in (PLAN, WEIGHTS):
        if not (folder / name).is_file():
            raise SaveError(f"{folder} has no {name}: pass a folder that ispasp.save wrote to the end")
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        text = (folder / PLAN).read_bytes()
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{folder / WEIGHTS} is damaged or cut short ({error}): copy or save it again") from error
    if metadata.get("format") != FORMAT:
        raise SaveError(f"{folder / WEIGHTS} was not written by ispasp (its format is {metadata.get('format')!r}): "
                        "pass a folder that ispasp.save wrote")  # fmt: skip
    if metadata.get("version") != VERSION:
        raise SaveError(
            f"{folder} has version {metadata.get('version')!r}; this ispasp reads {VERSION!r}: update ispasp"
        )
    if metadata.get("plan_sha256") != hashlib.sha256(text).hexdigest():
        raise SaveError(f"{folder / PLAN} is not the plan that {WEIGHTS} was saved with (checksums differ): "
                        "restore both files from one save")  # fmt: skip
    about = metadata.get("about", "")
    if metadata.get("tensors_sha256") != digest(tensors, about):
        raise SaveError(f"{folder / WEIGHTS} has been changed (checksums differ): copy or save it again")
    return _Saved(Plan.from_json(text.decode()), tensors, **json.loads(about))


def _build(folder: Path) -> nn.Module:
    """The dense model that config.json describes."""
    remedy = "pass the dense model: ispasp.load(folder, model)"
    try:
        data = json.loads((folder / CONFIG).read_bytes())
        name = data["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SaveError(f"{folder / CONFIG} does not say which model to build ({error!r}): {remedy}") from error
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(f"building a {name} needs pip install 'ispasp[transformers]'; or {remedy}") from error
    try:
        cls = getattr(transformers, name)
        if not issubclass(cls, transformers.PreTrainedModel):
            raise TypeError(f"{name} is no PreTrainedModel")
        with torch.random.fork_rng(devices=[]):
            model: nn.Module = cls(cls.config_class.from_dict(data))
        if (folder / GENERATION).exists():
            stored = json.loads((folder / GENERATION).read_bytes())
            model.generation_config = transformers.GenerationConfig.from_dict(stored)
    except Exception as error:
        if _lacks_operators(error):
            raise MissingExtraError(
                f"building a {name} imports torchvision, which does not fit this PyTorch {torch.__version__} (its "
                "compiled part does not load): install the torchvision made for it, or pip uninstall torchvision"
            ) from error
        raise SaveError(f"cannot build a {name} from {folder / CONFIG} ({error}): {remedy}") from error
    return model.eval()


def _lacks_operators(error: BaseException | None) -> bool:
    """Whether torchvision missed its own operators: so it fails where it was compiled for another PyTorch."""
    while error is not None:
        if isinstance(error, RuntimeError) and "torchvision::" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _fill(model: nn.Module, saved: _Saved, undo: Undo, folder: Path) -> None:
    all_slots = {name: (slot, persistent) for name, slot, persistent in slots(model)}
    saved_slots = {name: slot for name, (slot, persistent) in all_slots.items() if persistent}
    _check_names(model, saved_slots, saved, folder)
    for name, stored in saved.ties.items():
        (table, key), (source, source_key) = saved_slots[name], saved_slots[stored]
        if isinstance(table[key], nn.Parameter) != isinstance(source[source_key], nn.Parameter):
            raise SaveError(
                f"{name!r} and {stored!r} are tied in {folder}; the model given has a parameter and a buffer"
            )
        undo(_putter(table, key, table[key]))
        table[key] = source[source_key]
    filled: dict[int, str] = {}
    for name, value in saved.tensors.items():
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
            if table[key].dtype != getattr(torch, dtype):
                set_data(table[key], table[key].data.to(getattr(torch, dtype)), None, undo)


def _check_names(model: nn.Module, slots: Mapping[str, Slot], saved: _Saved, folder: Path) -> None:
    stored = {*saved.tensors, *saved.ties}
    missing, unexpected = sorted(set(slots) - stored), sorted(stored - set(slots))
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
    if (tensor.is_floating_point(), tensor.is_complex()) != (value.is_floating_point(), value.is_complex()):
        raise SaveError(f"{name!r} is {value.dtype} in {folder / WEIGHTS}, {tensor.dtype} in the model given: "
                        "build the dense model as it was when saved")  # fmt: skip


def _putter(table: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    return lambda: table.__setitem__(key, value)
