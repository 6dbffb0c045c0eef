"""The paper, literally: Algorithm 1 on matrices and Algorithm 2 by automatic differentiation.

Slow on purpose and in the paper's symbols. It is the oracle of the tests and the baseline of the benchmarks; nothing
else may use it. Sets are returned after every iteration, each sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Layer = Callable[[Tensor], Tensor]


def mu(X: Tensor) -> Tensor:
    """Sum over columns. (m, n) -> (m,)

    >>> mu(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([3., 7.])
    """
    return X.sum(1)


def supp(x: Tensor, k: int, noise: float = 0.0) -> set[int]:
    """Support of x_k, the k largest-valued components; the lowest index first among equals.

    The paper computes with real numbers. In floating point two equal sums differ in their last bits, so values are
    compared to 40 bits, and what is below 2^-40 `noise` counts as zero.

    >>> supp(torch.tensor([1.0, -5.0, 2.0, 2.0]), 2)
    {2, 3}
    """
    m, e = torch.frexp(x.double())
    x = torch.ldexp((m * 2.0**40).round(), e - 40) * (x.double().abs() > noise * 2.0**-40)
    return set(x.sort(descending=True, stable=True).indices[:k].tolist())


def algorithm1(H: Tensor, W1: Tensor, *, s: int, T: int) -> list[list[int]]:
    """Algorithm 1 with the full data matrix: H (d_hid, B), W1 (d_out, d_hid) -> S after t = 1..T.

    V = W1 H - W1[:, S] H[S]; Omega = supp(mu(W1^T V), 2s); S = the s largest of mu(H) within Omega and S.

    >>> algorithm1(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]), s=1, T=3)
    [[2], [2], [2]]
    """
    return algorithm1_minibatch([H] * T, W1, s=s)


def algorithm1_minibatch(Hs: Iterable[Tensor], W1: Tensor, *, s: int) -> list[list[int]]:
    """Algorithm 1 with a new mini-batch per iteration: the t-th of Hs (d_hid, B) is the data of iteration t.

    >>> W = torch.eye(2)
    >>> algorithm1_minibatch([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.0]])], W, s=1)
    [[1], [0]]
    """
    S: set[int] = set()
    history = []
    noise = 0.0
    for H in Hs:
        h = mu(H)
        U = W1 @ H
        V = U - W1[:, sorted(S)] @ H[sorted(S)]
        y = mu(W1.T @ V)  # Step I
        noise = noise or float(y.abs().max())
        Omega = supp(y, 2 * s, noise)
        S = _prune(h, Omega | S, s)  # Step II
        history.append(sorted(S))
    return history


def importance(H: Tensor, S: set[int], layers: Iterable[Layer], channels_per_unit: int = 1) -> Tensor:
    """Algorithm 2: importance of every unit by automatic differentiation, summed over batch and positions.

    y = sum of d/dH 1/2 ||layer(H) - layer(H_S)||^2, H_S held fixed.

    H (B, d, ...) with the channels on axis 1; `layers` are the dense layers that read H (convolution, convolution
    followed by BatchNorm, linear, ...). A unit is `channels_per_unit` consecutive channels. (units,)

    >>> importance(torch.tensor([[1.0, 2.0]]), {0}, [torch.nn.Identity()])
    tensor([0., 2.], dtype=torch.float64)
    """
    H = H.detach().requires_grad_(True)
    mask = torch.zeros(H.shape[1] // channels_per_unit, dtype=H.dtype, device=H.device)
    mask[sorted(S)] = 1.0
    H_S = H.detach() * mask.repeat_interleave(channels_per_unit).reshape(-1, *(1,) * (H.ndim - 2))
    for layer in layers:
        with torch.no_grad():
            prune_out = layer(H_S)
        dense_out = layer(H)
        obj = (0.5 * (dense_out - prune_out) ** 2).sum()
        obj.backward()  # type: ignore[no-untyped-call]
    assert H.grad is not None  # noqa: S101  # backward has just filled it
    return _per_unit(H.grad, channels_per_unit)


def algorithm2(
    Hs: Iterable[list[Tensor]], layers: list[Layer], *, s: int, channels_per_unit: int = 1
) -> list[list[int]]:
    """Algorithm 1 with the importance of Algorithm 2, for any layers that read H.

    The t-th item of Hs is the data of iteration t, as a list of mini-batches (B, d, ...) whose importance is added
    up: repeat the same list for the full data, pass another one each time for a new mini-batch per iteration.

    >>> H = torch.tensor([[1.0, 2.0, 3.0]])
    >>> algorithm2([[H]] * 2, [torch.nn.functional.relu], s=2)
    [[1, 2], [1, 2]]
    """
    S: set[int] = set()
    history = []
    noise = 0.0
    for batches in Hs:
        h = torch.stack([_per_unit(H, channels_per_unit) for H in batches]).sum(0)
        y = torch.stack([importance(H, S, layers, channels_per_unit) for H in batches]).sum(0)
        noise = noise or float(y.abs().max())
        S = _prune(h, supp(y, 2 * s, noise) | S, s)
        history.append(sorted(S))
    return history


def _per_unit(H: Tensor, channels_per_unit: int) -> Tensor:
    total = H.double().sum([axis for axis in range(H.ndim) if axis != 1])
    return total.reshape(-1, channels_per_unit).sum(1)


def _prune(h: Tensor, Omega_star: set[int], s: int) -> set[int]:
    candidates = sorted(Omega_star)
    return {candidates[i] for i in supp(h[candidates], s)}
