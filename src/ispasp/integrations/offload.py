"""Models that accelerate has spread over devices, host memory and disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.errors import InputError
from ispasp.integrations.weights import Source, Weights, source_of, stored


@contextmanager
def materialised(model: nn.Module) -> Iterator[bool]:
    """A block in which a model under accelerate's hooks is a plain one: real tensors on the CPU, its own forward.

    Works on what `dispatch_model` (`device_map=...`), `cpu_offload` and `disk_offload` have done; yields whether there
    was anything to do. The whole model must fit into host memory. Afterwards, also after an exception, every tensor is
    where it was, with the value and the size that it then has: on its device, in host memory, or on disk. What has
    changed on disk is written to a new folder `ispasp-*` inside the offload folder, because a copy of the model may
    still need the old files; without an offload folder (weights read from a checkpoint) it stays in host memory.
    Weights that are tied come back tied from host memory, and equal but separate from disk.

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
    taken = _take_off(model)
    try:
        yield True
    finally:
        _put_back(model, taken)


@dataclass(frozen=True, eq=False)
class _Taken:
    """What accelerate had put on a model: by module, its hook and guarded methods; by tensor, its device or source."""

    hooks: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]
    devices: Mapping[str, torch.device]
    sources: Mapping[str, Source]


def _take_off(model: nn.Module) -> _Taken:
    hooks = {path: module._hf_hook for path, module in model.named_modules() if hasattr(module, "_hf_hook")}
    sources = {
        full: source_of(hook.weights_map, name)
        for path, hook in _offloading(hooks)
        for name, full in _names(model, path, hook)
    }
    tensors = _tensors(model)
    known = {id(tensors[name]) for name in sources}  # a module that is used twice has a second name
    devices = {name: tensor.device for name, tensor in tensors.items() if id(tensor) not in known}
    lost = [name for name, device in devices.items() if device.type == "meta"]
    if lost:
        raise InputError(
            f"{lost[0]!r} is on the meta device, and no hook has its value: load the model's weights first"
        )
    put = import_module("accelerate.utils").set_module_tensor_to_device
    for name, (mapping, key) in sources.items():
        if tensors[name].is_meta:
            put(model, name, "cpu", value=mapping[key])
    _tie(model, sources)
    methods = {path: _unhooked(model.get_submodule(path)) for path in hooks}
    model.to("cpu")
    return _Taken(hooks, methods, devices, sources)


def _unhooked(module: nn.Module) -> dict[str, Any]:
    """Take the hook off a module; returns the methods that accelerate guards, such as `to`."""
    before = dict(vars(module))
    del module._hf_hook  # first, because a hook that is removed would load everything once more
    import_module("accelerate.hooks").remove_hook_from_module(module)
    gone = before.keys() - vars(module).keys() - {"_hf_hook", "_old_forward"}
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward  # what accelerate leaves: bound to this object, so wrong in a copy of its attributes
    return {name: before[name] for name in gone}


def _put_back(model: nn.Module, taken: _Taken) -> None:
    utils = import_module("accelerate.utils")
    modules = dict(model.named_modules())
    hooks = {path: hook for path, hook in taken.hooks.items() if path in modules}
    values, old = _offloaded(model, hooks, taken.sources)
    sources = stored(values, old)  # may fail, so it comes first: until here the model is a plain one, and works
    for name, tensor in _tensors(model).items():
        _move(tensor, taken.devices.get(name, tensor.device))
    tied = utils.find_tied_parameters(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    pointers: dict[int, dict[Any, Tensor]] = {named[name].data_ptr(): {} for group in tied for name in group}
    for path, hook in hooks.items():
        add = import_module("accelerate.hooks").add_hook_to_module
        add(modules[path], _renewed(hook, model, path, sources, pointers))
        for name, method in taken.methods[path].items():
            setattr(modules[path], name, method)
    utils.retie_parameters(model, tied)


def _offloaded(
    model: nn.Module, hooks: Mapping[str, Any], sources: Mapping[str, Source]
) -> tuple[dict[str, Tensor], dict[str, Source]]:
    """The values that hooks offload, and the source of each; a tensor that is new goes where its neighbours are."""
    tensors, values, old = _tensors(model), {}, {}
    for path, hook in _offloading(hooks):
        names = [full for _, full in _names(model, path, hook)]
        near = next((sources[full] for full in names if full in sources), ({}, ""))
        for full in names:
            values[full] = tensors[full].detach().cpu()
            old[full] = sources.get(full, near)
    return values, old


def _renewed(old: Any, model: nn.Module, path: str, sources: Mapping[str, Source], pointers: Any) -> Any:
    """A hook like the old one, for the tensors that there are now."""
    hook = copy(old)
    if hasattr(old, "hooks"):
        hook.hooks = tuple(_renewed(each, model, path, sources, pointers) for each in old.hooks)
    if getattr(old, "offload", False):
        hook.weights_map = Weights({name: sources[full] for name, full in _names(model, path, old)})
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
    tensors = import_module("accelerate.utils").named_module_tensors(
        model.get_submodule(path),
        include_buffers=hook.offload_buffers,
        recurse=hook.place_submodules,
        remove_non_persistent=True,
    )
    return [(name, f"{path}.{name}" if path else name) for name, _ in tensors]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _move(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        grad, tensor.grad = tensor.grad, None  # a gradient must fit its tensor at every moment
        tensor.data = tensor.data.to(device)
        tensor.grad = None if grad is None else grad.to(device)


def _tie(model: nn.Module, fresh: Mapping[str, Source]) -> None:
    """Make one parameter of those that share their memory; accelerate has made one for each name."""
    first: dict[Any, nn.Parameter] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in sorted(named.items(), key=lambda item: item[0] in fresh):  # others are not replaced
        if parameter.is_meta or parameter.numel() == 0:
            continue
        place = (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
        path, _, leaf = name.rpartition(".")
        if first.setdefault(place, parameter) is not parameter and name in fresh:
            model.get_submodule(path)._parameters[leaf] = first[place]
