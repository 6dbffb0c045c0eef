"""Calibration batches: what users hand over, made ready for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.errors import InputError
from ispasp.graph.trace import Batch

InputOf = Callable[[Any], Batch]
_EXAMPLES = 2  # enough to find out about a model's structure


def prepared(batches: Iterable[Any], model: nn.Module, input_of: InputOf | None = None) -> Iterator[tuple[Batch, Any]]:
    """Each batch as the model takes it, and as it was given, both on the model's device.

    >>> pairs = prepared([(torch.ones(2, 3), 1)], nn.Linear(3, 1), input_of=lambda batch: batch[0])
    >>> [(x.shape, given[1]) for x, given in pairs]
    [(torch.Size([2, 3]), 1)]
    """
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise InputError(
            f"batches is a {type(batches).__name__}: pass an iterable of batches, for one batch a list [batch]"
        )
    if input_of is not None and not callable(input_of):
        raise InputError(f"input_of={input_of!r}: pass a function, such as lambda batch: batch[0]")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def there(batch: Any) -> Batch:
        return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, _plain(batch))

    for number, batch in enumerate(batches):
        chosen = there(batch if input_of is None else input_of(batch))
        if count_examples(chosen) == 0:
            raise InputError(f"batch {number} holds no examples: leave empty batches out")
        yield chosen, chosen if input_of is None else there(batch)


def _plain(batch: Batch) -> Batch:
    """Mappings such as a tokenizer's BatchEncoding become dictionaries, which torch.export knows."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def signature(batch: Batch) -> tuple[Any, ...]:
    """What a traced graph depends on: shapes, dtypes, and everything that is not a tensor.

    >>> signature({"x": torch.ones(2, 3)}) == signature({"x": torch.zeros(2, 3)})
    True
    """
    leaves, tree = pytree.tree_flatten(batch)
    parts = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves]
    return (str(tree), *parts)


def first_examples(batch: Batch) -> Batch | None:
    """The first two examples, if all tensors agree on how many there are; None if there is nothing to cut.

    >>> first_examples((torch.ones(8, 3), torch.ones(8)))[0].shape
    torch.Size([2, 3])
    """
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or min(sizes) <= _EXAMPLES:
        return None
    return pytree.tree_map(lambda leaf: leaf[:_EXAMPLES].clone() if isinstance(leaf, Tensor) else leaf, batch)


def count_examples(batch: Batch) -> int:
    """Number of examples, by the first tensor.

    >>> count_examples(torch.ones(8, 3))
    8
    """
    return next(
        (leaf.shape[0] if leaf.ndim else 1 for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), 1
    )
