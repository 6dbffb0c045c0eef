"""A pruned model as its own transformers class, resized before its weights are loaded.

`ispasp.save` copies this file into the folder of a model whose widths a config cannot say. It needs torch and
transformers only. The config holds the dense sizes, and in `pruned_widths` what differs from them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_SPEC = "_heterogeneity_spec"  # of `per_layer_config`: while it is set, transformers refuses to read the dense sizes


def pruned(cls: Any) -> Any:
    """Make the class that builds `cls` from the dense config, then resizes it. Other configs build `cls` itself.

    It has the name of `cls`, by which pipelines know what a model can do.
    """

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        table = getattr(config, "pruned_widths", None) or {}
        for name, number in table.get("dense", {}).items():
            _set_number(config, name, number)
        spec = vars(config).pop(_SPEC, None)
        try:
            cls.__init__(self, config, *args, **kwargs)
        finally:
            if spec is not None:
                vars(config)[_SPEC] = spec
        resize(self, table)

    return type(cls.__name__, (cls,), {"__init__": build, "__module__": __name__, "__doc__": cls.__doc__})


def resize(model: nn.Module, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Cut tensors to their sizes, add biases, and correct the numbers that forwards read."""
    modules = dict(model.named_modules(remove_duplicate=False))
    prefix = str(getattr(model, "base_model_prefix", ""))

    def find(path: str) -> Any:
        """A module by its path in the saved model: a model with another head, or none, may have it elsewhere."""
        paths = (path, path.removeprefix(f"{prefix}.") if path != prefix else "", f"{prefix}.{path}")
        return next((modules[each] for each in paths if each in modules), None)

    for name, shape in table.get("tensors", {}).items():
        path, _, leaf = name.rpartition(".")
        module = find(path)
        tensor = None if module is None else getattr(module, leaf)
        if module is not None and tensor is None:
            module.register_parameter(leaf, nn.Parameter(module.weight.new_zeros(shape)))
        elif tensor is not None and tuple(tensor.shape) != tuple(shape):  # else tied, and done
            small = tensor.data[tuple(slice(size) for size in shape)].clone(memory_format=torch.contiguous_format)
            if isinstance(tensor, nn.Parameter):
                tensor.data = small
            else:
                module._buffers[leaf] = small
    for path, numbers in table.get("attributes", {}).items():
        module = find(path)
        for name, number in numbers.items() if module is not None else ():
            holder, _, key = name.rpartition(".")
            if holder:  # a config, which other modules may share
                setattr(module, holder, copy.copy(getattr(module, holder)))
            _set_number(getattr(module, holder) if holder else module, key, number)


def _set_number(holder: Any, name: str, number: int) -> None:
    """Set `sizes` or `sizes[1]`."""
    found = re.fullmatch(r"(\w+)\[(\d+)\]", name)
    if found is None:
        setattr(holder, name, number)
        return
    items = list(getattr(holder, found[1]))
    items[int(found[2])] = number
    setattr(holder, found[1], type(getattr(holder, found[1]))(items))
