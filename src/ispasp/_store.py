"""`ispasp.save` and `ispasp.load`: a pruned model as safetensors and JSON. Nothing is pickled."""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ispasp import files
from ispasp._card import CARD, card, options_text, replaces
from ispasp._huggingface import CODE, Opening, openings, write_configs
from ispasp._saved import CONFIG, COPIES, FILES, GENERATION, PLAN, WEIGHTS, Saved, build, is_ours, metadata, opened_save
from ispasp.errors import InputError, PlanError, SaveError, failing_as
from ispasp.graph.state import plain
from ispasp.surgery.remove import Undo, all_or_nothing, fitting, plans_of, read_number, remove_, set_data
from ispasp.types.dimension import kept_length
from ispasp.types.plan import Plan

_WIDER = 8  # a file may have this many times the bytes of the dense model: float64 where the model has bytes
_HEADER = 2**27  # bytes of names and metadata
_AS_SAVED = "build the dense model as it was when saved"
_BESIDE = (  # files of tokenizers and processors, which from_pretrained expects beside the model
    "added_tokens.json chat_template.jinja merges.txt preprocessor_config.json processor_config.json "
    "sentencepiece.bpe.model special_tokens_map.json spiece.model tokenizer.json tokenizer.model "
    "tokenizer_config.json vocab.json vocab.txt"
).split()
if TYPE_CHECKING:
    _Path = Path
else:
    _Path = type(Path())


class SavedFolder(_Path):
    """The folder that `save` wrote, as a `Path`.

    `way` is "plain" (`from_pretrained` opens it), "code" (with `trust_remote_code=True`) or "ispasp" (`ispasp.load`
    alone). `note` says that in a sentence, and why it is not a simpler one.
    """

    way: str = "ispasp"
    note: str = ""


