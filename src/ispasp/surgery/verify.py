"""Removing must equal masking: how outputs are compared, and to which accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.graph.trace import Batch, Trace, evaluating, run_and_restore
from ispasp.surgery.masking import tensors_in

# Hundreds of layers lose two to four digits of 2^-53 and 2^-24. Half precision keeps 11 and 8 bits: a single wrong unit
# of a wide layer can hide in that, so such models are compared in float64 as well.
FLOAT32 = 1e-4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: FLOAT32, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_FLIPPED = 0.1
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


@dataclass(frozen=True)
class Comparison:
    """The largest relative difference of two lists of tensors, and how many of their entries could tell one.

    `flipped` is the largest fraction of whole numbers and booleans that differ: rounding may flip a comparison.
    """

    error: float
    entries: int
    flipped: float = 0.0


def output_of(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Tensors that the model returns in eval mode, random numbers seeded."""
    with evaluating(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tensors_in(run_and_restore(model, batch))


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Comparison:
    """Compare tensors of any dtype; the error is infinite where they do not even have the same shapes.

    Floating-point and complex tensors by ||a - b|| / ||b|| of their finite entries, with the others at the same
    places; whole numbers and booleans by the fraction of entries that differ (`flipped`). Entries that are not finite,
    and tensors of whole numbers that are all alike, count as agreement but not as evidence.

    >>> compare([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 5.0])]).error == 1 / math.sqrt(34)
    True
    >>> compare([torch.tensor([1, 2])], [torch.tensor([1, 3])]), compare([], [])
    (Comparison(error=0.0, entries=2, flipped=0.5), Comparison(error=0.0, entries=0, flipped=0.0))
    """
    if [tuple(t.shape) for t in found] != [tuple(t.shape) for t in expected]:
        return Comparison(math.inf, 0)
    parts = [_compare(_strided(a), _strided(b).to(a.device)) for a, b in zip(found, expected, strict=True)]
    error = max((p.error for p in parts), default=0.0)
    flipped = max((p.flipped for p in parts), default=0.0)
    return Comparison(error, sum(p.entries for p in parts), flipped)


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The error alone; whole numbers count where more differ than rounding flips."""
    outcome = compare(found, expected)
    return outcome.error if outcome.flipped <= _FLIPPED else max(outcome.error, outcome.flipped)


def _strided(tensor: Tensor) -> Tensor:
    """The values of a tensor of any kind."""
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _compare(a: Tensor, b: Tensor) -> Comparison:
    if a.is_complex() != b.is_complex() or a.is_floating_point() != b.is_floating_point():
        return Comparison(math.inf, 0)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
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
    """The error that rounding explains: by the least precise dtype that the traced call computes in."""
    values = [leaf for node in trace.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    return least_precise(value.dtype for value in values if isinstance(value, Tensor))


def least_precise(dtypes: Iterable[torch.dtype]) -> float:
    """The tolerance of the least precise floating-point dtype among these, and of autocast where it is on.

    >>> least_precise([torch.float64, torch.float32, torch.int64])
    0.0001
    """
    used = {_REAL.get(dtype, dtype) for dtype in dtypes}
    if torch.is_autocast_enabled():
        used.add(torch.get_autocast_dtype("cuda"))
    if torch.is_autocast_enabled("cpu"):
        used.add(torch.get_autocast_dtype("cpu"))
    known = [_TOLERANCE.get(dtype, _TOLERANCE[torch.bfloat16]) for dtype in used if dtype.is_floating_point]
    return max(known, default=_TOLERANCE[torch.float32])
