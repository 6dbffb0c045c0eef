"""Run a model and, if it fails, say in which module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.errors import TraceError
from ispasp.graph.state import state_kept
from ispasp.graph.trace import Batch, evaluating, run_and_restore
from ispasp.surgery.masking import tensors_in
from ispasp.surgery.verify import output_of

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Frame:
    """A module in the middle of its forward, with what it was called with."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Failure:
    """An exception and the modules it went through, the innermost last."""

    error: Exception
    stack: tuple[Frame, ...]


def attempt(model: nn.Module, batch: Batch) -> list[Tensor] | Failure:
    """The model's output, or how it failed."""
    try:
        return output_of(model, batch)
    except Exception:  # a forward may raise anything
        return _again(model, batch)


def _again(model: nn.Module, batch: Batch) -> list[Tensor] | Failure:
    stack: list[Frame] = []
    with _watching(model, stack, {}):
        try:
            return output_of(model, batch)
        except Exception as error:
            return Failure(error, tuple(stack))


def trains(model: nn.Module, batch: Batch) -> bool:
    """Whether the model runs in training mode; what changes in it on the way is put back."""
    try:
        with evaluating(model, training=True), torch.random.fork_rng(devices=[]):
            run_and_restore(model, batch)
    except Exception:
        return False
    return True


def shapes_of(model: nn.Module, batch: Batch) -> dict[str, list[list[Shape]]]:
    """For every module the shapes of the tensors it returned, call by call."""
    shapes: dict[str, list[list[Shape]]] = {}
    try:
        with _watching(model, [], shapes):
            output_of(model, batch)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} fails on a batch on which it ran before ({type(error).__name__}: "
            f"{str(error)[:300]}): its forward must do the same on every call"
        ) from error
    return shapes


@contextmanager
def _watching(model: nn.Module, stack: list[Frame], shapes: dict[str, list[list[Shape]]]) -> Iterator[None]:
    handles = []
    for path, module in model.named_modules():

        def enter(m: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            stack.append(Frame(path, m, args, kwargs))

        def leave(m: nn.Module, args: Any, output: Any, path: str = path) -> None:
            stack.pop()
            shapes.setdefault(path, []).append([tuple(t.shape) for t in tensors_in(output)])

        handles += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def call(frame: Frame) -> list[Shape] | None:
    """Shapes that the frame's module returns when called again, None if it fails."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), state_kept(frame.module):
        try:
            return [tuple(t.shape) for t in tensors_in(frame.module(*frame.args, **frame.kwargs))]
        except Exception:
            return None
