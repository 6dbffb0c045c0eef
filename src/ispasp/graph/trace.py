"""The only module that touches torch.export: a model and a batch become an ATen graph."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from string import ascii_letters
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module  # does not compile code that never runs
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ispasp.errors import InputError, TraceError
from ispasp.graph.state import Place, left_out, one_at_a_time, quiet, seeded, state_kept, uninterrupted, users_hooks

_MAY_RETURN_INPUT = (operator.getitem, torch.ops.aten.dropout.default)  # their schemas do not say so
_VIEWS = "view view_as _unsafe_view _reshape_alias view_as_complex as_strided as_strided_ set_ resize_"
_STRIDED = {getattr(torch.ops.aten, name) for name in _VIEWS.split()}
_MAY_COPY = {getattr(torch.ops.aten, name) for name in ("reshape", "flatten", "reshape_as", "contiguous", "to")}
_BLOCKS = (torch.ops.higher_order.wrap_with_autocast, torch.ops.higher_order.wrap_with_set_grad_enabled)
_PAUSED: ContextVar[tuple[Any, ...]] = ContextVar("configs whose cache is switched off", default=())
_CACHED: ContextVar[bool] = ContextVar("whether models are called with their cache", default=False)
Batch = Any  # Tensor -> model(x); tuple or list -> model(*x); mapping -> model(**x)


# Calling a model ----------------------------------------------------------------------------------------------------
def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under all their names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def call_arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is passed to a model: (args, kwargs). Decoders run on whole sequences, without a cache."""
    if not isinstance(batch, Mapping):
        return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}
    inputs = {name: value if name != "use_cache" or _CACHED.get() else False for name, value in batch.items()}
    for name in ("past_key_values", "past_key_value", "cache_params"):
        cache = inputs.pop(name, None)
        positions = getattr(cache, "get_seq_length", getattr(cache, "__len__", lambda: 1))
        if cache is not None and positions() != 0:
            raise InputError(f"the batch holds a filled cache, {name!r}: leave it out, and pass whole sequences")
    return (), inputs


def _fresh_arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`call_arguments` with copies of the tensors: a forward may write into its inputs."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), call_arguments(batch))
    return args, kwargs


def run(model: nn.Module, batch: Batch) -> Any:
    """Call the model on a batch."""
    args, kwargs = _fresh_arguments(batch)
    return model(*args, **kwargs)


def run_and_restore(model: nn.Module, batch: Batch) -> Any:
    """`run`, then undo changes that the forward made to the model, such as counters and moving averages."""
    with state_kept(model):
        return run(model, batch)


@contextmanager
def evaluating(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Switch to eval (or training) mode, without gradients and key/value cache; restore every module's mode.

    Random generators that modules hold are restored as well. Autocast caches no converted weights, because surgery
    changes parameters in place. torch's fast path for attention is off: it gives other values for padding tokens.
    """
    modes = {path: (module, module.training) for path, module in model.named_modules()}
    held = [v for module, _ in modes.values() for v in vars(module).values() if isinstance(v, torch.Generator)]
    states = [(generator, generator.get_state()) for generator in held]  # graphs draw from them, too
    cached, fast = torch.is_autocast_cache_enabled(), torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        with torch.no_grad(), _without_cache(model):
            model.train(training)
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes.values():
            module.training = mode
        for path, module in model.named_modules():
            if path in modes:  # surgery may have put another module there
                module.training = modes[path][1]
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Turn `use_cache` off in all configs."""
    caching = [] if _CACHED.get() else _caching(model)
    paused = _PAUSED.set((*_PAUSED.get(), *caching))
    try:
        with _changed(caching, "use_cache", False):
            yield
    finally:
        _PAUSED.reset(paused)


def _caching(model: nn.Module) -> list[Any]:
    """The configs of all modules, and the configs inside those, whose cache is on."""
    found: dict[int, Any] = {}
    waiting = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__") and not isinstance(config, (type, dict)):
            found[id(config)] = config
            waiting += [value for name, value in vars(config).items() if name.endswith("config")]
    return [config for config in found.values() if getattr(config, "use_cache", False) is True]


def has_cache(model: nn.Module, batch: Batch) -> bool:
    """Whether a plain call with this batch fills a cache, as far as configs and the batch say."""
    asked = isinstance(batch, Mapping) and bool(batch.get("use_cache"))
    return asked or bool(_PAUSED.get() or _caching(model))


@contextmanager
def cache_on() -> Iterator[None]:
    """Call models as the user calls them, for a block: `evaluating` leaves their cache on."""
    cached = _CACHED.set(True)
    try:
        with _changed(_PAUSED.get(), "use_cache", True):
            yield
    finally:
        _CACHED.reset(cached)


@contextmanager
def _changed(holders: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of these objects for a block."""
    with ExitStack() as undo:
        for holder in holders:
            undo.callback(setattr, holder, name, getattr(holder, name, None))
            setattr(holder, name, value)
        yield


def check_model(model: nn.Module) -> None:
    """Raise unless this is an initialised eager model."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model is a TorchScript module: pass the nn.Module that it was made from")
    lazy = [name for name, value in model.named_parameters() if is_lazy(value)]
    if lazy:
        raise InputError(f"{lazy[0]!r} is not initialised yet: call model(batch) once, then prune")


# Tracing ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Source:
    """Origin of a placeholder: a parameter or buffer of the model (by name), an input, or a constant."""

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str


@dataclass(frozen=True, eq=False)
class Trace:
    """The graph of one call. `sources[placeholder name]` says where each of its inputs comes from."""

    module: fx.GraphModule
    sources: Mapping[str, Source]
    constants: Mapping[str, Any]
    output: Any = None  # the pytree spec of what the model returns

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @cached_property
    def any_layout(self) -> bool:
        """Whether no op sees the layout of tensors in memory; random numbers are drawn in its order."""
        nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        written = writes(self.graph)
        copied = any(node in written and getattr(node.target, "overloadpacket", None) in _MAY_COPY for node in nodes)
        return not copied and all(map(_ignores_layout, nodes))

    def laid_out(self, value: Any) -> Any:
        """The input with its channels last in memory, if it holds images: convolutions on a CPU are faster so."""
        images = (
            isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point() and value.device.type == "cpu"
        )
        return value.contiguous(memory_format=torch.channels_last) if images and self.any_layout else value

    @property
    def read(self) -> set[str]:
        """Names of the parameters, buffers and constants that some op reads."""
        return {self.sources[node.name].name for node in self.graph.find_nodes(op="placeholder") if node.users}


_KINDS: dict[str, Literal["parameter", "buffer", "constant"]] = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "constant",
    "CUSTOM_OBJ": "constant",
}


