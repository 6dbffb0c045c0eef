"""Where accelerate keeps the values of offloaded tensors: found, and put anew when they have changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ispasp.errors import SaveError

Source = tuple[Mapping[str, Tensor], str]  # who has the value of an offloaded tensor, and under which name
_FRESH = "ispasp-"  # folders of new values begin with this


@final
class Weights(Mapping[str, Tensor]):
    """The offloaded tensors of one hook, each from its own source; made when it is asked for.

    >>> Weights({"bias": ({"0.bias": torch.ones(2)}, "0.bias")})["bias"]
    tensor([1., 1.])
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        """Take sources by the names that tensors have in their module."""
        self.sources = sources

    def __getitem__(self, name: str) -> Tensor:
        """The value, read from disk if it is there."""
        mapping, key = self.sources[name]
        return mapping[key]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.sources)

    def __len__(self) -> int:
        """How many tensors are offloaded."""
        return len(self.sources)


def source_of(mapping: Any, name: str) -> Source:
    """Who really has the value behind the mappings that accelerate puts around it.

    >>> from accelerate.utils import PrefixedDataset
    >>> source_of(PrefixedDataset({"0.bias": torch.ones(2)}, "0."), "bias")
    ({'0.bias': tensor([1., 1.])}, '0.bias')
    """
    while isinstance(mapping, import_module("accelerate.utils").PrefixedDataset):
        mapping, name = mapping.dataset, f"{mapping.prefix}{name}"
    return mapping.sources[name] if isinstance(mapping, Weights) else (mapping, name)


def stored(values: Mapping[str, Tensor], old: Mapping[str, Source]) -> dict[str, Source]:
    """Put values where those were that they replace: `old[name]` is the source of that one.

    What is on disk and has not changed stays there. What has changed is written to a new folder inside the old one,
    which others may still need; if nothing but an index of files is known, as for a checkpoint, it stays in memory.

    >>> sources = stored({"bias": torch.ones(1)}, {"bias": ({"bias": torch.ones(2)}, "bias")})
    >>> Weights(sources)["bias"]
    tensor([1.])
    """
    found: dict[str, Source] = {}
    memory: dict[str, Tensor] = {}
    files: dict[Path, dict[str, Tensor]] = {}
    loaders: dict[int, Any] = {}
    for name, value in values.items():
        mapping, key = old[name]
        if _on_disk(old[name]) and _identical(mapping[key], value):
            loader = loaders.setdefault(id(mapping), _without_memory(mapping))
            found[name] = (loader, key)
        elif _on_disk(old[name]) and mapping.save_folder is not None:  # type: ignore[attr-defined]
            files.setdefault(_outermost(mapping), {})[name] = value
        else:
            memory[name] = value
            found[name] = (memory, name)
    for folder, changed in files.items():
        loader = _written(folder, changed)
        found.update({name: (loader, name) for name in changed})
    return found


def _on_disk(source: Source) -> bool:
    mapping: Any = source[0]
    return isinstance(mapping, import_module("accelerate.utils").OffloadedWeightsLoader) and (
        source[1] not in mapping.state_dict
    )


def _without_memory(loader: Any) -> Any:
    """The same files; the given loader may also hold old weights in memory, which would never be freed."""
    kind = import_module("accelerate.utils").OffloadedWeightsLoader
    return kind(save_folder=loader.save_folder, index=loader.index, device=loader.device)


def _identical(old: Tensor, value: Tensor) -> bool:
    old = old.to("cpu", value.dtype)
    return old.shape == value.shape and torch.equal(_bytes(old), _bytes(value))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)  # NaN equals NaN, and every dtype can be compared


def _outermost(loader: Any) -> Path:
    folder = Path(loader.save_folder)
    return folder.parent if folder.name.startswith(_FRESH) else folder  # written by a pruning before this one


def _written(folder: Path, values: dict[str, Tensor]) -> Any:
    utils = import_module("accelerate.utils")
    fresh = None
    try:
        fresh = tempfile.mkdtemp(prefix=_FRESH, dir=folder)
        utils.offload_state_dict(fresh, values)
        return utils.OffloadedWeightsLoader(save_folder=fresh)
    except OSError as error:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        raise SaveError(
            f"the new weights cannot be written to {str(folder)!r} ({error}): the model is now a plain one in host "
            "memory; make room, and offload it again"
        ) from error
