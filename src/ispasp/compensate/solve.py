"""Ridge least squares for a consumer's weight and bias, from second moments that add."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ispasp.types.consumer import products_of_rows

RIDGE = 1e-4
_RIDGES = (RIDGE, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_MANY = 4  # rows per column from which one half is enough to judge a fit
_OUTPUTS = 128  # most outputs of a layer that a ridge is chosen by
_JUST_BIAS = 1e-12  # relative, of a difference of sums
_ROUNDING = 1e-13  # variance of a constant in float32, relative to its mean square
_COLUMNS = 8192  # columns in one product: short sums stay accurate in float32, the total is in float64
_TINY = 1e-20  # a mean square; deviations from such a mean have squares that float32 can hardly hold


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over columns of inputs X (groups, K, N) and targets T (groups, O, N), in float64; they merge with `+`."""

    n: Tensor  # ()
    x: Tensor  # (g, K)
    t: Tensor  # (g, O)
    xx: Tensor  # (g, K, K)
    tx: Tensor  # (g, O, K)
    tt: Tensor  # (g, O)

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self.tensors().values(), other.tensors().values(), strict=True)))

    def outputs(self, every: int) -> Sums:
        return replace(self, t=self.t[:, ::every], tx=self.tx[:, ::every], tt=self.tt[:, ::every])

    def tensors(self) -> dict[str, Tensor]:
        """All sums by name, to add them over ranks."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, eq=False)
class Halves:
    """Sums of two halves of the examples: fit to one, measure on the other."""

    first: Sums
    second: Sums

    def __add__(self, other: Halves) -> Halves:
        return Halves(self.first + other.first, self.second + other.second)

    @property
    def whole(self) -> Sums:
        return self.first + self.second


def no_sums(groups: int, K: int, out: int, device: torch.device) -> Sums:
    """Sums of no columns."""
    sizes = ((), (groups, K), (groups, out), (groups, K, K), (groups, out, K), (groups, out))
    return Sums(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))


def sums_of(X: Tensor, T: Tensor) -> Sums:
    """Sums of one batch. X (groups, K, N), T (groups, O, N).

    Products of float32 are taken in float32, a few thousand columns at a time, and added up in float64; float16 and
    bfloat16 are widened before. Where float32 cannot hold the squares everything is taken in float64.
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
        total.xx.add_(products_of_rows(A)).add_(n * a[..., :, None] * a[..., None, :])
        total.tx.add_(B @ A.mT).add_(n * b[..., :, None] * a[..., None, :])
        total.tt.add_(B.square().sum(-1)).add_(n * b.square())
    return total


def _in_range(total: Sums) -> bool:
    """Whether squares of inputs and of targets are neither too large nor too small for float32."""
    squares = [total.xx.diagonal(dim1=-2, dim2=-1), total.tt]
    largest = torch.stack([each.max() for each in squares if each.numel()]) / total.n  # no inputs at width zero
    return bool(((largest > _TINY) & torch.isfinite(largest)).all())


@dataclass(frozen=True, eq=False)
class Fit:
    """New weight (groups, O, K) and bias (groups, O), with the squared errors on the calibration data.

    `before` is the error with the weight as it was, `after` with the new one; `used` is False where the new one was not
    better and the old one is returned.
    """

    weight: Tensor
    bias: Tensor
    before: float
    after: float
    used: bool


def solve(s: Sums, W0: Tensor, b0: Tensor, *, intercept: bool = True, ridge: float = RIDGE) -> Fit:
    """Minimise ||T - W X - b||^2 + lambda ||W - W0||^2 over W, and over b if `intercept`.

    The ridge pulls towards the weight as it was, W0 (groups, O, K), so that directions the data say nothing about stay.
    lambda is `ridge` times the mean variance of the inputs: scaling the data changes nothing. b0 (groups, O).
    """
    W0, b0 = W0.double(), b0.double()
    W0xx = W0 @ s.xx
    W, b, Wxx = _fits(s, W0, b0, W0xx, intercept=intercept)(ridge)
    before, after = squared_error(s, W0, b0, W0xx), squared_error(s, W, b, Wxx)
    return Fit(W, b, before, after, used=True) if after < before else Fit(W0, b0, before, before, used=False)


_Path = Callable[[float], tuple[Tensor, Tensor, Tensor]]  # ridge -> W (g, O, K), b (g, O), W s.xx