def trace(model: nn.Module, batch: Batch, *, training: bool = False) -> Trace:
    """Trace one call of the model (eval mode unless `training`, no gradients, non-strict)."""
    check_model(model)
    # Tracing puts fake tensors into the model for a while: Ctrl-C must not leave them there.
    with one_at_a_time(), uninterrupted(), left_out(_observers(model, batch)):
        args, kwargs = _fresh_arguments(batch)
        with state_kept(model), evaluating(model, training=training), _silent(model), _use_lazy_graph_module(True):
            try:
                program = torch.export.export(model, args, kwargs, strict=False)
            except Exception as first:
                program = _export_by_example(model, args, kwargs, first)
            program = _without_vmap(program)
            _inline(program.graph_module)
            _spell_out(program.graph)
            _relax_views(program.graph)
    sources = {}
    for spec in program.graph_signature.input_specs:
        kind = _KINDS.get(spec.kind.name)
        sources[spec.arg.name] = Source(kind, str(spec.target)) if kind else Source("input", spec.arg.name)
    for source in (sources[node.name] for node in writes(program.graph) if node.op == "placeholder"):
        if source.kind == "parameter":  # parameters are not copied, so they could not be restored
            raise TraceError(f"the forward writes into its parameter {source.name!r}: compute a new value instead")
    return Trace(program.graph_module, sources, dict(program.constants), program.call_spec.out_spec)


def writes(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """In-place ops that change the memory of a node's value, or of one it is a view of."""
    memory: dict[fx.Node, fx.Node] = {}  # node -> the node whose memory its value lies in
    written: dict[fx.Node, list[fx.Node]] = {}
    if not any(map(mutates, graph.nodes)):
        return {}
    for node in graph.nodes:
        memory[node] = next((memory[n] for n in _aliased(node)), node)
        if mutates(node):
            written.setdefault(memory[node], []).append(node)
    return {node: written[at] for node, at in memory.items() if at in written}


def mutates(node: fx.Node) -> bool:
    """Whether an op changes one of its arguments."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _aliased(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node returns, or may return."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    shared = [arg for arg, a in zip(node.args, arguments, strict=False) if a.alias_info is not None]
    shared += node.args[:1] if node.target in _MAY_RETURN_INPUT else []
    return [arg for arg in shared if isinstance(arg, fx.Node)]


def _without_vmap(program: Any) -> Any:
    """Decompose torch.vmap, whose nodes come in pairs that a runner cannot stop between."""
    if not any("functorch" in getattr(node.target, "__module__", "") for node in program.graph.nodes):
        return program
    bar: Any = torch.hub.tqdm  # type: ignore[attr-defined]  # torch draws a bar; tqdm would leave a thread behind
    with _changed([bar], "monitor_interval", 0):
        program = program.run_decompositions({})
    (output,) = program.graph.find_nodes(op="output")
    specs = program.graph_signature.output_specs
    output.args = (tuple(a for a, s in zip(output.args[0], specs, strict=True) if s.kind.name == "USER_OUTPUT"),)
    return program


def _inline(module: fx.GraphModule) -> None:
    """Put the ops of `with torch.autocast(...)` and `with torch.no_grad()` blocks among the others; see `call_op`."""
    for node in list(module.graph.nodes):
        if node.target not in _BLOCKS:
            continue
        at, block = next((k, arg) for k, arg in enumerate(node.args) if getattr(arg, "op", "") == "get_attr")
        inner = getattr(module, str(block.target))
        _inline(inner)
        if inner.graph.find_nodes(op="get_attr"):  # other higher-order ops
            continue
        copied = dict(zip(inner.graph.find_nodes(op="placeholder"), node.args[at + 1 :], strict=True))
        with module.graph.inserting_before(node):
            outputs: Any = module.graph.graph_copy(inner.graph, copied)
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            for each in (each for each in inner.graph.nodes if each.op == "call_function"):
                copied[each].meta["autocast"] = (node.args[:at], *each.meta.get("autocast", ()))
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        module.graph.erase_node(block)


def _spell_out(graph: fx.Graph) -> None:
    """Write the equations of einsum with letters for the dots, and with what is on the right."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.einsum.default):
        equation, tensors, *path = node.args
        left, arrow, right = equation.replace(" ", "").partition("->")
        terms, ranks = left.split(","), [len(tensor.meta["val"].shape) for tensor in tensors]
        counts = [rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True)]
        dots = "".join(letter for letter in ascii_letters if letter not in left)[: max(counts)]
        if not arrow:
            right = "..." * ("..." in left) + "".join(sorted(c for c in set(left) - set(".,") if left.count(c) == 1))
        terms = [term.replace("...", dots[len(dots) - n :]) for term, n in zip(terms, counts, strict=True)]
        node.args = (f"{','.join(terms)}->{right.replace('...', dots)}", tensors, *path)