class _ModelWithPlan(Protocol):
    """A pruned model and the plan that made it, such as a `Result`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def plan(self) -> Plan: ...


def save(
    model: nn.Module | _ModelWithPlan | tuple[nn.Module, Plan],
    folder: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    overwrite: bool = False,
    from_dense: bool = True,
    example: Any = None,
) -> SavedFolder:
    """Write a pruned model and its plan to a folder; returns the folder.

    Takes the result of `prune`, or a model pruned by `apply_` and its `plan`, as two arguments or a tuple. Writes
    `model.safetensors` (parameters and persistent buffers, tied ones once) and `plan.json`. All or nothing, even if the
    process is killed. An earlier save is replaced and other files in the folder stay; a dense checkpoint or config of
    the same name is replaced only with `overwrite=True`. Saving a model twice gives the same bytes.

    A Hugging Face model also gets `config.json`, `generation_config.json`, `README.md` and the files of its tokenizer,
    and opens without ispasp where it can: with `from_pretrained` if a config can say the widths, else by code in the
    folder (`trust_remote_code=True`). What is written is opened, and must give the same outputs, before it is kept:
    `example` is the batch for that, unless a result has one. The folder returned says which way it took, `.note`.

    A model that was pruned several times is saved with all its plans as one, so that it loads on the dense model;
    `from_dense=False` writes only the last plan, which fits the model that it was made for.

    >>> import tempfile, torch
    >>> from ispasp import apply_, load, survey
    >>> def build(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model, x = build(), torch.ones(1, 4)
    >>> plan = survey(model, x).plan(0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(apply_(model, plan), folder, plan=plan)
    ...     torch.equal(load(path, build())(x), model(x))
    True
    """
    given = model
    model, plan = _model_and_plan(given, plan)
    folder = files.folder_path(folder)
    example = getattr(given, "example", None) if example is None else example
    remedy = "choose a folder that can be written, on a disk that is not full"
    with failing_as(SaveError, f"cannot save {type(model).__name__} to {folder}", remedy), plain(model) as inner:
        plan = _whole(inner, plan) if from_dense else plan
        _check_pruned(inner, plan)
        files.make_folder(folder)
        _check_ours(folder, overwrite)
        with files.workspace(folder) as fresh:
            opening = _write(inner, plan, fresh, example)
            if _of_huggingface(inner):
                _write_beside(inner, plan, opening, given, fresh, folder)
            _publish(fresh, folder)
    saved = SavedFolder(folder)
    saved.way, saved.note = opening.way, str(opening)
    return saved


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Prune a freshly built dense model as the saved one was, in place, and fill it; returns the model.

    dtypes are those of the file; devices, requires_grad and the training mode are those of `model`; tied tensors are
    tied again. A missing, unexpected or wrongly shaped tensor is an error, and on any error `model` is as before.

    Without `model`, a Hugging Face model is built from `config.json`, on the CPU and in eval mode, without downloads.

    >>> load("no/such/folder", nn.Linear(2, 2))
    Traceback (most recent call last):
    ispasp.errors.SaveError: no/such/folder is not a folder: pass the folder that ispasp.save wrote
    """
    with opened_save(folder) as saved:
        model = build(saved) if model is None else model
        if not isinstance(model, nn.Module):
            raise InputError(f"model is a {type(model).__name__}: pass the dense torch.nn.Module, freshly built")
        with plain(model) as inner:
            name, given = saved.plan.structure.model, type(inner)
            if name not in {cls.__name__ for cls in given.__mro__}:
                raise SaveError(f"{saved.path} holds a pruned {name}, not a {given.__name__}: pass a dense {name}")
            size = sum(slot.tensor.nbytes for slot in _slots(inner).values() if not is_lazy(slot.tensor))
            tensors = saved.tensors(_WIDER * size + _HEADER)
            with all_or_nothing() as undo:
                with fitting(inner):
                    remove_(inner, saved.plan, undo)
                _fill(inner, saved, tensors, undo)
    return model


class _Slot(NamedTuple):
    """A parameter or buffer in its module's table."""

    table: dict[str, Any]
    key: str
    persistent: bool

    @property
    def tensor(self) -> Any:
        return self.table[self.key]


def _slots(model: nn.Module) -> dict[str, _Slot]:
    """All parameters and buffers by name; tied ones appear under each of their names."""
    return {
        f"{path}.{key}" if path else key: _Slot(table, key, key not in module._non_persistent_buffers_set)
        for path, module in model.named_modules(remove_duplicate=False)
        for table in (module._parameters, module._buffers)
        for key, tensor in table.items()
        if tensor is not None
    }


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


def _whole(model: nn.Module, plan: Plan) -> Plan:
    """All plans of a model as one, if `plan` is the last of them."""
    plans = plans_of(model)
    if len(plans) < 2 or plan != plans[-1]:
        return plan
    try:
        whole = reduce(Plan.then, plans)
        for a in whole.structure.attributes:
            found, expected = read_number(model.get_submodule(a.module), a.name), kept_length(a.extent, whole.kept)
            if found != expected:
                raise PlanError(f"{a.module!r} has {a.name}={found}, the plans leave {expected}")
    except (PlanError, AttributeError) as error:
        wrong = f"the {len(plans)} plans of this {type(model).__name__} do not make one ({error})"
        raise PlanError(f"{wrong}: pass from_dense=False, and load it on the model that was pruned last") from error
    return whole


def _check_pruned(model: nn.Module, plan: Plan) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            wrong = f"{path or 'the model'} ({type(module).__name__}) has an extra state, which needs pickle"
            raise SaveError(f"{wrong}: remove get_extra_state, or save it yourself")
    tensors = {name: slot.tensor for name, slot in _slots(model).items()}
    for name, tensor in tensors.items():
        if is_lazy(tensor) or tensor.is_meta:
            raise SaveError(f"{name!r} has no data yet: run the model once, on a real device, before saving it")
    for name, layout in plan.structure.tensors.items():
        axes = layout.axes
        expected = tuple(kept_length(axes[i], plan.kept) if i in axes else n for i, n in enumerate(layout.shape))
        found = tuple(tensors[name].shape) if name in tensors else None
        whole = name not in tensors and expected == layout.shape  # it may be computed: a layer that was not folded
        if found != expected and not whole:
            wrong = f"the plan leaves {name!r} with shape {expected}, {type(model).__name__} has {found or 'none'}"
            raise PlanError(f"{wrong}: save the model that this plan was applied to")


def _check_ours(folder: Path, overwrite: bool) -> None:
    found = [name for name in (*FILES, CODE) if os.path.lexists(folder / name)]
    for name in found:
        if (folder / name).is_dir():
            raise SaveError(f"{folder / name} is a folder, not a file: choose another folder")
    if found and not overwrite and not is_ours(folder):
        names = ", ".join(found)
        raise SaveError(f"{folder} holds {names} that ispasp did not write: choose another, or overwrite=True")


def _of_huggingface(model: nn.Module) -> bool:
    return hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "save_pretrained")


def _write(model: nn.Module, plan: Plan, folder: Path, example: Any) -> Opening:
    """Write everything into a fresh folder. Returns how it opens."""
    texts, opening = {PLAN: plan.to_json()}, Opening("ispasp", call="ispasp.load(folder, model)")
    tensors, ties, unsaved = _tensors(model)

    def write(way: Opening) -> Path:
        """Write the model for one way to open it, over what was written for another."""
        wanted = {**texts, CONFIG: way.config or texts.get(CONFIG, ""), CODE: way.code}
        for name, text in wanted.items():
            files.write_bytes(folder / name, text.encode()) if text else (folder / name).unlink(missing_ok=True)
        every = {**tensors, **way.zeros}
        files.write_tensors(folder / WEIGHTS, every, metadata(texts, ties, unsaved, every, way.config, way.zeros))
        return folder

    if _of_huggingface(model):
        config = write_configs(model, plan, folder)
        configs = (name for name in (CONFIG, GENERATION) if (folder / name).exists())
        texts |= {name: (folder / name).read_text(encoding="utf-8") for name in configs}
        opening = openings(model, plan, config, write, example)
    if opening.way == "ispasp":
        write(opening)
    with files.opened(folder / WEIGHTS):
        pass  # never publish a file that safetensors cannot read, such as one with too large a header
    return opening


def _write_beside(model: Any, plan: Plan, opening: Opening, given: Any, fresh: Path, folder: Path) -> None:
    """Write the model card, and copy the tokenizer of a model that came from a local folder."""
    if replaces(folder / CARD):
        facts, settings = getattr(given, "facts", list), getattr(given, "settings", {})
        files.write_bytes(fresh / CARD, card(model, plan, opening, facts(), options_text(settings)).encode())
    source = Path(str(getattr(model.config, "_name_or_path", "") or "no folder"))
    for name in _BESIDE if (source / CONFIG).is_file() else ():
        if files.is_regular(source / name) and not os.path.lexists(folder / name):
            shutil.copyfile(source / name, fresh / name)


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """Tensors by name, the other names of tied ones, and the dtypes of non-persistent buffers."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    unsaved: dict[str, str] = {}
    storages: set[int] = set()
    for name, slot in _slots(model).items():
        tensor = slot.tensor
        if not slot.persistent:
            unsaved[name] = str(tensor.dtype).removeprefix("torch.")
        elif id(tensor) in names:
            ties[name] = names[id(tensor)]
        else:
            names[id(tensor)] = name
            flat = tensor.detach().cpu().contiguous()
            storage = flat.untyped_storage().data_ptr()  # safetensors refuses two views of one storage
            tensors[name] = flat.clone() if flat.numel() and storage in storages else flat
            storages.add(storage)
    return tensors, ties, unsaved


def _publish(fresh: Path, folder: Path) -> None:
    """Move the new files into place. The first move decides: before it the old save loads, after it the new one.

    transformers never sees new weights with an old config: that one goes first, and the new one comes last.
    """
    old, new = (files.read_bytes(path / CONFIG) if files.is_regular(path / CONFIG) else b"" for path in (folder, fresh))
    if old and old != new:
        (folder / CONFIG).unlink()
    files.publish(fresh / WEIGHTS, folder / WEIGHTS)
    name = WEIGHTS
    try:
        found = {path.name for path in fresh.iterdir() if path.is_file()}
        ours = {*COPIES, CODE, *([CARD] if replaces(folder / CARD) else [])}
        for name in sorted((found | ours) - {WEIGHTS}, key=lambda name: (name == CONFIG, name)):
            if name in found:
                files.publish(fresh / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        files.sync_folder(folder)
    except OSError as error:
        raise SaveError(f"{folder} is saved and loads, but {name} is not renewed ({error}): save it again") from error


def _fill(model: nn.Module, saved: Saved, tensors: Mapping[str, Tensor], undo: Undo) -> None:
    slots = _slots(model)
    persistent = {name: slot for name, slot in slots.items() if slot.persistent}
    files.check_names(set(persistent), {*tensors, *saved.ties}, saved.path, _AS_SAVED)
    for name, other in saved.ties.items():
        slot, source = persistent[name], persistent[other].tensor
        if isinstance(slot.tensor, nn.Parameter) != isinstance(source, nn.Parameter):
            raise SaveError(f"{name!r} and {other!r} are tied in {saved.path}; the model has a parameter and a buffer")
        files.check_tensor(name, tensors[other], slot.tensor, saved.path, _AS_SAVED)
        undo.callback(operator.setitem, slot.table, slot.key, slot.tensor)
        slot.table[slot.key] = source
    filled: dict[int, str] = {}
    for name, value in tensors.items():
        tensor = persistent[name].tensor
        files.check_tensor(name, value, tensor, saved.path, _AS_SAVED)
        if id(tensor) in filled:
            first = filled[id(tensor)]
            raise SaveError(f"{name!r} and {first!r} are tied in the model, not in {saved.path}: untie them")
        filled[id(tensor)] = name
        set_data(tensor, torch.empty_like(tensor.data, dtype=value.dtype).copy_(value.detach()), None, undo)
    for name, dtype in saved.unsaved.items():  # the constructor makes these; repeat a cast, as by .half()
        if name in slots and (tensor := slots[name].tensor).dtype != dtype:
            files.check_dtype(name, dtype, tensor, saved.path, _AS_SAVED)
            set_data(tensor, tensor.data.to(dtype), None, undo)
