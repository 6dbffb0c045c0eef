"""The only module that touches torch.export: a model and a batch become an ATen graph."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ispasp.errors import TraceError
from ispasp.graph.caches import without_cache, without_cache_inputs
from ispasp.graph.interrupts import uninterrupted
from ispasp.graph.process import one_at_a_time, quiet

Batch = Any  # Tensor -> model(x); tuple or list -> model(*x); mapping -> model(**x)


@dataclass(frozen=True)
class Source:
    """What a placeholder stands for: a parameter or buffer of the model (by its name), an input, a constant."""

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str


@dataclass(frozen=True, eq=False)
class Trace:
    """The graph of one call. `sources[placeholder name]` says where each of its inputs comes from."""

    module: fx.GraphModule
    sources: Mapping[str, Source]
    constants: Mapping[str, Any]
    output: Any = None  # how the graph's flat outputs make up what the model returns

    @property
    def graph(self) -> fx.Graph:
        """The ATen graph."""
        return self.module.graph

    @property
    def read(self) -> set[str]:
        """Names of the parameters, buffers and constants that some op reads."""
        return {self.sources[node.name].name for node in self.graph.find_nodes(op="placeholder") if node.users}


def call_arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is handed to a model: (args, kwargs).

    >>> call_arguments({"x": 1})
    ((), {'x': 1})
    >>> call_arguments((1, 2))
    ((1, 2), {})
    """
    if isinstance(batch, Mapping):
        return (), without_cache_inputs(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def fresh_arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`call_arguments` with copies of the tensors: a forward may write into what it gets.

    >>> x = torch.zeros(1)
    >>> fresh_arguments(x)[0][0].add_(1).item(), x.item()
    (1.0, 0.0)
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    copies: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, copy, call_arguments(batch))
    return copies


def run(model: nn.Module, batch: Batch) -> Any:
    """model(batch) in the way batches are handed over."""
    args, kwargs = fresh_arguments(batch)
    return model(*args, **kwargs)


@contextmanager
def evaluating(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Eval mode (or training mode) and no gradients; every module's own mode is restored, as are those in its place.

    Under autocast it keeps no converted weights: surgery puts others into the same parameters.
    """
    modes = {path: (module, module.training) for path, module in model.named_modules()}
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        with torch.no_grad(), without_cache(model):
            model.train(training)
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for module, mode in modes.values():
            module.training = mode
        for path, module in model.named_modules():
            if path in modes:  # surgery may have put another module there
                module.training = modes[path][1]


def trace(model: nn.Module, batch: Batch, *, training: bool = False) -> Trace:
    """Trace one call of the model (eval mode unless `training`, no gradients, non-strict)."""
    args, kwargs = fresh_arguments(batch)
    # Tracing puts fake tensors into the model for a while: Ctrl-C must not leave them there.
    with one_at_a_time(), uninterrupted(), evaluating(model, training=training), _silent(model):
        try:
            program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as first:
            program = _second_try(model, args, kwargs, first)
    signature = program.graph_signature
    sources: dict[str, Source] = {}
    for spec in signature.input_specs:
        kind = spec.kind.name
        name = getattr(spec.arg, "name", "")
        if kind == "PARAMETER":
            sources[name] = Source("parameter", str(spec.target))
        elif kind == "BUFFER":
            sources[name] = Source("buffer", str(spec.target))
        elif kind in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
            sources[name] = Source("constant", str(spec.target))
        else:
            sources[name] = Source("input", name)
    return Trace(program.graph_module, sources, dict(program.constants), program.call_spec.out_spec)


class _DependsOnDataError(Exception):
    """Stands for torch's own error, with which torch.export prints the graph so far to the terminal."""


@contextmanager
def _silent(model: nn.Module) -> Iterator[None]:
    """No warnings and log lines, and no graph printed when a model cannot be traced.

    Errors about data-dependent values get another type, at the one place that all of them pass.
    """
    forward, own = model.forward, "forward" in vars(model)

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if "data-dependent" not in str(error):
                raise
            raise _DependsOnDataError(str(error)) from error

    model.forward = guarded
    try:
        with quiet("torch"):
            yield
    finally:
        if own:
            model.forward = forward
        else:
            del model.forward


def _second_try(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], first: Exception) -> Any:
    # `if mask.any():` and the like depend on data: let the example batch decide them.
    try:
        with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True), _parameters_copied():
            return torch.export.export(model, args, kwargs, strict=False)
    except Exception:
        reason = str(first).strip().splitlines()
        raise TraceError(
            f"torch.export cannot trace {type(model).__name__}: {reason[0] if reason else type(first).__name__}. "
            "Check that model(batch) runs, and that its forward does not branch on the values of tensors"
        ) from first


@contextmanager
def _parameters_copied() -> Iterator[None]:
    """Let torch copy the values of parameters beside their fake tensors, too.

    It does so for plain tensors only (PyTorch 2.13); branches then go by whatever lies in fresh memory.
    """
    utils: Any = importlib.import_module("torch._subclasses.meta_utils")
    before = getattr(utils, "_safe_copy", None)

    def copy(dst: Tensor, src: Tensor | None) -> None:
        if type(src) in (Tensor, nn.Parameter):
            dst.copy_(src.detach())  # type: ignore[union-attr]

    utils._safe_copy = copy
    try:
        yield
    finally:
        if before is not None:
            utils._safe_copy = before
