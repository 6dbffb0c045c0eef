"""Check that removing equals masking: run a model, mask the dense one, compare their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.engine.batches import tensors_of
from ispasp.engine.graphs import TracedGraph
from ispasp.engine.runner import Edits, Runner
from ispasp.engine.sites import sites
from ispasp.graph.analyse import Analysis
from ispasp.graph.state import seeded
from ispasp.graph.trace import Batch, Trace, evaluating, named_tensors, run_and_restore
from ispasp.surgery.remove import Undo, kept_part, set_data, undone
from ispasp.types.dimension import Kept
from ispasp.types.plan import Plan

# Hundreds of layers lose two to four digits of 2^-53 and 2^-24. Half precision keeps 11 and 8 bits: a single wrong unit
# of a wide layer can hide in that, so such models are compared in float64 as well.
FLOAT32 = 1e-4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: FLOAT32, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_FLIPPED = 0.1
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


# Running ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Frame:
    """A module in the middle of its forward, and its arguments."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Failure:
    """An exception and the modules it went through, the innermost last."""

    error: Exception
    stack: tuple[Frame, ...]
    cached: bool = False  # it runs without its cache


def output_of(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The tensors of the model's output in eval mode, with random numbers seeded."""
    with evaluating(model), seeded():
        return tensors_of(run_and_restore(model, batch))


def attempt(model: nn.Module, batch: Batch) -> list[Tensor] | Failure:
    """Run the model; returns its output, or how it failed."""
    try:
        return output_of(model, batch)
    except Exception:  # a forward may raise anything; run it again to see in which module
        stack: list[Frame] = []
        with watching(model, stack):
            try:
                return output_of(model, batch)
            except Exception as error:
                return Failure(error, tuple(stack))


@contextmanager
def watching(model: nn.Module, stack: list[Frame], after: Callable[[Frame, Any], None] | None = None) -> Iterator[None]:
    """Keep the running modules on `stack`, and call `after` with each frame and its output."""
    paths = {module: path for path, module in model.named_modules()}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(Frame(paths[module], module, args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        frame = stack.pop()
        if after is not None:
            after(frame, output)

    with ExitStack() as hooks:
        for module in paths:
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leave))
        yield


def masked_output(
    analysis: Analysis, model: nn.Module, batch: Batch, kept: Kept, graph: TracedGraph | None = None
) -> list[Tensor]:
    """Run the dense model with zeros for removed units at every consumer; `graph` if it is not the analysed one."""
    edits = Edits({site.number: site.cuts(kept) for site in sites(analysis, kept)})
    with evaluating(model), seeded():
        graph = TracedGraph.of(analysis) if graph is None else graph
        return tensors_of(Runner(graph, batch, named_tensors(model), edits, slicing=False).advance())


# Comparing ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Comparison:
    """The largest relative difference of two lists of tensors, and how many of their entries could show one.

    `flipped` is the largest fraction of integers and booleans that differ: rounding may flip a comparison.
    """

    error: float
    entries: int
    flipped: float = 0.0


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Comparison:
    """Compare tensors of any dtype. The error is infinite where shapes differ.

    Floating-point and complex tensors differ by ||a - b|| / ||b|| of their finite entries; the others must be at the
    same places. Integers and booleans differ by the fraction of unequal entries (`flipped`). Entries that are not
    finite, and integer tensors of one value, count as agreement but not as evidence.
    """
    if [t.shape for t in found] != [t.shape for t in expected]:
        return Comparison(math.inf, 0)
    parts = [_compare(_strided(a), _strided(b).to(a.device)) for a, b in zip(found, expected, strict=True)]
    error = max((p.error for p in parts), default=0.0)
    flipped = max((p.flipped for p in parts), default=0.0)
    return Comparison(error, sum(p.entries for p in parts), flipped)


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The error of `compare`. Integers count if more of them differ than rounding flips."""
    outcome = compare(found, expected)
    return outcome.error if outcome.flipped <= _FLIPPED else max(outcome.error, outcome.flipped)


def shared(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a call with a cache that one without gives as well, by their shapes: the others are the cache.

    >>> [tensor.shape for tensor in shared([torch.ones(2, 3), torch.ones(7), torch.ones(4)], [torch.ones(4)])]
    [torch.Size([4])]
    """
    rest = iter(found)
    both = (next((tensor for tensor in rest if tensor.shape == wanted.shape), None) for wanted in expected)
    return [tensor for tensor in both if tensor is not None]


def _strided(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _compare(a: Tensor, b: Tensor) -> Comparison:
    if a.is_complex() != b.is_complex() or a.is_floating_point() != b.is_floating_point():
        return Comparison(math.inf, 0)
    a, b = _real(a), _real(b)
    if not a.is_floating_point():
        varied = b.numel() > 0 and bool((b != b.flatten()[0]).any())
        return Comparison(0.0, b.numel() if varied else 0, float((a != b).double().mean()) if b.numel() else 0.0)
    a, b = a.double(), b.double()
    finite = torch.isfinite(b)
    if not bool(finite.all()):
        if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) or bool((a.isnan() != b.isnan()).any()):
            return Comparison(math.inf, 0)
        a, b = a[finite], b[finite]
    size, difference = float(b.norm()), float((a - b).norm())
    error = difference / size if size else difference
    return Comparison(error if not math.isnan(error) else math.inf, b.numel() if size else 0)


def tolerance(trace: Trace) -> float:
    """The error that rounding explains, by the least precise dtype of the traced call or autocast."""
    values = tensors_of([node.meta.get("val") for node in trace.graph.nodes])
    used = {_REAL.get(value.dtype, value.dtype) for value in values}
    used |= {torch.get_autocast_dtype(device) for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)}
    known = [_TOLERANCE.get(dtype, _TOLERANCE[torch.bfloat16]) for dtype in used if dtype.is_floating_point]
    return max(known, default=_TOLERANCE[torch.float32])


