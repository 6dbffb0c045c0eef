"""Models that accelerate has spread over devices, host memory and disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ispasp.errors import InputError, SaveError
from ispasp.graph.trace import named_tensors

Source = tuple[Mapping[str, Tensor], str]  # a mapping that holds an offloaded tensor, and its key there
_FRESH = "ispasp-"  # prefix of folders with new values


@contextmanager
def materialised(model: nn.Module) -> Iterator[bool]:
    """Take accelerate's hooks off a model for a block: real tensors on the CPU, its own forward.

    Undoes `dispatch_model` (`device_map=...`), `cpu_offload` and `disk_offload`; yields whether there was anything to
    undo. The whole model must fit into host memory. At the end, also after an exception, every tensor goes back to its
    device, to host memory or to disk, with its new value and size. Tensors that changed on disk are written to a new
    folder `ispasp-*` inside the offload folder, because a copy of the model may still need the old files; without an
    offload folder (weights read from a checkpoint) they stay in host memory. Tied weights come back tied from host
    memory, and equal but separate from disk.

    >>> from accelerate import cpu_offload
    >>> model = cpu_offload(nn.Linear(2, 3), execution_device="cpu")
    >>> with materialised(model) as changed:
    ...     changed, model.weight.device.type
    (True, 'cpu')
    >>> model.weight.device.type, model(torch.ones(1, 2)).shape
    ('meta', torch.Size([1, 3]))
    """
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        yield False
        return
    dispatch = _take_off(model)
    try:
        yield True
    finally:
        _put_back(model, dispatch)


@dataclass(frozen=True, eq=False)
class _Dispatch:
    """State that accelerate put on a model: hooks and guarded methods by module, devices or sources by tensor."""

    hooks: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]
    devices: Mapping[str, torch.device]
    sources: Mapping[str, Source]


def _take_off(model: nn.Module) -> _Dispatch:
    hooks = {path: module._hf_hook for path, module in model.named_modules() if hasattr(module, "_hf_hook")}
    sources = {
        full: _source_of(hook.weights_map, name)
        for path, hook in _offloading(hooks)
        for name, full in _names(model, path, hook)
    }
    tensors = named_tensors(model)
    known = {id(tensors[name]) for name in sources}  # a module that is used twice has a second name
    devices = {name: tensor.device for name, tensor in tensors.items() if id(tensor) not in known}
    lost = [name for name, device in devices.items() if device.type == "meta"]
    if lost:
        raise InputError(
            f"{lost[0]!r} is on the meta device, and no hook has its value: load the model's weights first"
        )
    put = _accelerate().set_module_tensor_to_device
    for name, (mapping, key) in sources.items():
        if tensors[name].is_meta:
            put(model, name, "cpu", value=mapping[key])
    _tie(model, sources)
    methods = {path: _unhooked(model.get_submodule(path)) for path in hooks}
    model.to("cpu")
    return _Dispatch(hooks, methods, devices, sources)


def _unhooked(module: nn.Module) -> dict[str, Any]:
    """Remove a module's hook. Returns the methods that accelerate guards, such as `to`."""
    before = dict(vars(module))
    del module._hf_hook  # first, because removing a hook would load everything once more
    import_module("accelerate.hooks").remove_hook_from_module(module)
    gone = before.keys() - vars(module).keys() - {"_hf_hook", "_old_forward"}
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward  # accelerate leaves it bound to this object, which is wrong in a copy of its attributes
    return {name: before[name] for name in gone}