def _fits(s: Sums, W0: Tensor, b0: Tensor, W0xx: Tensor, *, intercept: bool) -> _Path:
    """The solutions of the normal equations (W - W0) (G + lambda) = rest, for any ridge.

    The product W s.xx, which the error of a fit needs, follows from them without another multiplication.
    """
    G, rest = s.xx, s.tx - W0xx  # (g, K, K), (g, O, K)
    means = s.x[..., None, :] / s.n  # (g, 1, K)
    off = s.t - (W0 * s.x[..., None, :]).sum(-1) if intercept else s.n * b0
    rest = rest - off[..., None] * means
    if intercept:  # centred: the bias takes the means
        G = G - s.x[..., :, None] * means
    size = G.diagonal(dim1=-2, dim2=-1).mean(-1)
    varies = size > _ROUNDING * s.xx.diagonal(dim1=-2, dim2=-1).mean(-1)  # constant inputs determine the shift only

    def at(ridge: float) -> tuple[Tensor, Tensor, Tensor]:
        strength = (ridge * torch.where(varies, size, 1.0))[:, None]
        ridged = G.clone()
        ridged.diagonal(dim1=-2, dim2=-1).add_(strength)
        factor, info = torch.linalg.cholesky_ex(ridged)
        good = (varies & (info == 0))[:, None, None]
        step = torch.where(good, torch.cholesky_solve(rest.mT, factor).mT, 0.0)
        W = W0 + step
        moved = torch.where(good, rest - strength[..., None] * step, 0.0)  # step G
        if not intercept:
            return W, b0, W0xx + moved
        shift = (step * s.x[..., None, :]).sum(-1)
        return W, (off - shift) / s.n, W0xx + moved + shift[..., None] * means

    return at


@dataclass(frozen=True)
class HeldOut:
    """Squared errors on one half of the examples, without and with a fit to the other half, and the target's size.

    They are those of at most 128 outputs, evenly spread.
    """

    ridge: float
    before: float
    after: float
    size: float


def held_out(
    halves: Halves, W0: Tensor, b0: Tensor, *, intercept: bool, ridge: float | None = None, scale: float = 1.0
) -> HeldOut | None:
    """Fit to one half, measure on the other; without a `ridge` find the one that does best there.

    Larger ones are tried as long as they help: with few examples much of a fit is noise. If rows are few, the halves
    also swap roles, for a steadier answer. None if one half is empty. Every ridge is multiplied by `scale`.
    """
    first, second = halves.first, halves.second
    if not (first.n > 0 and second.n > 0):
        return None
    every = -(-W0.shape[1] // _OUTPUTS)
    W0, b0 = W0[:, ::every].double(), b0[:, ::every].double()
    both = first.outputs(every), second.outputs(every)
    pairs = [both, both[::-1]][: 1 if float(first.n + second.n) > _MANY * W0.shape[-1] else 2]
    fits = [_fits(half, W0, b0, W0 @ half.xx, intercept=intercept) for half, _ in pairs]
    before = sum(squared_error(other, W0, b0) for _, other in pairs)
    size = sum(target_size(other, b0) for _, other in pairs)
    best, least = RIDGE, math.inf
    for tried in _RIDGES if ridge is None else [ridge]:
        error = sum(squared_error(other, *fit(tried * scale)[:2]) for fit, (_, other) in zip(fits, pairs, strict=True))
        if error >= least:
            break
        best, least = tried, error
    return HeldOut(best, before, least, size)


def target_size(s: Sums, b0: Tensor) -> float:
    """Squared norm of the targets without the bias; zero if they are just a bias."""
    size = float((s.tt - 2 * b0 * s.t + s.n * b0.square()).sum())
    return size if size > _JUST_BIAS * float(s.tt.sum()) else 0.0


def squared_error(s: Sums, W: Tensor, b: Tensor, Wxx: Tensor | None = None) -> float:
    """||T - W X - b||^2 from sums. `Wxx` is W s.xx, if it is known."""
    Wxx = W @ s.xx if Wxx is None else Wxx
    quadratic = (s.tt - 2 * (W * s.tx).sum(-1) + (Wxx * W).sum(-1)).sum()
    linear = (b * (s.n * b - 2 * s.t + 2 * (W * s.x[..., None, :]).sum(-1))).sum()
    return max(float(quadratic + linear), 0.0)
