"""`ispasp.save` and `ispasp.load`: a pruned model as safetensors and JSON. Nothing is pickled."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ispasp.errors import InputError, IspaspError, MissingExtraError, PlanError, SaveError
from ispasp.surgery import attributes
from ispasp.surgery.remove import Undo, all_or_nothing, remove_
from ispasp.types.layout import full_length, kept_length
from ispasp.types.plan import Plan

PLAN, CONFIG, GENERATION, WEIGHTS = "plan.json", "config.json", "generation_config.json", "model.safetensors"
FILES = (PLAN, CONFIG, GENERATION, WEIGHTS)
FORMAT, VERSION = "ispasp", "1"

Slot = tuple[dict[str, Any], str]  # a module's table of parameters or buffers, and the key in it


class ModelWithPlan(Protocol):
    """What pruning returns: the pruned model and the plan that made it."""

    @property
    def model(self) -> nn.Module:
        """The pruned model."""

    @property
    def plan(self) -> Plan:
        """The plan that was applied to it."""


@dataclass(frozen=True)
class _Saved:
    """What a folder holds. `ties`: name -> name under which its tensor is stored; `unsaved`: buffer -> dtype."""

    plan: Plan
    tensors: Mapping[str, Tensor]
    ties: Mapping[str, str]
    unsaved: Mapping[str, str]


def save(
    model: nn.Module | ModelWithPlan | tuple[nn.Module, Plan],
    folder: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write a pruned model and its plan to a folder; returns the folder.

    Takes what `prune` returns, or a model pruned by `apply_` with its `plan`, side by side or as a tuple. Writes
    `model.safetensors` (parameters and persistent buffers, tied ones once) and `plan.json`; for a Hugging Face model
    also `config.json` (of the dense model) and `generation_config.json`. All or nothing: the files take their places
    when all are written. An earlier save is replaced and other files in the folder stay, but a dense checkpoint or
    config of the same name is replaced only with `overwrite=True`.

    >>> from ispasp import apply_, survey
    >>> def build(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model, x = build(), torch.ones(1, 4)
    >>> plan = survey(model, x).plan(0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(apply_(model, plan), folder, plan=plan)
    ...     torch.equal(load(path, build())(x), model(x))
    True
    """
    model, plan = _model_and_plan(model, plan)
    folder = Path(folder)
    _check_pruned(model, plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_ours(folder, overwrite)
        with tempfile.TemporaryDirectory(prefix=".ispasp-", dir=folder) as fresh:
            _write(model, plan, Path(fresh))
            _publish(Path(fresh), folder)
    except IspaspError:
        raise
    except (OSError, SafetensorError, ValueError, RuntimeError, TypeError) as error:
        raise SaveError(f"cannot save {type(model).__name__} to {folder}: {error}") from error
    return folder


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


# --- saving ---------------------------------------------------------------------------------------------------------


def _model_and_plan(given: Any, plan: Plan | None) -> tuple[nn.Module, Plan]:
    model = given
    if isinstance(given, tuple) and len(given) == 2 and plan is None:
        model, plan = given
    elif not isinstance(given, nn.Module) and plan is None:
        model, plan = getattr(given, "model", given), getattr(given, "plan", None)
    if not isinstance(model, nn.Module):
        raise InputError(f"cannot save a {type(given).__name__}: pass the result of pruning, or a model and plan=...")
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}: pass the ispasp.Plan that was applied to the model")
    return model, plan


