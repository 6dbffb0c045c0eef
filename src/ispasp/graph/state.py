"""Restore the process and the model: settings, signals, hooks, wrappers, changes by a forward."""

from __future__ import annotations

import logging
import operator
import os
import random
import signal
import sys
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from types import CellType, FrameType, FunctionType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ispasp.errors import InputError, failing_as


def succeeds(call: Callable[[], Any]) -> bool:
    """Whether a call returns. Models may raise anything."""
    try:
        call()
    except Exception:
        return False
    return True


# The process --------------------------------------------------------------------------------------------------------
_turn = threading.RLock()


def _new_turn() -> None:
    """Replace the lock: a forked child has no other thread that could release it."""
    global _turn  # noqa: PLW0603
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_new_turn)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Lock: one thread of the process runs the block at a time; the same thread may enter again.

    torch.export patches modules while it traces, and seeds belong to the process, so calls cannot run side by side.
    Random numbers and global settings of torch are restored at the end. Inside `with torch.device("meta")` new tensors
    are on the CPU, because meta tensors have no values.
    """
    on_meta = torch.get_default_device().type == "meta"
    with _turn, settings_kept(), random_numbers_kept(), torch.device("cpu") if on_meta else nullcontext():
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, which would leave things broken if it stopped half-way."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # only the main thread gets signals
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python."""
    arrays, python = np.random.get_state(), random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def seeded() -> Iterator[None]:
    """Seed torch's generators for a block. The CPU's is restored."""
    with torch.random.fork_rng(devices=[]):
        seed_torch(0)
        yield


def seed_torch(seed: int) -> None:
    """Seed torch's generators."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # much cheaper: torch.manual_seed stores a stack trace for every kind of device that is not there
        torch.default_generator.manual_seed(seed)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore global settings of torch that a forward may change."""
    before = [get() for get, _ in _SETTINGS]
    functorch: Any = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:  # a torch.vmap that failed half-way
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        for (get, put), value in zip(_SETTINGS, before, strict=True):
            if get() != value:
                put(value)


