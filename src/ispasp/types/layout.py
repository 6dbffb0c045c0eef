"""Where the units of hidden dimensions lie in a tensor's axis.

An extent describes an axis as a concatenation of products of factors (slowest first): ("fc1", 64) is the index of a
hidden dimension, (None, 49) an index that stays whole. `((("attn", 12), (None, 64)),)` are 12 heads of 64 channels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

Factor = tuple[str | None, int]
Extent = tuple[tuple[Factor, ...], ...]
Kept = Mapping[str, Sequence[int]]


def full_length(extent: Extent) -> int:
    """Number of positions in the dense model.

    >>> full_length(((("attn", 12), (None, 64)), ((None, 3),)))
    771
    """
    return sum(math.prod(size for _, size in segment) for segment in extent)


def kept_length(extent: Extent, kept: Kept) -> int:
    """Number of positions that stay.

    >>> kept_length(((("attn", 12), (None, 64)),), {"attn": [0, 5]})
    128
    """
    total = 0
    for segment in extent:
        sizes = [size if name is None or name not in kept else len(kept[name]) for name, size in segment]
        total += math.prod(sizes)
    return total


def kept_mask(extent: Extent, kept: Kept) -> Tensor:
    """Which positions stay, as booleans. (full length,)

    >>> kept_mask(((("fc", 2), (None, 2)),), {"fc": [1]}).tolist()
    [False, False, True, True]
    """
    parts = []
    for segment in extent:
        mask = torch.ones(1, dtype=torch.bool, device="cpu")
        for name, size in segment:
            factor = torch.ones(size, dtype=torch.bool, device="cpu")
            if name is not None and name in kept:
                factor = torch.zeros(size, dtype=torch.bool, device="cpu")
                factor[list(kept[name])] = True
            mask = (mask[:, None] & factor[None, :]).flatten()
        parts.append(mask)
    return torch.cat(parts)


def names_in(extent: Extent) -> set[str]:
    """Hidden dimensions that an extent runs over.

    >>> names_in(((("attn", 12), (None, 64)),))
    {'attn'}
    """
    return {name for segment in extent for name, _ in segment if name is not None}


def without(extent: Extent, names: Collection[str]) -> Extent:
    """The same extent in which these hidden dimensions stay whole.

    >>> without(((("attn", 12), (None, 64)),), {"attn"})
    (((None, 12), (None, 64)),)
    """
    return tuple(tuple((None if name in names else name, size) for name, size in segment) for segment in extent)
