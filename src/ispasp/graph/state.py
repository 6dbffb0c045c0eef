"""What a forward changes in its model is put back: buffers, attributes, and what attributes hold."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.graph.interrupts import uninterrupted

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_DEEPEST = 6  # containers inside containers


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """A block in which forwards may count, average and remember: the model is as before at its end.

    Covers buffers and other tensors that modules hold, attributes of modules and of plain objects they hold, and the
    lists, dictionaries and sets among them. Parameters are not copied: no trace of a forward that writes into them is
    accepted.

    >>> class Counting(nn.Module):
    ...     calls = 0
    ...     def forward(self, x): self.calls += 1; return x
    >>> model = Counting()
    >>> with state_kept(model):
    ...     _ = model(torch.ones(1))
    >>> model.calls
    0
    """
    before = _Snapshot(model)
    try:
        yield
    finally:
        with uninterrupted():
            before.restore()


class _Snapshot:
    """Everything reachable from a model's modules that a forward may change, each object once."""

    def __init__(self, model: nn.Module) -> None:
        self._steps: list[Callable[[], Any]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # an id stands for an object only as long as that lives
        modules = list(model.modules())
        self._seen.update(map(id, modules))
        for module in modules:
            self._take_attributes(module, 0)

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for step in self._steps:
                step()

    def _take(self, value: Any, depth: int) -> None:
        if value is None or isinstance(value, (str, bytes, int, float, complex, type, nn.Parameter)):
            return
        if depth > _DEEPEST or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, Tensor):
            self._take_tensor(value)
        elif isinstance(value, torch.Generator):
            self._steps.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._steps.append(partial(value.setstate, value.getstate()))
        elif type(value) in _CONTAINERS:
            self._take_container(value, depth)
        elif isinstance(value, tuple):
            for item in value:
                self._take(item, depth + 1)
        elif _is_plain_object(value) and depth < 2:
            self._take_attributes(value, depth + 1)

    def _take_attributes(self, holder: Any, depth: int) -> None:
        cls, attributes = type(holder), vars(holder)
        before = dict(attributes)

        def restore() -> None:
            if type(holder) is not cls:
                holder.__class__ = cls
            now, then = list(attributes.items()), list(before.items())
            if len(now) != len(then) or not all(map(_same, now, then)):
                attributes.clear()
                attributes.update(before)

        self._steps.append(restore)
        for value in before.values():
            self._take(value, depth + 1)

    def _take_container(self, value: Any, depth: int) -> None:
        items = list(value.items() if isinstance(value, dict) else value)
        before = dict(items) if isinstance(value, dict) else items

        def restore() -> None:
            now = list(value.items() if isinstance(value, dict) else value)
            if len(now) != len(items) or not all(map(_same, now, items)):
                value.clear()
                value.extend(before) if isinstance(value, (list, deque)) else value.update(before)

        self._steps.append(restore)
        for item in value.values() if isinstance(value, dict) else items:
            self._take(item, depth + 1)

    def _take_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or type(tensor) is not Tensor:
            return
        before = tensor.detach().clone()

        def restore() -> None:
            if tensor.shape != before.shape or tensor.dtype != before.dtype:
                tensor.data = before
            elif not _same_values(tensor, before):
                tensor.detach().copy_(before)

        self._steps.append(restore)


def _is_plain_object(value: Any) -> bool:
    """An object with attributes of its own, of no class of Python or torch."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not callable(value) and package not in ("builtins", "torch", "threading")


def _same(a: Any, b: Any) -> bool:
    """Whether two items of a container are the same objects; a dictionary's are pairs of key and value."""
    return a is b or (
        type(a) is type(b) is tuple and len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    )


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, but for the bits of NaN."""
    a = a.detach()
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124
