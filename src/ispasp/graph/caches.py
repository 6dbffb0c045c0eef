"""Decoders return a cache of keys and values unless told otherwise; pruning looks at whole sequences and needs none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ispasp.errors import InputError

_CACHES = ("past_key_values", "past_key_value", "cache_params")


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """`use_cache` is off in every config that the model's modules hold, and as before afterwards.

    >>> class Config: use_cache = True
    >>> net = nn.Identity(); net.config = Config()
    >>> with without_cache(net):
    ...     net.config.use_cache
    False
    >>> net.config.use_cache
    True
    """
    changed: list[Any] = []
    try:
        for config in _configs(model):
            if getattr(config, "use_cache", False) is True:
                changed.append(config)
                config.use_cache = False
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _configs(model: nn.Module) -> list[Any]:
    """The configs of all modules, and the configs inside them, each once."""
    found: dict[int, Any] = {}
    waiting = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in found or isinstance(config, (type, dict)) or not hasattr(config, "__dict__"):
            continue
        found[id(config)] = config
        waiting += [value for name, value in vars(config).items() if name.endswith("config")]
    return list(found.values())


def without_cache_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs without a cache: `use_cache` is off and empty caches are left out; a filled one is refused.

    >>> without_cache_inputs({"input_ids": 1, "use_cache": True, "past_key_values": None})
    {'input_ids': 1, 'use_cache': False}
    """
    inputs = {name: False if name == "use_cache" else value for name, value in batch.items()}
    for name in _CACHES:
        cache = inputs.pop(name, None)
        if cache is not None and _length(cache) != 0:
            raise InputError(f"the batch holds a filled cache, {name!r}: leave it out, and pass whole sequences")
    return inputs


def _length(cache: Any) -> int:
    """Number of positions that a cache holds, 1 where that cannot be told."""
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    return len(cache) if hasattr(cache, "__len__") else 1
