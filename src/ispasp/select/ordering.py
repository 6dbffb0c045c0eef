"""Deterministic order: the largest first, the lowest index first among equals."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 40  # two sums of the same numbers in another order differ in the last of 53 bits: 40 make them equal


def comparable(x: Tensor, floor: float = 0.0) -> Tensor:
    """Round to 40 bits and to zero below 2^-40 `floor`, so that rounding errors do not decide between equals.

    x of any shape, float64.

    >>> comparable(torch.tensor([1.0, 1e-17], dtype=torch.float64), floor=1.0)
    tensor([1., 0.], dtype=torch.float64)
    >>> a, b = comparable(torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)); bool(a == b)
    True
    """
    mantissa, exponent = torch.frexp(x)
    rounded = torch.ldexp(torch.round(mantissa * 2.0**_BITS), exponent - _BITS)
    return torch.where(x.abs() <= floor * 2.0**-_BITS, torch.zeros_like(x), rounded)


def descending(x: Tensor, floor: float = 0.0) -> Tensor:
    """Indices of x from the largest value to the smallest; equal values in order of index. (n,)

    >>> descending(torch.tensor([1.0, 3.0, 1.0, 3.0], dtype=torch.float64)).tolist()
    [1, 3, 0, 2]
    """
    return torch.sort(comparable(x, floor), descending=True, stable=True).indices


def largest(x: Tensor, among: Tensor, floor: float = 0.0) -> int:
    """Index of the largest value where `among` is true; the lowest index among equals. (n,), (n,)

    >>> largest(torch.tensor([9.0, 3.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([False, True, True, True]))
    1
    """
    return int(torch.where(among, comparable(x, floor), -torch.inf).argmax())


def smallest(x: Tensor, among: Tensor, floor: float = 0.0) -> int:
    """Index of the smallest value where `among` is true; the highest index among equals. (n,), (n,)

    >>> smallest(torch.tensor([0.0, 1.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([False, True, True, True]))
    2
    """
    return len(x) - 1 - int(torch.where(among, comparable(x, floor), torch.inf).flip(0).argmin())
