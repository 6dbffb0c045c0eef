"""Numbers that a module's forward reads: get and set them by name, and undo it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

_NAME = re.compile(r"(?:(?P<config>\w+)\.)?(?P<name>\w+)(?:\[(?P<index>\d+)\])?")


def numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Every whole number among a module's attributes: plain, in lists and tuples, and in its config.

    >>> class M(nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.num_heads = 4; self.sizes = (2, 3)
    >>> sorted(numbers(M()))
    [('num_heads', 4), ('sizes[0]', 2), ('sizes[1]', 3)]
    """
    for name, value in _own(module).items():
        yield from _numbers(name, value)
        if "config" in name and hasattr(value, "__dict__"):
            for key, inner in vars(value).items():
                if not key.startswith("_"):
                    yield from _numbers(f"{name}.{key}", inner)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, (list, tuple)) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        for index, item in enumerate(value):
            yield f"{name}[{index}]", item


def read(module: nn.Module, name: str) -> int | None:
    """The number of that name, or None."""
    found = _NAME.fullmatch(name)
    holder: Any = module if not found or not found["config"] else getattr(module, found["config"], None)
    value = getattr(holder, found["name"], None) if found else None
    if found and found["index"] is not None:
        index = int(found["index"])
        value = value[index] if isinstance(value, (list, tuple)) and index < len(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def write(module: nn.Module, name: str, number: int) -> None:
    """Set the number; a config is copied first, for other modules share it, and so is a list."""
    found = _NAME.fullmatch(name)
    assert found is not None  # noqa: S101  # names come from `numbers`
    holder: Any = module
    if found["config"]:
        holder = copy.copy(getattr(module, found["config"]))
        setattr(module, found["config"], holder)
    value: Any = number
    if found["index"] is not None:
        items = list(getattr(holder, found["name"]))
        items[int(found["index"])] = number
        value = type(getattr(holder, found["name"]))(items)
    setattr(holder, found["name"], value)
