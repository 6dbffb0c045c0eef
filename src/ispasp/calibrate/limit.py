"""How many examples calibration takes of what it is given."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ispasp.calibrate.held_out import Pair
from ispasp.calibrate.rows import count_examples, first_of, tensors_of
from ispasp.graph.trace import Batch

Limit = int | Literal["auto"] | None
_EXAMPLES, _TOKENS, _VALUES = 1024, 65_536, 256 * 3 * 224 * 224


def most_examples(limit: Limit, batch: Batch) -> int | None:
    """The number of examples to take; None for all.

    "auto" takes 1,024, and fewer where examples are large: 65,536 tokens, or 256 images of 3 x 224 x 224. Statistics
    hardly change beyond that, while time and memory grow with every example.

    >>> most_examples("auto", torch.ones(8, 3, 32, 32)), most_examples("auto", torch.ones(8, 512, dtype=torch.long))
    (1024, 128)
    >>> most_examples(64, torch.ones(8, 3)), most_examples(None, torch.ones(8, 3))
    (64, None)
    """
    if limit != "auto":
        return limit if limit is None else int(limit)
    return max(1, min(_EXAMPLES, *(_of_size(tensor) for tensor in tensors_of(batch))))


def _of_size(tensor: Tensor) -> int:
    """As many examples of this size as calibration can take."""
    each = max(1, tensor.numel() // max(1, len(tensor))) if tensor.ndim else 1
    return (_TOKENS if tensor.dtype in (torch.int32, torch.int64) else _VALUES) // each


def first_pair(pair: Pair, most: int) -> Pair:
    """At most so many examples of a batch, and of what it was taken from.

    >>> x, y = torch.ones(8, 3), torch.zeros(8)
    >>> [len(part) for part in first_pair((x, (x, y)), 5)[1]]
    [5, 5]
    """
    batch, given = pair
    if given is batch:  # they stay one
        part = first_of(batch, most)
        return part, part
    part, whole = first_of((batch, given), most)
    return (part, whole) if count_examples(part) <= most else pair
