"""Sensitivities: how much the loss depends on each unit, from one backward pass per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.readers import Reader
from ispasp.calibrate.traces import Circuits
from ispasp.errors import InputError
from ispasp.graph.trace import Batch
from ispasp.types import Sensitivity

Loss = Callable[[Any, Any], Tensor]


def output_of(passage: Passage) -> Any:
    """Run to the end; what the model returns, in the form the model returns it."""
    flat = passage.advance()
    return pytree.tree_unflatten(list(flat), passage.circuit.trace.output)


def checked_loss(value: Any) -> Tensor:
    """The loss if it is one finite number, else an error that says what is wanted."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(
            f"loss(output, batch) returned a {type(value).__name__} "
            f"{tuple(value.shape) if isinstance(value, Tensor) else ''}: return one number, the mean over the batch"
        )
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"loss(output, batch) is {float(value)}: check the labels and the calibration data")
    return value


def sensitivities(
    readers: Sequence[Reader],
    units: Mapping[str, int],
    circuits: Circuits,
    tensors: Mapping[str, Tensor],
    edits: Edits,
    pair: tuple[Batch, Any],
    loss: Loss,
) -> dict[tuple[int, str], Sensitivity]:
    """Sensitivities of one batch for each reader and hidden dimension it reads.

    `pair` is the input and the batch that `loss` gets. For every example |sum over the unit of H dL/dH|, L the
    example's own loss: `loss` is taken for the mean over the batch.
    """
    batch, given = pair
    with torch.enable_grad():
        passage = Passage(circuits.of(batch), batch, tensors, edits)
        passage.probe({reader.number: reader.contraction.data for reader in readers})
        value = checked_loss(loss(output_of(passage), given))
        if not value.requires_grad:
            raise InputError("loss(output, batch) does not depend on the model's output: compute it from `output`")
        zeros = [passage.probes[reader.number][1] for reader in readers]
        gradients = torch.autograd.grad(value, zeros, allow_unused=True)
    found = {}
    for reader, gradient in zip(readers, gradients, strict=True):
        x, _ = passage.probes[reader.number]
        effect = torch.zeros_like(x) if gradient is None else x.double() * gradient.double() * len(x)
        for name in reader.names:
            found[reader.number, name] = _by_unit(effect, reader.labels(name, x), units[name])
    return found


def _by_unit(effect: Tensor, labels: Tensor, units: int) -> Sensitivity:
    flat, unit_of = effect.reshape(len(effect), -1), labels[0].reshape(-1)
    mine = unit_of >= 0
    each = flat.new_zeros(len(flat), units, dtype=torch.float64).index_add(1, unit_of[mine], flat[:, mine].double())
    return Sensitivity(each.abs().sum(0), len(flat))
