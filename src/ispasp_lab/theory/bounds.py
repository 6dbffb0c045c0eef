"""The right-hand sides of Lemma 1, Theorem 1, Lemma 2, Theorem 2 and Theorem 3.

Each has two forms. Without `delta`: the paper's constants, under Assumption 1 (delta_4s <= 0.1). With `delta`, an upper
bound below 1/2 on delta_2s of the consumer or a multiple of it: the sharper form that docs/theory.md derives. Both are
for non-negative H and Algorithm 1 as printed; Lemma 1 also holds for signed H if both rankings go by magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp_lab.theory.moments import RowCompressibility, as_matrix, as_moment


class _Constants(NamedTuple):
    """||mu(H - H_S)||_2 <= rate^t ||mu(H)||_2 + l2 ||mu(E)||_2 + l1 ||mu(E)||_1."""

    rate: float
    l2: float
    l1: float


def lemma1(mu_H: Tensor, mu_E: Tensor, *, s: int, t: int, delta: float | None = None) -> float:
    """Bound ||mu(H - H_S)||_2 after t iterations; mu_H, mu_E are (d_hid,), E the tail of any split H = Z + E.

    As printed: 0.444^t ||mu(H)||_2 + (14 + 7/sqrt(s)) ||mu(E)||_1. With delta:
    (2 delta)^t ||mu(H)||_2 + ((2 + 2 delta) ||mu(E)||_2 + 2 delta/sqrt(s) ||mu(E)||_1) / (1 - 2 delta).

    >>> h, e = torch.tensor([3.0, 4.0, 0.1]), torch.tensor([0.0, 0.0, 0.1])
    >>> round(lemma1(h, e, s=2, t=20), 4), round(lemma1(h, e, s=2, t=20, delta=0.1), 4)
    (1.895, 0.2927)
    """
    h, e = as_moment(mu_H), as_moment(mu_E)
    if len(h) != len(e) or t < 0:
        raise InputError(f"mu(H) has {len(h)} rows, mu(E) {len(e)}, t={t}: pass equal lengths and t >= 0")
    c = _constants(s, delta)
    return float(c.rate**t * h.norm() + c.l2 * e.norm() + c.l1 * e.norm(1))


def theorem1(W: Tensor, mu_H: Tensor, mu_E: Tensor, *, s: int, t: int, delta: float | None = None) -> float:
    """Bound ||W (H - H_S)||_F after t iterations, for H >= 0 and the consumer W (d_out, d_hid).

    ||W|| times Lemma 1: the Frobenius norm as printed, the spectral norm with delta.

    >>> W, h, e = torch.eye(3), torch.tensor([3.0, 4.0, 0.1]), torch.tensor([0.0, 0.0, 0.1])
    >>> round(theorem1(W, h, e, s=2, t=20), 4), round(theorem1(W, h, e, s=2, t=20, delta=0), 4)
    (3.2822, 0.2)
    """
    return theorem3([W], [mu_H], [mu_E], s=s, t=t, delta=delta)


def lemma2(p: float, R: float, *, s: int) -> float:
    """Bound ||mu(E)||_1 for the best split of a (p, R) row-compressible H: R s^(1 - 1/p) / (1/p - 1), inf for p >= 1.

    >>> lemma2(p=0.5, R=2.0, s=10), lemma2(p=1.0, R=2.0, s=10)
    (0.2, inf)
    """
    return RowCompressibility(p, R).tail(s)


def theorem2(W: Tensor, p: float, R: float, *, s: int, delta: float | None = None) -> float:
    """Bound ||W (H - H_S)||_F where Algorithm 1 has come to rest, for a (p, R) row-compressible H >= 0.

    As printed: ||W||_F 7 R p/(1 - p) (2 sqrt(s) + 1) s^(1/2 - 1/p), of order s^(1 - 1/p). With delta:
    ||W||_2 ((2 + 2 delta) tail_2 + 2 delta/sqrt(s) tail_1) / (1 - 2 delta), of order s^(1/2 - 1/p), where tail_q
    is `RowCompressibility.tail(s, q)`. Where the tail has no bound (p >= 1) it is inf.

    >>> round(theorem2(torch.eye(4), p=0.5, R=1.0, s=4), 6)
    8.75
    """
    c, fit = _constants(s, delta), RowCompressibility(p, R)
    tails = [weight * fit.tail(s, q) for q, weight in ((1, c.l1), (2, c.l2)) if weight > 0]
    return _norm(as_matrix(W, "W"), delta) * sum(tails)


def theorem3(
    weights: Sequence[Tensor],
    mu_H: Sequence[Tensor],
    mu_E: Sequence[Tensor],
    *,
    s: int,
    t: int,
    delta: float | None = None,
) -> float:
    """Bound the output residual of a ReLU network pruned from first to last layer, t iterations each.

    H_0 = relu(W_0 X), H_l = relu(W_l H_(l-1)), output W_L H_(L-1). `weights` are W_1 ... W_L (d_l, d_(l-1)), without
    W_0; `mu_H` and `mu_E` are mu(H_l) and mu(E_l) (d_l,) of the dense network, l = 0 ... L-1. The paper's sum with its
    indices repaired, c = 14 + 7/sqrt(s):

    ||W_L||_F sum_(i=1..L) c^(L-i) lemma1(H_(i-1), E_(i-1)) prod_(j=i..L-1) sqrt(d_(j-1)) ||vec W_j||_1

    With delta (at least delta_2s of every W_1 ... W_L): the recursion behind that sum, with the largest column sum for
    ||vec W||_1 and the spectral norm of W_L.

    >>> W, h, e = torch.eye(3), torch.tensor([3.0, 4.0, 0.1]), torch.tensor([0.0, 0.0, 0.1])
    >>> round(theorem3([W, W], [h, h], [e, e], s=2, t=20, delta=0), 4)
    1.2392
    """
    _check_layers(weights, mu_H, mu_E)
    c, sharp = _constants(s, delta), delta is not None
    # the printed c has room for rate^t and for the error that a layer hands on unchanged
    feedback = c.l2 + c.l1 + (c.rate**t if sharp else 0.0)
    D = passed = rho = 0.0  # D bounds the sum of all |H_l - Hhat_l|, Hhat of the pruned network
    for i, given in enumerate(weights):
        W = as_matrix(given, f"weights[{i}]")
        rho = lemma1(mu_H[i], mu_E[i], s=s, t=t, delta=delta) + feedback * D
        passed = D if sharp else 0.0
        size = W.abs().sum(0).max() if sharp else W.abs().sum()
        D = float(size) * (passed + math.sqrt(W.shape[1]) * rho)
    return _norm(W, delta) * (passed + rho)


def theorem3_as_printed(weights: Sequence[Tensor], tails: Sequence[float], *, s: int) -> float:
    """Theorem 3 with the paper's own indices: not a valid bound, kept for the counter-examples.

    ||W_L||_F sum_(i=1..L) d^((L-i)/2) c^(L-i+1) tail_i prod_(j=1..L-i) ||vec W_j||_1, with W_1 ... W_L in `weights` and
    `tails` the norms ||mu(E_1)||_1 ... ||mu(E_L)||_1 (the proof) or L times Lemma 2 (the statement).

    >>> theorem3_as_printed([torch.eye(2), torch.eye(2)], [0.0, 1.0], s=1) == 21 * math.sqrt(2)
    True
    """
    matrices = [as_matrix(W, f"weights[{i}]") for i, W in enumerate(weights)]
    L, d, c = len(matrices), matrices[0].shape[1], _constants(s, None).l1
    sizes = [float(W.abs().sum()) for W in matrices]
    total = 0.0
    for i, tail in enumerate(tails, start=1):
        total += math.sqrt(d) ** (L - i) * c ** (L - i + 1) * tail * math.prod(sizes[: L - i])
    return _norm(matrices[-1], None) * total


def _constants(s: int, delta: float | None) -> _Constants:
    if s < 1:
        raise InputError(f"s={s} was given: pass how many units stay, s >= 1")
    if delta is None:
        return _Constants(rate=0.444, l2=0.0, l1=14 + 7 / math.sqrt(s))
    if not 0 <= delta < 0.5:
        raise InputError(f"delta={delta} was given: the bounds need 0 <= delta_2s < 0.5; try a rescaled W")
    room = 1 - 2 * delta
    return _Constants(rate=2 * delta, l2=(2 + 2 * delta) / room, l1=2 * delta / room / math.sqrt(s))


def _norm(W: Tensor, delta: float | None) -> float:
    return float(W.norm() if delta is None else torch.linalg.matrix_norm(W, 2))


def _check_layers(weights: Sequence[Tensor], mu_H: Sequence[Tensor], mu_E: Sequence[Tensor]) -> None:
    if not 0 < len(weights) == len(mu_H) == len(mu_E):
        given = f"{len(weights)} weights, {len(mu_H)} mu(H) and {len(mu_E)} mu(E)"
        raise InputError(f"{given} were given: pass one of each per pruned layer")
    for i, (W, h) in enumerate(zip(weights, mu_H, strict=True)):
        if W.shape[-1] != len(h):
            raise InputError(f"W_{i + 1} is {tuple(W.shape)}, mu(H_{i}) has {len(h)} rows: pass W (d_out, d_hid)")
