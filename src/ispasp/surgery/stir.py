"""Other values for tensors that prove nothing: a gate of zeros hides whatever lies behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.graph.trace import Batch
from ispasp.surgery.remove import Undo, all_or_nothing, kept_part, set_data
from ispasp.types.plan import Plan


def proves_nothing(tensor: Tensor) -> bool:
    """Whether a floating-point tensor is all zeros, or not all finite.

    >>> proves_nothing(torch.zeros(2)), proves_nothing(torch.tensor([0.0, 1.0])), proves_nothing(torch.zeros(2).int())
    (True, False, False)
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return False
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return not bool(tensor.any()) or not bool(torch.isfinite(tensor).all())


def stirred(tensor: Tensor, seed: int) -> Tensor:
    """Random values between 1/4 and 1, for matrices and kernels divided by the root of their inputs, signs mixed."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    size = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu") * 0.75 + 0.25
    if tensor.ndim > 1:
        signs = torch.randint(0, 2, tensor.shape, generator=generator, device="cpu") * 2 - 1
        size = size * signs / max(tensor[0].numel(), 1) ** 0.5
    return size.to(tensor)


def stirred_tensors(tensors: Mapping[str, Tensor], edits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other values, by name, for what proves nothing; tied tensors get the same."""
    known: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        value = edits.get(name, tensor)
        if id(tensor) in known or proves_nothing(value):
            found[name] = known.setdefault(id(tensor), stirred(tensor, number))
    return found


def stirred_batch(batch: Batch) -> Batch:
    """The batch with other values in tensors that prove nothing."""
    return pytree.tree_map(
        lambda leaf: stirred(leaf, 0) if isinstance(leaf, Tensor) and proves_nothing(leaf) else leaf, batch
    )


def set_values(model: nn.Module, values: Mapping[str, Tensor], plan: Plan | None, undo: Undo) -> None:
    """Give the model's tensors these values, cut to a plan where they are of the dense model."""
    done: set[int] = set()
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, value in values.items():
        tensor = tensors[name]
        if id(tensor) not in done:
            done.add(id(tensor))
            small = value if plan is None else kept_part(name, value, plan)
            set_data(tensor, torch.empty_like(tensor).copy_(small), tensor.grad, undo)


@contextmanager
def telling(model: nn.Module) -> Iterator[None]:
    """The model with other values in tensors of zeros, so that trials are told what lies behind them."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    with all_or_nothing() as undo:
        set_values(model, stirred_tensors(named, {}), None, undo)
        yield
        undo.run()
