"""Users' hooks while a model is traced: those that only look on are left out, and never see a fake tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

Place = tuple[dict[int, Callable[..., Any]], int]  # a table of hooks, and the key of one


@dataclass(eq=False)
class _Watched:
    """A hook in its own place, told apart by whether a call of it returns or changes anything."""

    hook: Callable[..., Any]
    model: nn.Module
    changes: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        before = [tensor.detach().clone() for tensor in given], _attributes(self.model)
        returned = self.hook(*args, **kwargs)
        changed = not alike(given, before[0]) or _attributes(self.model) != before[1]
        self.changes |= returned is not None or changed
        return returned


@dataclass(eq=False)
class _LeftOut:
    """A hook in its own place, not called by this thread."""

    hook: Callable[..., Any]
    thread: int = field(default_factory=threading.get_ident)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() == self.thread else self.hook(*args, **kwargs)


@contextmanager
def left_out(places: list[Place]) -> Iterator[None]:
    """A block in which these hooks are not called."""
    with _replaced(places, _LeftOut):
        yield


def users_hooks(model: nn.Module) -> list[Place]:
    """Where hooks of forwards stand: on modules and for all modules, without torch's own (weight_norm and the like)."""
    tables: list[Any] = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    for module in model.modules():
        tables += [module._forward_hooks, module._forward_pre_hooks]
    return [(table, key) for table in tables for key, hook in table.items() if not _is_torchs(hook)]


def silent_hooks(model: nn.Module, run: Callable[[], Any]) -> list[Place]:
    """The users' hooks that return nothing and change no tensor and no attribute while `run` calls the model."""
    places = users_hooks(model)
    with _replaced(places, lambda hook: _Watched(hook, model)) as watched:
        run()
    return [place for place, hook in zip(places, watched, strict=True) if not hook.changes]


def other_values(batch: Any) -> Any:
    """A batch of the same shapes and other values, with which the model should run as well.

    >>> other_values((torch.tensor([1, 2, 3]), "text"))
    (tensor([3, 2, 1]), 'text')
    """

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        leaf = leaf.flip(tuple(range(leaf.ndim)))
        return leaf * 0.75 if leaf.is_floating_point() else leaf

    return pytree.tree_map(other, batch)


@contextmanager
def _replaced(places: list[Place], wrap: Callable[[Any], Any]) -> Iterator[list[Any]]:
    before = [table[key] for table, key in places]
    wrapped = [wrap(hook) for hook in before]
    try:
        for (table, key), hook in zip(places, wrapped, strict=True):
            table[key] = hook
        yield wrapped
    finally:
        for (table, key), hook in zip(places, before, strict=True):
            table[key] = hook


def _attributes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(map(id, vars(module).values())) for module in model.modules()]


def _is_torchs(hook: Any) -> bool:
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.")


def alike(a: Any, b: Any) -> bool:
    """Whether two nested values hold the same tensors, up to rounding."""
    ours, theirs = ([x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)] for value in (a, b))
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout is not torch.strided or a.is_quantized:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    finite = b[b.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-2, atol=1e-2 * size, equal_nan=True)
