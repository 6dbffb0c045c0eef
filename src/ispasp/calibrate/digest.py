"""Digests: whether two processes hold the same tensors and the same settings, told in a few bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ispasp.errors import InputError

_CHUNK = 1 << 24  # elements that are copied from an accelerator at a time
_DEEPEST = 8
_LINK = "the same tensor as "


def tensor_facts(model: nn.Module) -> dict[str, str]:
    """Name of every parameter and buffer -> its dtype, shape and a digest of its bytes.

    Devices do not count. A tensor with several names is read once; the other names refer to the first.

    >>> tensor_facts(nn.Linear(2, 1, bias=False))
    {'weight': 'float32 [1, 2] sha256:...'}
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, tensor in _named(model):
        known = first.setdefault(id(tensor), name)
        found[name] = _tensor(name, tensor) if known == name else f"{_LINK}{known!r}"
    return found


def module_facts(model: nn.Module) -> dict[str, str]:
    """Path of every module -> the name of its class.

    >>> module_facts(nn.Sequential(nn.ReLU()))
    {'': 'Sequential', '0': 'ReLU'}
    """
    return {path: type(module).__qualname__ for path, module in model.named_modules(remove_duplicate=False)}


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it, so that two of them are equal if they mean the same.

    Arrays become lists and objects their attributes. Of a function only that there is one is known: processes have
    functions of their own.

    >>> plain({"fc*": torch.tensor([1, 2])}), plain(0.5), plain(len)
    ([['fc*', [1, 2]]], 0.5, 'a function')
    """
    if value is None or isinstance(value, (bool, str, Real)):
        return _number(value) if isinstance(value, Real) else value
    if depth > _DEEPEST or isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return f"a {type(value).__qualname__}"
    if hasattr(value, "tolist") and not isinstance(value, type):
        return plain(value.tolist(), depth + 1)
    if isinstance(value, Mapping):
        return [[plain(key, depth + 1), plain(item, depth + 1)] for key, item in value.items()]
    if isinstance(value, Collection) and not isinstance(value, (bytes, bytearray)):
        items = [plain(item, depth + 1) for item in value]
        return sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
    return _object(value, depth)


def digest(value: Any) -> str:
    """The digest of anything JSON can hold.

    >>> digest({"keep": 0.5}) == digest({"keep": 0.25})
    False
    """
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _number(value: Real) -> bool | int | float:
    if isinstance(value, bool):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _object(value: Any, depth: int) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        content = {f.name: plain(getattr(value, f.name, None), depth + 1) for f in fields(value)}
    elif callable(value):
        return "a function"
    else:
        content = {name: plain(item, depth + 1) for name, item in getattr(value, "__dict__", {}).items()}
    return {"class": type(value).__qualname__, **content}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensor(name: str, tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialised"
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.is_meta:
        return f"{kind} on the meta device"
    if hasattr(tensor, "full_tensor"):
        raise InputError(
            f"{name!r} is sharded over processes (a {type(tensor).__name__}): gather the whole model on every rank "
            "before, e.g. with torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)"
        )
    seen = hashlib.sha256()
    try:
        for part in _parts(tensor.detach()):
            _add(seen, part)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(
            f"the values of {name!r}, a {type(tensor).__name__}, cannot be compared between ranks ({error}): prune "
            "in one process, or before the model is quantised or wrapped"
        ) from error
    return f"{kind} sha256:{seen.hexdigest()[:16]}"


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        yield from (whole.indices(), whole.values())
    elif tensor.is_quantized:
        yield tensor.int_repr()
        yield tensor.dequantize()
    elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        yield tensor.to_dense()


def _add(seen: Any, tensor: Tensor) -> None:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].cpu().view(torch.uint8)
        seen.update(part.numpy())
