"""Examples are the rows of a batch: how many there are, and some of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ispasp.graph.trace import Batch

_EXAMPLES = 2  # enough to find out about a model's structure


def count_examples(batch: Batch) -> int:
    """Number of examples, by the first tensor.

    >>> import torch
    >>> count_examples(torch.ones(8, 3))
    8
    """
    return next((leaf.shape[0] if leaf.ndim else 1 for leaf in tensors_of(batch)), 1)


def first_examples(batch: Batch) -> Batch | None:
    """The first two examples, if all tensors agree on how many there are; None if there is nothing to cut.

    >>> import torch
    >>> first_examples((torch.ones(8, 3), torch.ones(8)))[0].shape
    torch.Size([2, 3])
    """
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in tensors_of(batch)}
    if len(sizes) != 1 or min(sizes) <= _EXAMPLES:
        return None
    return part(batch, slice(0, _EXAMPLES))


def first_of(batch: Batch, most: int) -> Batch:
    """At most so many examples of a batch, or all where its tensors do not agree on what an example is.

    >>> import torch
    >>> len(first_of(torch.ones(8, 3), 5)), len(first_of(torch.ones(8, 3), 9))
    (5, 8)
    """
    size = count_examples(batch)
    return part(batch, slice(0, most)) if size > most and is_rows(batch, size) else batch


def is_rows(value: Any, size: int) -> bool:
    """Whether all tensors have so many rows."""
    return all(t.ndim > 0 and t.shape[0] == size for t in tensors_of(value))


def part(value: Any, rows: slice) -> Any:
    """The given rows of all tensors."""
    return pytree.tree_map(lambda leaf: leaf[rows].clone() if isinstance(leaf, Tensor) else leaf, value)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a batch."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