# Other values for all-zero tensors: a gate of zeros hides everything behind it ----------------------------------------
def proves_nothing(tensor: Tensor) -> bool:
    """Whether a floating-point tensor is all zeros, or not all finite."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    if not floating or not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    least, most = map(float, _real(tensor.detach()).aminmax())  # NaN if there is one
    return least == most == 0 or not math.isfinite(least) or not math.isfinite(most)


def stirred(tensor: Tensor, seed: int) -> Tensor:
    """Random values between 1/4 and 1; in matrices with mixed signs, and smaller with more inputs."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    size = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu") * 0.75 + 0.25
    if tensor.ndim > 1:
        signs = torch.randint(0, 2, tensor.shape, generator=generator, device="cpu") * 2 - 1
        size = size * signs / max(tensor[0].numel(), 1) ** 0.5
    return size.to(tensor)


def stirred_tensors(tensors: Mapping[str, Tensor], edits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other values, by name, for tensors that prove nothing. Tied tensors get the same."""
    known: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if id(tensor) in known or proves_nothing(edits.get(name, tensor)):
            found[name] = known.setdefault(id(tensor), stirred(tensor, number))
    return found


def stirred_batch(batch: Batch) -> Batch:
    """The batch with other values in tensors that prove nothing."""
    return pytree.tree_map_only(Tensor, lambda leaf: stirred(leaf, 0) if proves_nothing(leaf) else leaf, batch)


def set_values(model: nn.Module, values: Mapping[str, Tensor], plan: Plan | None, undo: Undo) -> None:
    """Give the model's tensors these values; values of the dense model are cut to a plan."""
    done: set[int] = set()
    tensors = named_tensors(model)
    for name, value in values.items():
        tensor = tensors[name]
        if id(tensor) not in done:
            done.add(id(tensor))
            small = value if plan is None else kept_part(name, value, plan)
            set_data(tensor, torch.empty_like(tensor).copy_(small), tensor.grad, undo)


@contextmanager
def zeros_replaced(model: nn.Module) -> Iterator[None]:
    """Put other values into all-zero tensors for a block, so that trials see what lies behind them."""
    with undone() as undo:
        set_values(model, stirred_tensors(named_tensors(model), {}), None, undo)
        yield
