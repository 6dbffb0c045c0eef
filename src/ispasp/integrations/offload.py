"""Models that accelerate has spread over devices, host memory and disk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.errors import InputError
from ispasp.graph.trace import named_tensors


@contextmanager
def materialised(model: nn.Module) -> Iterator[bool]:
    """Take accelerate's hooks off a model for a block: real tensors on the CPU, its own forward.

    Undoes `dispatch_model` (`device_map=...`), `cpu_offload` and `disk_offload`; yields whether there was anything to
    undo. The whole model must fit into host memory. At the end, also after an exception, every tensor goes back to its
    device or to host memory, with its new value and size. Tensors that were on disk stay in host memory: files may be
    those of a checkpoint or of a copy of the model.

    >>> from accelerate import cpu_offload
    >>> model = cpu_offload(nn.Linear(2, 3), execution_device="cpu")
    >>> with materialised(model) as changed:
    ...     changed, model.weight.device.type
    (True, 'cpu')
    >>> model.weight.device.type, model(torch.ones(1, 2)).shape
    ('meta', torch.Size([1, 3]))
    """
    hooks = {path: module._hf_hook for path, module in model.named_modules() if hasattr(module, "_hf_hook")}
    if not hooks:
        yield False
        return
    devices = _load(model, hooks)
    methods = {path: _unhooked(model.get_submodule(path)) for path in hooks}
    model.to("cpu")
    try:
        yield True
    finally:
        _put_back(model, hooks, methods, devices)


def _load(model: nn.Module, hooks: Mapping[str, Any]) -> dict[str, torch.device]:
    """Load what hooks keep elsewhere; returns the devices of all other tensors."""
    offloading = [(hook, _names(model, path, hook)) for path, hook in _offloading(hooks)]
    held = {full: (hook.weights_map, name) for hook, names in offloading for name, full in names}
    tensors = named_tensors(model)
    known = {id(tensors[name]) for name in held}  # a module that is used twice has a second name
    devices = {name: tensor.device for name, tensor in tensors.items() if id(tensor) not in known}
    lost = [name for name, device in devices.items() if device.type == "meta"]
    if lost:
        raise InputError(f"{lost[0]!r} is on the meta device, no hook has its value: load the model's weights first")
    for name, (weights, key) in held.items():
        if tensors[name].is_meta:
            _accelerate().set_module_tensor_to_device(model, name, "cpu", value=weights[key])
    _tie(model, held)
    return devices


def _unhooked(module: nn.Module) -> dict[str, Any]:
    """Remove a module's hook. Returns the methods that accelerate guards, such as `to`."""
    before = dict(vars(module))
    del module._hf_hook  # first, because removing a hook would load everything once more
    import_module("accelerate.hooks").remove_hook_from_module(module)
    gone = before.keys() - vars(module).keys() - {"_hf_hook", "_old_forward"}
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward  # accelerate leaves it bound to this object, which is wrong in a copy of its attributes
    return {name: before[name] for name in gone}


def _put_back(
    model: nn.Module, hooks: Mapping[str, Any], methods: Mapping[str, Any], devices: Mapping[str, torch.device]
) -> None:
    utils, modules = _accelerate(), dict(model.named_modules())
    for name, tensor in named_tensors(model).items():
        _move(tensor, devices.get(name, tensor.device))
    tied = utils.find_tied_parameters(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    pointers: dict[int, dict[Any, Tensor]] = {named[name].data_ptr(): {} for group in tied for name in group}
    add = import_module("accelerate.hooks").add_hook_to_module
    for path, hook in hooks.items():
        if path in modules:
            add(modules[path], _renewed(hook, pointers))
            for name, method in methods[path].items():
                setattr(modules[path], name, method)
    utils.retie_parameters(model, tied)


def _renewed(old: Any, pointers: Any) -> Any:
    """A hook like the old one, for the new tensors."""
    hook = copy(old)
    if hasattr(old, "hooks"):
        hook.hooks = tuple(_renewed(each, pointers) for each in old.hooks)
    if getattr(old, "offload", False):
        hook.weights_map = None  # accelerate takes the tensors that it finds
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
    which = {"include_buffers": hook.offload_buffers, "recurse": hook.place_submodules, "remove_non_persistent": True}
    tensors = _accelerate().named_module_tensors(model.get_submodule(path), **which)
    return [(name, f"{path}.{name}" if path else name) for name, _ in tensors]


def _move(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        grad, tensor.grad = tensor.grad, None  # a gradient must fit its tensor at every moment
        tensor.data = tensor.data.to(device)
        tensor.grad = None if grad is None else grad.to(device)


def _tie(model: nn.Module, fresh: Collection[str]) -> None:
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


def _accelerate() -> Any:
    return import_module("accelerate.utils")  # slow to import
