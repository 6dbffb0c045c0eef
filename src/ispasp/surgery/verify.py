"""Removing must equal masking."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ispasp.graph.trace import Batch, evaluating, run
from ispasp.surgery.masking import tensors_in

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def output_of(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Tensors that the model returns in eval mode, random numbers seeded."""
    with evaluating(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tensors_in(run(model, batch))


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest ||a - b|| / ||b|| over the outputs; infinite where they do not even have the same shapes.

    >>> relative_error([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 5.0])]) == 1 / math.sqrt(34)
    True
    """
    if [tuple(t.shape) for t in found] != [tuple(t.shape) for t in expected]:
        return math.inf
    errors = [0.0]
    for a, b in zip(found, expected, strict=True):
        if not a.is_floating_point():
            continue
        finite = torch.isfinite(b)
        if not torch.equal(finite, torch.isfinite(a)):
            return math.inf
        a, b = a[finite].double(), b[finite].double()  # noqa: PLW2901
        size = float(b.norm())
        errors.append(float((a - b).norm()) / size if size else float((a - b).norm()))
    return max(errors)


def tolerance(outputs: Sequence[Tensor]) -> float:
    """The error that rounding explains, by the least precise dtype among the outputs."""
    return max((_TOLERANCE.get(t.dtype, 0.0) for t in outputs if t.is_floating_point()), default=1e-4)