def _flag(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return partial(getattr, holder, name), partial(setattr, holder, name)


def _default_device() -> Any:
    return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    *(_flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    _flag(torch.backends.mkldnn, "enabled"),
)


@contextmanager
def quiet(*packages: str) -> Iterator[None]:
    """Silence this thread's warnings, and its log lines up to ERROR from these packages."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        inside = record.name.partition(".")[0] in packages
        return record.thread != thread or record.levelno > logging.ERROR or not inside

    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    if logging.lastResort is not None:  # writes where no logger has a handler
        handlers.add(logging.lastResort)
    ours = SimpleNamespace(match=lambda _: threading.get_ident() == thread)  # in place of a pattern for the message
    entry: Any = ("ignore", ours, Warning, None, 0)
    filters: Any = warnings.filters
    for handler in handlers:
        handler.addFilter(passes)
    filters.insert(0, entry)
    try:
        yield
    finally:
        now: Any = warnings.filters  # another thread may have put its own list there
        for found in (filters, now):
            if entry in found:
                found.remove(entry)
        for handler in handlers:
            handler.removeFilter(passes)


# Changes by a forward -----------------------------------------------------------------------------------------------
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_CONSTANTS = (str, bytes, int, float, complex, type, type(None))
_DEEPEST = 6  # nesting of containers


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's state at the end of the block.

    Covers buffers and other tensors that modules hold, attributes of modules and of plain objects they hold, and the
    lists, dictionaries and sets among them. Parameters are not copied: `trace` rejects a forward that writes into them.
    """
    undo: list[Callable[[], Any]] = []
    modules = list(model.modules())
    seen = set(map(id, modules))
    waiting: deque[tuple[Any, int]] = deque((module, 0) for module in modules)  # breadth first: the least depth counts
    while waiting:
        value, depth = waiting.popleft()
        items, deeper = _copy(value, depth, undo)
        for item in items:
            if deeper <= _DEEPEST and not isinstance(item, _CONSTANTS) and id(item) not in seen:
                seen.add(id(item))
                waiting.append((item, deeper))
    try:
        yield
    finally:
        with uninterrupted(), torch.no_grad():
            for restore in undo:
                restore()


def _copy(value: Any, depth: int, undo: list[Callable[[], Any]]) -> tuple[Iterable[Any], int]:
    """Copy one object and add its restoration to `undo`; returns its items and their depth."""
    if type(value) in _CONTAINERS:
        undo.append(partial(_put_items, value, copy := value.copy()))
        return copy.values() if isinstance(copy, dict) else copy, depth + 1
    if isinstance(value, tuple):
        return value, depth + 1
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.layout is torch.strided and not (value.is_meta or value.is_quantized):
            undo.append(partial(_put_values, value, value.detach().clone()))
    elif isinstance(value, torch.Generator):
        undo.append(partial(value.set_state, value.get_state()))
    elif isinstance(value, random.Random):
        undo.append(partial(value.setstate, value.getstate()))
    elif depth == 0 or (depth == 1 and _is_plain_object(value)):  # a module, or an object that one holds
        undo.append(partial(_put_class, value, type(value)))
        undo.append(partial(_put_items, vars(value), copy := vars(value).copy()))
        return copy.values(), 2 * depth + 1
    return (), depth


def _is_plain_object(value: Any) -> bool:
    """Whether an object has attributes of its own and belongs to no class of Python or torch."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not callable(value) and package not in ("builtins", "torch", "threading")


def _put_class(value: Any, cls: type) -> None:
    if type(value) is not cls:
        value.__class__ = cls


def _put_items(value: Any, copy: Any) -> None:
    """Give a container its items back, unless it holds the same objects in the same order."""
    same = value == copy if isinstance(value, set) else len(value) == len(copy) and all(map(operator.is_, value, copy))
    if same and (not isinstance(value, dict) or all(map(operator.is_, value.values(), copy.values()))):
        return
    value.clear()
    value.extend(copy) if isinstance(value, (list, deque)) else value.update(copy)


def _put_values(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape or tensor.dtype != before.dtype:
        tensor.data = before
    elif not torch.all((tensor == before) | (tensor.isnan() & before.isnan())):
        tensor.detach().copy_(before)


# Users' hooks -------------------------------------------------------------------------------------------------------
Hook = Callable[..., Any]
Place = tuple[dict[int, Hook], int]  # a table of hooks, and the key of one


def users_hooks(model: nn.Module) -> list[Place]:
    """Forward hooks on modules and for all modules, without torch's own (weight_norm and the like)."""
    tables: list[Any] = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    for module in model.modules():
        tables += [module._forward_hooks, module._forward_pre_hooks]
    hooks = [(table, key, hook) for table in tables for key, hook in table.items()]
    return [(t, k) for t, k, h in hooks if not getattr(h, "__module__", type(h).__module__).startswith("torch.")]


@contextmanager
def left_out(places: list[Place]) -> Iterator[None]:
    """Do not call these hooks in this thread, for a block."""
    thread = threading.get_ident()

    def skipped(hook: Hook) -> Hook:
        return lambda *args, **kwargs: None if threading.get_ident() == thread else hook(*args, **kwargs)

    with ExitStack() as undo:
        for table, key in places:
            undo.callback(operator.setitem, table, key, table[key])
            table[key] = skipped(table[key])
        yield


# Wrappers -----------------------------------------------------------------------------------------------------------
_COMPILED = "_compiled_call_impl"  # what module.compile() leaves in a module


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, DataParallel and DistributedDataParallel."""
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(module: nn.Module) -> nn.Module | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module  # type: ignore[no-any-return]
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing can have been compiled
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return cast("nn.Module", module._modules["_orig_mod"])
    return None


@contextmanager
def plain(model: nn.Module) -> Iterator[nn.Module]:
    """The unwrapped model; inside the block its submodules are unwrapped as well, and nothing is compiled."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    model = unwrapped(model)
    with ExitStack() as undo:
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is not None and _inner(child) is not None:
                    undo.callback(_wrap_again, parent, name, child)
                    parent._modules[name] = unwrapped(child)
        for module in model.modules():
            if vars(module).get(_COMPILED) is not None:
                undo.callback(operator.setitem, vars(module), _COMPILED, vars(module).pop(_COMPILED))
        yield model


def _wrap_again(parent: nn.Module, name: str, child: nn.Module) -> None:
    if parent._modules[name] is unwrapped(child):  # else surgery has replaced the layer
        parent._modules[name] = child


def copied(model: nn.Module) -> nn.Module:
    """Deep-copy a model, including computed tensors that torch refuses to copy, such as weight_norm's weight."""
    inside = {*model.modules()}
    held = [item for module in inside for item in vars(module).items()]
    computed = [value for _, value in held if isinstance(value, Tensor) and not value.is_leaf]
    # Functions that a forward may call. Others stand in the place of methods: accelerate's of Module.to.
    called = [value for name, value in held if name == "forward" or not hasattr(nn.Module, name)]
    cells = [cell for f in called if isinstance(f, FunctionType) for cell in f.__closure__ or ()]
    reached = [cell.cell_contents for cell in cells if cell != CellType()]  # an empty cell equals empty ones alone
    with failing_as(InputError, f"{type(model).__name__} cannot be copied", "prune_ works in place"):
        if any(isinstance(at := getattr(each, "__self__", each), nn.Module) and at in inside for each in reached):
            raise TypeError("it holds a function that refers to it, and would do so in the copy: make it a method")
        return deepcopy(model, {id(value): value.detach().clone() for value in computed})
