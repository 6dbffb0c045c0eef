"""What least squares needs of the data: second moments of inputs and targets, which add."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

_COLUMNS = 8192  # columns in one product: short sums stay accurate in float32, the total is in float64
_FAINT = 1e-20  # a mean square; deviations from such a mean have squares that float32 can hardly hold


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over columns of inputs X (groups, K, N) and targets T (groups, O, N), in float64; they merge with `+`.

    >>> s = sums_of(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 5.0]]]))
    >>> (s + s).xx.item(), (s + s).tx.item(), (s + s).n.item()
    (10.0, 26.0, 4.0)
    """

    n: Tensor  # ()
    x: Tensor  # (g, K)
    t: Tensor  # (g, O)
    xx: Tensor  # (g, K, K)
    tx: Tensor  # (g, O, K)
    tt: Tensor  # (g, O)

    def __add__(self, other: Sums) -> Sums:
        """Merge two parts of the data."""
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def outputs(self, every: int) -> Sums:
        """Sums of every so-many-th output."""
        return replace(self, t=self.t[:, ::every], tx=self.tx[:, ::every], tt=self.tt[:, ::every])

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name, for adding over machines."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, eq=False)
class Halves:
    """Sums of two halves of the examples: what is fitted to one can be measured on the other."""

    first: Sums
    second: Sums

    def __add__(self, other: Halves) -> Halves:
        """Merge two parts of the data, half by half."""
        return Halves(self.first + other.first, self.second + other.second)

    @property
    def whole(self) -> Sums:
        """Sums of all examples."""
        return self.first + self.second

    @property
    def both(self) -> bool:
        """Whether neither half is empty."""
        return bool(self.first.n > 0) and bool(self.second.n > 0)


def no_sums(groups: int, K: int, out: int, device: torch.device) -> Sums:
    """Sums of no columns."""
    sizes = ((), (groups, K), (groups, out), (groups, K, K), (groups, out, K), (groups, out))
    return Sums(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))


def sums_of(X: Tensor, T: Tensor) -> Sums:
    """Sums of one batch. X (groups, K, N), T (groups, O, N).

    Products of float32 are taken in float32, a few thousand columns at a time, and added up in float64; float16 and
    bfloat16 are widened before. Where float32 cannot hold the squares everything is taken in float64.

    >>> sums_of(torch.ones(1, 2, 3), torch.ones(1, 1, 3)).xx
    tensor([[[3., 3.], [3., 3.]]], dtype=torch.float64)
    """
    if X.dtype not in (torch.float32, torch.float64):
        X = X.float()
    with torch.autocast(X.device.type, enabled=False):  # it would round float32 to half precision
        total = _sums(X, T, X.dtype)
        if X.dtype is torch.float32 and not _in_range(total):
            total = _sums(X, T, torch.float64)
    return total


def _sums(X: Tensor, T: Tensor, dtype: torch.dtype) -> Sums:
    (g, K, N), out = X.shape, T.shape[1]
    total = no_sums(g, K, out, X.device)
    total.n.fill_(N)
    for start in range(0, N, _COLUMNS):
        A, B = (values[..., start : start + _COLUMNS].to(dtype) for values in (X, T))
        n, a, b = A.shape[-1], A.mean(-1), B.mean(-1)
        A, B = A - a[..., None], B - b[..., None]  # products of deviations: means may be much larger
        a, b = a.double(), b.double()
        total.x.add_(n * a)
        total.t.add_(n * b)
        total.xx.add_(A @ A.mT).add_(n * a[..., :, None] * a[..., None, :])
        total.tx.add_(B @ A.mT).add_(n * b[..., :, None] * a[..., None, :])
        total.tt.add_(B.square().sum(-1)).add_(n * b.square())
    return total


def _in_range(total: Sums) -> bool:
    """Whether squares of inputs and of targets are neither too large nor too small for float32."""
    largest = torch.stack([total.xx.diagonal(dim1=-2, dim2=-1).max(), total.tt.max()]) / total.n
    return bool(((largest > _FAINT) & torch.isfinite(largest)).all())