def _slots(model: nn.Module) -> Iterator[tuple[str, Slot, bool]]:
    """Every parameter and buffer: name, where it hangs, whether it is saved; tied ones under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield prefix + key, (table, key), key not in module._non_persistent_buffers_set


def _check_pruned(model: nn.Module, plan: Plan) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise SaveError(f"{path or 'the model'} ({type(module).__name__}) has an extra state, which only "
                            "pickle could store: remove its get_extra_state, or save it yourself")  # fmt: skip
    tensors = {name: table[key] for name, (table, key), _ in _slots(model)}
    for name, tensor in tensors.items():
        if is_lazy(tensor) or tensor.is_meta:
            raise SaveError(f"{name!r} has no data yet: run the model once, on a real device, before saving it")
    for name, layout in plan.structure.tensors.items():
        expected = tuple(
            kept_length(layout.axes[axis], plan.kept) if axis in layout.axes else size
            for axis, size in enumerate(layout.shape)
        )
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != expected:
            raise PlanError(
                f"the plan leaves {name!r} with shape {expected}, {type(model).__name__} has {found or 'none'}: "
                "save the (unwrapped) model that this plan was applied to"
            )


def _check_ours(folder: Path, overwrite: bool) -> None:
    found = [name for name in FILES if (folder / name).exists()]
    if not found or overwrite:
        return
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            ours = (file.metadata() or {}).get("format") == FORMAT
    except (OSError, SafetensorError):
        ours = False
    if not ours:
        raise SaveError(
            f"{folder} holds {', '.join(found)} that ispasp did not write: choose another folder, or overwrite=True"
        )


def _write(model: nn.Module, plan: Plan, folder: Path) -> None:
    text = plan.to_json().encode()
    (folder / PLAN).write_bytes(text)
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    unsaved: dict[str, str] = {}
    places: set[int] = set()
    for name, (table, key), persistent in _slots(model):
        tensor = table[key]
        if not persistent:
            unsaved[name] = str(tensor.dtype).removeprefix("torch.")
        elif id(tensor) in names:
            ties[name] = names[id(tensor)]
        else:
            names[id(tensor)] = name
            flat = tensor.detach().cpu().contiguous()
            place = flat.untyped_storage().data_ptr()  # views of one storage, which safetensors refuses
            tensors[name] = flat.clone() if flat.numel() and place in places else flat
            places.add(place)
    about = json.dumps({"ties": ties, "unsaved": unsaved})
    checks = {"plan_sha256": hashlib.sha256(text).hexdigest(), "tensors_sha256": _digest(tensors, about)}
    save_file(tensors, folder / WEIGHTS, {"format": FORMAT, "version": VERSION, "about": about, **checks})
    if hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "save_pretrained"):
        _write_config(model, plan, folder)


def _write_config(model: Any, plan: Plan, folder: Path) -> None:
    """The dense config of a Hugging Face model, duck-typed: transformers is not imported here."""
    holder: Any = nn.Module()
    holder.config = copy.deepcopy(model.config)
    for attribute in plan.structure.attributes:
        if not attribute.module and attribute.name.startswith("config."):
            attributes.write(holder, attribute.name, full_length(attribute.extent))
    holder.config.architectures = [type(model).__name__]
    holder.config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _digest(tensors: Mapping[str, Tensor], about: str) -> str:
    sha = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _publish(fresh: Path, folder: Path) -> None:
    """Rename the new files into place, and those of an earlier save away; put all back if that fails."""
    aside = fresh / "before"
    aside.mkdir()
    before = [name for name in FILES if (folder / name).exists()]
    try:
        for name in FILES:
            if name in before:
                (folder / name).replace(aside / name)
            if (fresh / name).exists():
                (fresh / name).replace(folder / name)
    except BaseException:
        for name in FILES:
            if (aside / name).exists():
                (aside / name).replace(folder / name)
            elif name not in before:
                (folder / name).unlink(missing_ok=True)
        raise


# --- loading --------------------------------------------------------------------------------------------------------


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
    if metadata.get("tensors_sha256") != _digest(tensors, about):
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
        raise SaveError(f"cannot build a {name} from {folder / CONFIG} ({error}): {remedy}") from error
    return model.eval()


def _fill(model: nn.Module, saved: _Saved, undo: Undo, folder: Path) -> None:
    all_slots = {name: (slot, persistent) for name, slot, persistent in _slots(model)}
    slots = {name: slot for name, (slot, persistent) in all_slots.items() if persistent}
    _check_names(model, slots, saved, folder)
    for name, stored in saved.ties.items():
        (table, key), (source, source_key) = slots[name], slots[stored]
        if isinstance(table[key], nn.Parameter) != isinstance(source[source_key], nn.Parameter):
            raise SaveError(
                f"{name!r} and {stored!r} are tied in {folder}; the model given has a parameter and a buffer"
            )
        undo(_putter(table, key, table[key]))
        table[key] = source[source_key]
    filled: dict[int, str] = {}
    for name, value in saved.tensors.items():
        table, key = slots[name]
        tensor = table[key]
        _check_tensor(name, tensor, value, folder)
        if id(tensor) in filled:
            raise SaveError(
                f"{name!r} and {filled[id(tensor)]!r} are tied in the model given, not in {folder}: untie them"
            )
        filled[id(tensor)] = name
        _set(tensor, value, value.dtype, undo)
    for name, dtype in saved.unsaved.items():  # the constructor makes them; only a cast, as by .half(), is repeated
        if name in all_slots:
            (table, key), _ = all_slots[name]
            if table[key].dtype != getattr(torch, dtype):
                _set(table[key], table[key], getattr(torch, dtype), undo)


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


def _set(tensor: Tensor, value: Tensor, dtype: torch.dtype, undo: Undo) -> None:
    """Give a parameter or buffer new data: the same object, so that all who hold it see it."""
    data, grad = tensor.data, tensor.grad

    def restore() -> None:
        tensor.grad = None
        tensor.data = data
        tensor.grad = grad

    undo(restore)
    tensor.grad = None
    tensor.data = torch.empty_like(data, dtype=dtype).copy_(value.detach())


def _putter(table: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    return lambda: table.__setitem__(key, value)
