"""`ispasp.save`: a pruned model as safetensors and JSON. Nothing is pickled."""

from __future__ import annotations

import copy
import os
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ispasp.api.files import CONFIG, COPIES, FILES, FORMAT, GENERATION, PLAN, WEIGHTS, slots
from ispasp.api.history import plans_of
from ispasp.api.stored import metadata_of
from ispasp.errors import InputError, IspaspError, PlanError, SaveError
from ispasp.files.reading import folder_path, opened
from ispasp.files.writing import make_folder, publish, sync_folder, workspace, write_bytes, write_tensors
from ispasp.graph.wrappers import plain
from ispasp.surgery import attributes
from ispasp.types.layout import full_length, kept_length
from ispasp.types.plan import Plan


class ModelWithPlan(Protocol):
    """What pruning returns: the pruned model and the plan that made it."""

    @property
    def model(self) -> nn.Module:
        """The pruned model."""

    @property
    def plan(self) -> Plan:
        """The plan that was applied to it."""


def save(
    model: nn.Module | ModelWithPlan | tuple[nn.Module, Plan],
    folder: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    overwrite: bool = False,
    from_dense: bool = True,
) -> Path:
    """Write a pruned model and its plan to a folder; returns the folder.

    Takes what `prune` returns, or a model pruned by `apply_` with its `plan`, side by side or as a tuple. Writes
    `model.safetensors` (parameters and persistent buffers, tied ones once) and `plan.json`; for a Hugging Face model
    also `config.json` (of the dense model) and `generation_config.json`. All or nothing, even if the process is killed:
    `model.safetensors` holds all of it, and is replaced in one step; the other files are copies. An earlier save is
    replaced and other files in the folder stay, but a dense checkpoint or config of the same name is replaced only with
    `overwrite=True`. Saving a model twice gives the same bytes.

    A model that was pruned several times is saved with all its plans as one, so that it loads on the dense model;
    `from_dense=False` writes the last plan alone, which fits the model that it was made for.

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
    model, plan = _model_and_plan(model, plan)
    folder = folder_path(folder)
    try:
        with plain(model) as inner:
            plan = _whole(inner, plan) if from_dense else plan
            _check_pruned(inner, plan)
            make_folder(folder)
            _check_ours(folder, overwrite)
            with workspace(folder) as fresh:
                _write(inner, plan, fresh)
                _publish(fresh, folder)
    except IspaspError:
        raise
    except (OSError, SafetensorError, ValueError, RuntimeError, TypeError) as error:
        raise SaveError(
            f"cannot save {type(model).__name__} to {folder} ({error}): choose a folder that can be written, on a disk "
            "that is not full"
        ) from error
    return folder


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
            found, expected = attributes.read(model.get_submodule(a.module), a.name), kept_length(a.extent, whole.kept)
            if found != expected:
                raise PlanError(f"{a.module!r} has {a.name}={found}, the plans leave {expected}")
    except (PlanError, AttributeError) as error:
        raise PlanError(
            f"the {len(plans)} plans of this {type(model).__name__} do not make one ({error}): pass from_dense=False, "
            "and load it on the model that was pruned last"
        ) from error
    return whole


def _check_pruned(model: nn.Module, plan: Plan) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise SaveError(f"{path or 'the model'} ({type(module).__name__}) has an extra state, which only "
                            "pickle could store: remove its get_extra_state, or save it yourself")  # fmt: skip
    tensors = {name: table[key] for name, (table, key), _ in slots(model)}
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
                "save the model that this plan was applied to"
            )


def _check_ours(folder: Path, overwrite: bool) -> None:
    found = [name for name in FILES if os.path.lexists(folder / name)]
    for name in found:
        if (folder / name).is_dir():
            raise SaveError(f"{folder / name} is a folder, in the place of a file: choose another folder")
    if not found or overwrite:
        return
    try:
        with opened(folder / WEIGHTS) as file:
            ours = file.metadata.get("format") == FORMAT
    except SaveError:
        ours = False
    if not ours:
        raise SaveError(
            f"{folder} holds {', '.join(found)} that ispasp did not write: choose another folder, or overwrite=True"
        )


def _write(model: nn.Module, plan: Plan, folder: Path) -> None:
    texts = {PLAN: plan.to_json()}
    if hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "save_pretrained"):
        _write_config(model, plan, folder)
        for name in (CONFIG, GENERATION):
            if (folder / name).exists():
                texts[name] = (folder / name).read_text(encoding="utf-8")
    for name, text in texts.items():
        write_bytes(folder / name, text.encode())
    tensors, ties, unsaved = _tensors(model)
    write_tensors(folder / WEIGHTS, tensors, metadata_of(texts, ties, unsaved, tensors))
    with opened(folder / WEIGHTS):
        pass  # what safetensors would refuse to read, such as a header that is too large, must not be published


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """Tensors by name, second names of tied ones, and the dtypes of buffers that are not saved."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    unsaved: dict[str, str] = {}
    places: set[int] = set()
    for name, (table, key), persistent in slots(model):
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
    return tensors, ties, unsaved


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


def _publish(fresh: Path, folder: Path) -> None:
    """Put the new files in place. The first step decides: before it the old save loads, after it the new one."""
    publish(fresh / WEIGHTS, folder / WEIGHTS)
    try:
        for name in COPIES:
            if (fresh / name).exists():
                publish(fresh / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        sync_folder(folder)
    except OSError as error:
        raise SaveError(f"{folder} is saved and loads, but {name} is not renewed ({error}): save it again") from error
