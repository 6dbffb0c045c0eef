"""What belongs to the whole process: one call at a time, and everything as it was afterwards."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_turn = threading.RLock()


def _new_turn() -> None:
    """A forked child has no other threads, so nobody would ever give the lock back there."""
    global _turn  # noqa: PLW0603
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_new_turn)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """A block that one thread of the process runs at a time; others wait for their turn.

    torch.export patches modules while it traces, and seeds belong to the process: calls cannot run side by side. The
    same thread may enter again. Random numbers and global settings of torch are put back at the end. Inside a
    `with torch.device("meta")` new tensors are on the CPU: those of the meta device have no values.

    >>> with one_at_a_time(), one_at_a_time():
    ...     done = "in turn"
    >>> done
    'in turn'
    """
    with _turn, settings_kept(), random_numbers_kept(), _with_values():
        yield


def _with_values() -> Any:
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """The global generators of torch, NumPy and Python go on as if nothing had been drawn inside.

    >>> before = torch.get_rng_state()
    >>> with random_numbers_kept():
    ...     _ = torch.rand(3)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    numpy: Any = sys.modules.get("numpy")  # not there yet: nothing can have been drawn from it
    arrays = numpy.random.get_state() if numpy else None
    python = random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if arrays is not None:
            numpy.random.set_state(arrays)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Global settings of torch that a forward may change are put back.

    >>> with settings_kept():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype()
    torch.float32
    """
    before = [(put, get()) for get, put in _SETTINGS]
    functorch: Any = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:  # a torch.vmap that failed half-way
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        for (put, value), (get, _) in zip(before, _SETTINGS, strict=True):
            if get() != value:
                put(value)


def _flag(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    _flag(torch.backends.cudnn, "enabled"),
    _flag(torch.backends.cudnn, "benchmark"),
    _flag(torch.backends.cudnn, "deterministic"),
    _flag(torch.backends.mkldnn, "enabled"),
)


# Quiet ----------------------------------------------------------------------------------------------------------


class _Mine:
    """Matches what the thread that made it warns or logs about: it stands in lists that all threads share."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._thread = threading.get_ident()
        self._packages = packages

    def match(self, _message: str) -> bool:
        """As the pattern of a warnings filter."""
        return threading.get_ident() == self._thread

    def filter(self, record: logging.LogRecord) -> bool:
        """As the filter of a logging handler: whether a record passes."""
        inside = record.name.partition(".")[0] in self._packages
        return record.thread != self._thread or record.levelno > logging.ERROR or not inside


@contextmanager
def quiet(*packages: str) -> Iterator[None]:
    """No warnings in this thread, and no log lines up to ERROR from it by these packages.

    Other threads warn, log and print as ever, and so does the model's own forward but for warnings.

    >>> with quiet("torch"):
    ...     logging.getLogger("torch.fx").warning("not shown")
    """
    mine = _Mine(packages)
    named = [logging.root, *list(logging.root.manager.loggerDict.values())]
    handlers = {handler for logger in named for handler in getattr(logger, "handlers", ())}
    if logging.lastResort is not None:  # writes where no logger has a handler
        handlers.add(logging.lastResort)
    entry: Any = ("ignore", mine, Warning, None, 0)
    filters: Any = warnings.filters
    for handler in handlers:
        handler.addFilter(mine)
    filters.insert(0, entry)
    try:
        yield
    finally:
        now: Any = warnings.filters  # another thread may have put its own list there
        for found in (filters, now):
            if entry in found:
                found.remove(entry)
        for handler in handlers:
            handler.removeFilter(mine)
