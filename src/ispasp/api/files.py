"""The files of a saved model, shared by saving and loading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PLAN, CONFIG, GENERATION, WEIGHTS = "plan.json", "config.json", "generation_config.json", "model.safetensors"
FILES = (PLAN, CONFIG, GENERATION, WEIGHTS)
COPIES = FILES[:-1]  # of what the weights hold in their metadata
FORMAT = "ispasp"

Slot = tuple[dict[str, Any], str]  # a module's table of parameters or buffers, and the key in it


def slots(model: nn.Module) -> Iterator[tuple[str, Slot, bool]]:
    """Every parameter and buffer: name, where it hangs, whether it is saved; tied ones under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield prefix + key, (table, key), key not in module._non_persistent_buffers_set


def digest(tensors: Mapping[str, Tensor], about: str) -> str:
    """Checksum of tensors (names, dtypes, shapes, bytes) and of what is said about them."""
    sha = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
