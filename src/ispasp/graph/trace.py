"""The only module that touches torch.export: a model and a batch become an ATen graph."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ispasp.errors import InputError, TraceError
from ispasp.graph.caches import without_cache, without_cache_inputs
from ispasp.graph.hooks import Place, alike, left_out, other_values, silent_hooks, users_hooks
from ispasp.graph.interrupts import uninterrupted
from ispasp.graph.process import one_at_a_time, quiet
from ispasp.graph.state import state_kept

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


def run_and_restore(model: nn.Module, batch: Batch) -> Any:
    """`run`, after which the model is as before: a forward may count its calls or keep moving averages."""
    with state_kept(model):
        return run(model, batch)


@contextmanager
def evaluating(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Eval mode (or training mode) and no gradients; every module's own mode is restored, as are those in its place.

    So are random generators that modules hold. Under autocast it keeps no converted weights: surgery puts others into
    the same parameters.
    """
    modes = {path: (module, module.training) for path, module in model.named_modules()}
    held = [v for module, _ in modes.values() for v in vars(module).values() if isinstance(v, torch.Generator)]
    states = [(generator, generator.get_state()) for generator in held]  # graphs draw from them, too
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
        for generator, state in states:
            generator.set_state(state)


def check_model(model: nn.Module) -> None:
    """Refuse what is no model whose forward and tensors can be looked at."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model is a TorchScript module: pass the nn.Module that it was made from")
    lazy = [name for name, value in model.named_parameters() if is_lazy(value)]
    if lazy:
        raise InputError(f"{lazy[0]!r} is not initialised yet: call model(batch) once, then prune")


def trace(model: nn.Module, batch: Batch, *, training: bool = False) -> Trace:
    """Trace one call of the model (eval mode unless `training`, no gradients, non-strict)."""
    check_model(model)
    # Tracing puts fake tensors into the model for a while: Ctrl-C must not leave them there.
    with one_at_a_time(), uninterrupted(), left_out(_observers(model, batch)):
        return _traced(model, batch, training=training)


def _traced(model: nn.Module, batch: Batch, *, training: bool = False) -> Trace:
    args, kwargs = fresh_arguments(batch)
    with state_kept(model), evaluating(model, training=training), _silent(model):
        try:
            program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as first:
            program = _second_try(model, args, kwargs, first)
        program = _without_vmap(program)
    _check_writes(model, program)
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


def _observers(model: nn.Module, batch: Batch) -> list[Place]:
    """The users' hooks that take no part in what the model computes: they are no part of its graph, either.

    A hook that changes nothing may still keep an activation for the forward to read later on. Then a graph without it
    holds a constant there, and gives something else than the model for other inputs.
    """
    hooks = users_hooks(model)
    if not hooks:
        return []
    with evaluating(model):
        try:
            silent = silent_hooks(model, lambda: run_and_restore(model, batch))
        except Exception:  # the model does not run, as the trace will tell
            return hooks
        try:
            with left_out(silent):
                traced = _traced(model, batch)
        except TraceError:
            return []
        with suppress(Exception), state_kept(model), torch.random.fork_rng(devices=[]):
            other = other_values(batch)
            expected = run_and_restore(model, other)
            found = _run_graph(traced, model, other)
            return silent if alike(found, expected) else []
    return silent


def _run_graph(traced: Trace, model: nn.Module, batch: Batch) -> Any:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **traced.constants,
    }
    inputs = iter(pytree.tree_leaves(fresh_arguments(batch)))
    sources = [traced.sources[node.name] for node in traced.graph.find_nodes(op="placeholder")]
    return traced.module.forward(*(next(inputs) if s.kind == "input" else tensors[s.name] for s in sources))


def _check_writes(model: nn.Module, program: Any) -> None:
    """Refuse a forward that changes parameters: they are not copied, so they could not be put back."""
    parameters = {
        spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind.name == "PARAMETER"
    }
    memory: dict[str, str] = {name: name for name in parameters}  # node -> the parameter whose memory it lies in
    for node in program.graph.nodes:
        arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
        for given, argument in zip(node.args, arguments, strict=False):
            if argument.alias_info is None or not isinstance(given, fx.Node) or given.name not in memory:
                continue
            memory[node.name] = memory[given.name]
            if argument.alias_info.is_write:
                raise TraceError(
                    f"the forward of {type(model).__name__} writes into its parameter "
                    f"{parameters[memory[given.name]]!r}: compute the new value instead of changing it in place"
                )


def _without_vmap(program: Any) -> Any:
    """The program without torch.vmap, whose nodes come in pairs that nobody may stop between: on batched tensors."""
    if not any("functorch" in getattr(node.target, "__module__", "") for node in program.graph.nodes):
        return program
    with _without_monitor():
        program = program.run_decompositions({})
    (output,) = program.graph.find_nodes(op="output")
    specs = program.graph_signature.output_specs
    output.args = (tuple(a for a, s in zip(output.args[0], specs, strict=True) if s.kind.name == "USER_OUTPUT"),)
    return program


@contextmanager
def _without_monitor() -> Iterator[None]:
    """torch draws a progress bar that nobody sees; tqdm would start a thread for it that never ends."""
    bar: Any = torch.hub.tqdm  # type: ignore[attr-defined]
    before = getattr(bar, "monitor_interval", 0)
    bar.monitor_interval = 0
    try:
        yield
    finally:
        bar.monitor_interval = before


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