def _relax_views(graph: fx.Graph) -> None:
    """Turn views into reshapes, which take any layout in memory, unless an op writes into that memory."""
    written = writes(graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if node not in written:
            node.target = torch.ops.aten.reshape.default


def _ignores_layout(node: fx.Node) -> bool:
    """Whether an op gives the same values for any layout of its arguments in memory."""
    op: Any = node.target
    if op is operator.getitem or (op is torch.ops.aten.dropout.default and node.args[2] is False):
        return True
    known = getattr(op, "namespace", "") == "aten" and op.overloadpacket not in _STRIDED
    return known and torch.Tag.nondeterministic_seeded not in op.tags  # drawn in the order of memory


def call_op(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call a node's op, under the autocast it was traced in."""
    with ExitStack() as stack:
        for settings in node.meta.get("autocast", ()):
            stack.enter_context(torch.autocast(*settings))
        return node.target(*args, **kwargs)  # type: ignore[operator]


class _DependsOnDataError(Exception):
    """Replaces torch's error about data-dependent values, on which torch.export prints the graph to the terminal."""


@contextmanager
def _silent(model: nn.Module) -> Iterator[None]:
    """No warnings and log lines, no graph printed when a model cannot be traced, no stack trace for each node."""
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
        with quiet("torch"), _changed([fx_config], "do_not_emit_stack_traces", True):
            yield
    finally:
        del model.forward
        if own:
            model.forward = forward


def _export_by_example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], first: Exception) -> Any:
    """Export again, with the batch deciding branches on data such as `if mask.any():`."""
    utils: Any = importlib.import_module("torch._subclasses.meta_utils")

    def copy(dst: Tensor, src: Tensor | None) -> None:
        if type(src) in (Tensor, nn.Parameter):
            dst.copy_(src.detach())  # type: ignore[union-attr]

    by_example = torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True)
    try:  # torch 2.13 copies plain tensors only: branches on parameters would read fresh memory
        with _changed([utils], "_safe_copy", copy), by_example:
            return torch.export.export(model, args, kwargs, strict=False)
    except Exception:
        reason = str(first).strip().splitlines()
        raise TraceError(
            f"torch.export cannot trace {type(model).__name__}: {reason[0] if reason else type(first).__name__}. "
            "Check that model(batch) runs, and that its forward does not branch on the values of tensors"
        ) from first


# Hooks that are left out of traces ----------------------------------------------------------------------------------
def _observers(model: nn.Module, batch: Batch) -> list[Place]:
    """The users' hooks that do not take part in the computation, and so belong in no graph.

    Without them the model gives the same. A hook may keep an activation for the forward to read later on, so it is
    left out in a call on other values than the call before.
    """
    hooks = users_hooks(model)
    if not hooks:
        return []

    def outputs(given: Batch) -> list[Tensor]:
        with seeded():
            return [leaf for leaf in pytree.tree_leaves(run_and_restore(model, given)) if isinstance(leaf, Tensor)]

    def needless(places: list[Place]) -> bool:
        with suppress(Exception):  # a forward that misses what a hook gave it may raise anything
            outputs(batch)
            with left_out(places):
                return all(map(_equal, outputs(other), expected))
        return False

    with evaluating(model):
        for other in (pytree.tree_map(_other_values, batch), batch):  # not every model takes other values
            with suppress(Exception):
                expected = outputs(other)
                return hooks if needless(hooks) else [place for place in hooks if needless([place])]
    return hooks  # the model fails; the trace will say how


def _other_values(leaf: Any) -> Any:
    """Another input of the same shape, which the model should accept as well."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    leaf = leaf.flip(tuple(range(leaf.ndim)))
    return leaf * 0.75 if leaf.is_floating_point() else leaf


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
