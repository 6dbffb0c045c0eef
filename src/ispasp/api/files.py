"""The files of a saved model, shared by saving and loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

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
