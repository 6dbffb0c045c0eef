"""What must be as before: a model bit for bit, and the settings of the process."""

from __future__ import annotations

import hashlib
import logging
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from soak.case import check


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Every tensor's bytes and identity, every attribute, mode and hook of every module."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path}:class"] = type(module)
        for key, value in vars(module).items():
            found[f"{path}.{key}"] = _described(value)
    return found


def _described(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        own = id(value) if isinstance(value, nn.Parameter) else None  # weight_norm's weight is new in every forward
        grad = value.grad if value.is_leaf else None
        return own, described_tensor(value), None if grad is None else described_tensor(grad)
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, Mapping) and depth < 6:
        return type(value).__name__, [(str(key), _described(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set)) and depth < 6:
        return type(value).__name__, [_described(item, depth + 1) for item in value]
    return type(value).__name__, id(value)


def described_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Type, dtype, shape, whether it takes gradients, and a hash of its bytes (so NaN equals NaN)."""
    if is_lazy(tensor):
        return (type(tensor).__name__,)
    kind = (type(tensor).__name__, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_quantized
    values = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return (*kind, digest(values) if plain else None)


def digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def weights(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name, bit for bit."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (str(t.dtype), tuple(t.shape), digest(t)) for name, t in named.items()}


def check_same(before: Mapping[str, Any], after: Mapping[str, Any], what: str) -> None:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if names:
        told = "; ".join(f"{n}: {str(before.get(n))[:200]} -> {str(after.get(n))[:200]}" for n in names[:4])
        check(False, f"{what} changed: {told}")


def process() -> dict[str, Any]:
    """Settings of this process that no call may change."""
    numpy = np.random.get_state()
    return {
        "stdout": id(sys.stdout),
        "stderr": id(sys.stderr),
        "logging.disable": logging.root.manager.disable,
        "logging level": logging.root.level,
        "warnings": list(map(str, warnings.filters)),
        "showwarning": id(warnings.showwarning),
        "torch rng": digest(torch.get_rng_state()),
        "python rng": hashlib.sha256(repr(random.getstate()).encode()).hexdigest()[:16],
        "numpy rng": hashlib.sha256(numpy[1].tobytes() + repr(numpy[2:]).encode()).hexdigest()[:16],  # type: ignore[index, union-attr]
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "functorch": torch._C._functorch.peek_interpreter_stack() is None,
        "torch functions": len(torch.overrides._get_current_function_mode_stack()),
        "torch dispatch": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        "ctrl-c": signal.getsignal(signal.SIGINT),
        "excepthook": id(sys.excepthook),
    }


@contextmanager
def process_unchanged(what: str) -> Iterator[None]:
    """The settings of the process are as before, however the block ends."""
    before, threads = process(), threading.active_count()
    try:
        yield
    finally:
        check_same(before, process(), f"{what}: the process")
        check(threading.active_count() <= threads, f"{what}: a thread is left behind")


@contextmanager
def unchanged(model: nn.Module, what: str) -> Iterator[None]:
    """Model and process are as before, however the block ends."""
    with model_unchanged(model, what), process_unchanged(what):
        yield


@contextmanager
def model_unchanged(model: nn.Module, what: str) -> Iterator[None]:
    """The model is as before, however the block ends."""
    before = fingerprint(model)
    try:
        yield
    finally:
        check_same(before, fingerprint(model), f"{what}: the model")
