"""Examples that no layer is fitted to: what a pruned network is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ispasp.calibrate.rows import count_examples, is_rows, part
from ispasp.graph.trace import Batch

ENOUGH = 32  # with fewer examples none is spared
_SHARE, _MOST = 1 / 8, 1 / 4

Pair = tuple[Batch, Any]  # what the model gets, and the batch it was taken from


def held_out(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Divide batches into those to calibrate with and those to judge by: about the last eighth of the examples.

    Whole batches are taken where that is at most a quarter of the examples, since every new shape has to be traced;
    else the last batch is divided. With fewer than 32 examples, or where no batch can be divided, nothing is held out.

    >>> import torch
    >>> rest, held = held_out([(x := torch.ones(24, 3), x)] * 4)
    >>> [len(batch) for batch, _ in rest], [len(batch) for batch, _ in held]
    ([24, 24, 24], [24])
    >>> rest, held = held_out([(x := torch.ones(64, 3), x)])
    >>> [len(batch) for batch, _ in rest], [len(batch) for batch, _ in held]
    ([56], [8])
    """
    rest, held = list(pairs), list[Pair]()
    sizes = [count_examples(batch) for batch, _ in pairs]
    total, taken = sum(sizes), 0
    if total < ENOUGH:
        return rest, []
    while taken < _SHARE * total and len(rest) > 1 and taken + sizes[len(rest) - 1] <= _MOST * total:
        taken += sizes[len(rest) - 1]
        held.insert(0, rest.pop())
    if taken < _SHARE * total / 2:
        parts = _divided(rest[-1], round(_SHARE * total) - taken)
        if parts is not None:
            rest[-1], last = parts
            held.insert(0, last)
    return rest, held


def _divided(pair: Pair, last: int) -> tuple[Pair, Pair] | None:
    """A pair without its last examples, and these; None where its tensors do not agree on what an example is."""
    batch, given = pair
    size = count_examples(batch)
    if size < last + 2 or not is_rows(pair, size):
        return None
    if given is batch:  # they stay one
        first, second = part(batch, slice(0, size - last)), part(batch, slice(size - last, size))
        return (first, first), (second, second)
    return part(pair, slice(0, size - last)), part(pair, slice(size - last, size))