def _put_back(model: nn.Module, dispatch: _Dispatch) -> None:
    utils, modules = _accelerate(), dict(model.named_modules())
    hooks = {path: hook for path, hook in dispatch.hooks.items() if path in modules}
    sources = _stored(model, hooks, dispatch.sources)  # may fail, so it comes first: the model still works
    for name, tensor in named_tensors(model).items():
        _move(tensor, dispatch.devices.get(name, tensor.device))
    tied = utils.find_tied_parameters(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    pointers: dict[int, dict[Any, Tensor]] = {named[name].data_ptr(): {} for group in tied for name in group}
    add = import_module("accelerate.hooks").add_hook_to_module
    for path, hook in hooks.items():
        add(modules[path], _renewed(hook, model, path, sources, pointers))
        for name, method in dispatch.methods[path].items():
            setattr(modules[path], name, method)
    utils.retie_parameters(model, tied)


def _renewed(old: Any, model: nn.Module, path: str, sources: Mapping[str, Source], pointers: Any) -> Any:
    """A hook like the old one, for the new tensors."""
    hook = copy(old)
    if hasattr(old, "hooks"):
        hook.hooks = tuple(_renewed(each, model, path, sources, pointers) for each in old.hooks)
    if getattr(old, "offload", False):
        hook.weights_map = _Weights({name: sources[full] for name, full in _names(model, path, old)})
    if getattr(old, "tied_params_map", None) is not None:
        hook.tied_params_map, hook.tied_params_names = pointers, set()
    return hook


def _offloading(hooks: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All hooks that offload, with the path of their module."""
    for path, hook in hooks.items():
        if hasattr(hook, "hooks"):
            yield from ((path, inner) for each in hook.hooks for _, inner in _offloading({path: each}))
        elif getattr(hook, "offload", False):
            yield path, hook


def _names(model: nn.Module, path: str, hook: Any) -> list[tuple[str, str]]:
    """Names of the tensors that a hook offloads: in its module, and in the model."""
    tensors = _accelerate().named_module_tensors(
        model.get_submodule(path),
        include_buffers=hook.offload_buffers,
        recurse=hook.place_submodules,
        remove_non_persistent=True,
    )
    return [(name, f"{path}.{name}" if path else name) for name, _ in tensors]


def _move(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        grad, tensor.grad = tensor.grad, None  # a gradient must fit its tensor at every moment
        tensor.data = tensor.data.to(device)
        tensor.grad = None if grad is None else grad.to(device)


def _tie(model: nn.Module, fresh: Mapping[str, Source]) -> None:
    """Make parameters that share their memory one again: accelerate has made one for each name."""
    first: dict[Any, nn.Parameter] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in sorted(named.items(), key=lambda item: item[0] in fresh):  # others are not replaced
        if parameter.is_meta or parameter.numel() == 0:
            continue
        place = (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
        path, _, leaf = name.rpartition(".")
        if first.setdefault(place, parameter) is not parameter and name in fresh:
            model.get_submodule(path)._parameters[leaf] = first[place]


@final
class _Weights(Mapping[str, Tensor]):
    """The offloaded tensors of one hook, each read from its own source on demand."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources

    def __getitem__(self, name: str) -> Tensor:
        mapping, key = self.sources[name]
        return mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


def _source_of(mapping: Any, name: str) -> Source:
    """The source behind the mappings that accelerate puts around it."""
    while isinstance(mapping, _accelerate().PrefixedDataset):
        mapping, name = mapping.dataset, f"{mapping.prefix}{name}"
    return mapping.sources[name] if isinstance(mapping, _Weights) else (mapping, name)


def _stored(model: nn.Module, hooks: Mapping[str, Any], old: Mapping[str, Source]) -> dict[str, Source]:
    """Put the values that hooks offload where the old ones were; a new tensor goes where its neighbours are.

    Values on disk that have not changed stay there. Changed ones are written to a new folder inside the old one, or
    stay in memory if there is only an index of files, as for a checkpoint.
    """
    found: dict[str, Source] = {}
    memory: dict[str, Tensor] = {}
    changed: dict[Path, dict[str, Tensor]] = {}
    loaders: dict[int, Any] = {}
    tensors, kind = named_tensors(model), _accelerate().OffloadedWeightsLoader
    for path, hook in _offloading(hooks):
        names = [full for _, full in _names(model, path, hook)]
        near: Any = next((old[full] for full in names if full in old), ({}, ""))
        for name in names:
            value = tensors[name].detach().cpu()
            loader, key = old.get(name, near)
            on_disk = isinstance(loader, kind) and key not in loader.state_dict
            if on_disk and _identical(loader[key], value):
                if id(loader) not in loaders:  # the same files, without old weights that it may hold in memory
                    loaders[id(loader)] = kind(save_folder=loader.save_folder, index=loader.index, device=loader.device)
                found[name] = (loaders[id(loader)], key)
            elif on_disk and loader.save_folder is not None:
                folder = Path(loader.save_folder)
                outermost = folder.parent if folder.name.startswith(_FRESH) else folder  # an earlier pruning wrote it
                changed.setdefault(outermost, {})[name] = value
            else:
                memory[name], found[name] = value, (memory, name)
    for folder, values in changed.items():
        written = _written(folder, values)
        found.update({name: (written, name) for name in values})
    return found


def _accelerate() -> Any:
    return import_module("accelerate.utils")  # slow to import


def _identical(old: Tensor, value: Tensor) -> bool:
    """Whether two tensors have the same bytes: NaN equals NaN, and every dtype can be compared."""
    old = old.to("cpu", value.dtype)
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (old, value))
    return old.shape == value.shape and torch.equal(a, b)


def _written(folder: Path, values: dict[str, Tensor]) -> Any:
    fresh = None
    try:
        fresh = tempfile.mkdtemp(prefix=_FRESH, dir=folder)
        _accelerate().offload_state_dict(fresh, values)
        return _accelerate().OffloadedWeightsLoader(save_folder=fresh)
    except OSError as error:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        raise SaveError(
            f"the new weights cannot be written to {str(folder)!r} ({error}): the model is now a plain one in host "
            "memory; make room, and offload it again"
        ) from error
