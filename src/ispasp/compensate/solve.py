"""Ridge least squares for a consumer's weight and bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.compensate.sums import Halves, Sums

RIDGE = 1e-4
_RIDGES = (RIDGE, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_MANY = 4  # rows for every column: then one half tells enough
_OUTPUTS = 128  # of a layer, at most, that a ridge is chosen by
_ROUNDING = 1e-13  # of a variance, relative to the mean square: that of a constant in float32


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

    >>> from ispasp.compensate.sums import sums_of
    >>> X = torch.randn(1, 3, 100, dtype=torch.float64); W = torch.ones(1, 2, 3).double()
    >>> fit = solve(sums_of(X, W @ X + 5.0), 0 * W, torch.zeros(1, 2).double(), ridge=1e-9)
    >>> torch.allclose(fit.weight, W) and torch.allclose(fit.bias, torch.full((1, 2), 5.0).double())
    True
    """
    W0, b0 = W0.double(), b0.double()
    before = squared_error(s, W0, b0)
    W, b = _normal(s, W0, b0, intercept=intercept).at(ridge)
    after = squared_error(s, W, b)
    return Fit(W, b, before, after, used=True) if after < before else Fit(W0, b0, before, before, used=False)


@dataclass(frozen=True, eq=False)
class _Normal:
    """The normal equations (W - W0) (G + lambda) = C - W0 G, to be solved for any ridge."""

    s: Sums
    W0: Tensor  # (g, O, K)
    b0: Tensor  # (g, O)
    G: Tensor  # (g, K, K)
    rest: Tensor  # (g, O, K), C - W0 G
    intercept: bool

    def at(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Weight and bias."""
        s, G = self.s, self.G
        size = G.diagonal(dim1=-2, dim2=-1).mean(-1)
        varies = size > _ROUNDING * s.xx.diagonal(dim1=-2, dim2=-1).mean(-1)  # constant inputs tell of the shift only
        ridged = G.clone()
        ridged.diagonal(dim1=-2, dim2=-1).add_((ridge * torch.where(varies, size, 1.0))[:, None])
        factor, info = torch.linalg.cholesky_ex(ridged)
        step = torch.cholesky_solve(self.rest.mT, factor).mT
        W = self.W0 + torch.where((varies & (info == 0))[:, None, None], step, 0.0)
        return W, (s.t - (W * s.x[..., None, :]).sum(-1)) / s.n if self.intercept else self.b0


def _normal(s: Sums, W0: Tensor, b0: Tensor, *, intercept: bool) -> _Normal:
    if intercept:  # centred: the bias takes the means
        G = s.xx - s.x[..., :, None] * s.x[..., None, :] / s.n
        C = s.tx - s.t[..., :, None] * s.x[..., None, :] / s.n
    else:
        G, C = s.xx, s.tx - b0[..., :, None] * s.x[..., None, :]
    return _Normal(s, W0, b0, G, C - W0 @ G, intercept)


@dataclass(frozen=True)
class HeldOut:
    """What fits to one half of the examples are worth on the other: squared errors there without and with them.

    `examined` are the halves that errors were measured on.
    """

    ridge: float
    before: float
    after: float
    examined: tuple[Sums, ...]


def held_out(halves: Halves, W0: Tensor, b0: Tensor, *, intercept: bool, ridge: float | None = None) -> HeldOut | None:
    """Fit to one half, measure on the other; without a `ridge` find the one that does best there.

    Larger ones are tried for as long as they help: with few examples much of a fit is noise. Where rows are few the
    halves change places as well, for a steadier answer. None if one half is empty.
    """
    if not halves.both:
        return None
    W0, b0 = W0.double(), b0.double()
    pairs = [(halves.first, halves.second), (halves.second, halves.first)]
    if float(halves.first.n + halves.second.n) > _MANY * W0.shape[-1]:
        pairs = pairs[:1]
    chosen = _best_ridge(pairs, W0, b0, intercept=intercept) if ridge is None else ridge
    before = sum(squared_error(other, W0, b0) for _, other in pairs)
    fits = [_normal(half, W0, b0, intercept=intercept) for half, _ in pairs]
    after = _errors_at(chosen, fits, pairs)
    return HeldOut(chosen, before, after, tuple(other for _, other in pairs))


def _best_ridge(pairs: Sequence[tuple[Sums, Sums]], W0: Tensor, b0: Tensor, *, intercept: bool) -> float:
    """The ridge with the least error on held-out examples; some of the outputs are enough to tell."""
    every = -(-W0.shape[1] // _OUTPUTS)
    pairs = [(half.outputs(every), other.outputs(every)) for half, other in pairs]
    fits = [_normal(half, W0[:, ::every], b0[:, ::every], intercept=intercept) for half, _ in pairs]
    best, least = _RIDGES[0], math.inf
    for ridge in _RIDGES:
        error = _errors_at(ridge, fits, pairs)
        if error >= least:
            break
        best, least = ridge, error
    return best


def _errors_at(ridge: float, fits: Sequence[_Normal], pairs: Sequence[tuple[Sums, Sums]]) -> float:
    return sum(squared_error(other, *fit.at(ridge)) for fit, (_, other) in zip(fits, pairs, strict=True))


def squared_error(s: Sums, W: Tensor, b: Tensor) -> float:
    """||T - W X - b||^2 from sums.

    >>> from ispasp.compensate.sums import sums_of
    >>> s = sums_of(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 5.0]]]))
    >>> squared_error(s, torch.tensor([[[2.0]]]).double(), torch.tensor([[0.5]]).double())
    0.5
    """
    quadratic = (s.tt - 2 * (W * s.tx).sum(-1) + ((W @ s.xx) * W).sum(-1)).sum()
    linear = (b * (s.n * b - 2 * s.t + 2 * (W * s.x[..., None, :]).sum(-1))).sum()
    return max(float(quadratic + linear), 0.0)
