"""First moments over the data: mu, its two rules, and the best split H = Z + E."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.errors import InputError


@dataclass(frozen=True)
class Split:
    """H = Z + E with at most s non-zero rows in Z; both have the shape of what was split."""

    Z: Tensor
    E: Tensor


def mu(X: Tensor) -> Tensor:
    """Sum the columns of a matrix: mu(X)_i = sum_j X_ij, X (m, n) -> (m,) in float64.

    It is linear, so it passes through whatever acts linearly on each example:
    mu(A B) = A mu(B), and mu(A + B) = mu(A) + mu(B) for A and B of equal shape.

    >>> A, B = torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> mu(B)
    tensor([3., 8.], dtype=torch.float64)
    >>> mu(A @ B), A.double() @ mu(B)
    (tensor([-5.], dtype=torch.float64), tensor([-5.], dtype=torch.float64))
    >>> mu(B + B) == mu(B) + mu(B)
    tensor([True, True])
    """
    return as_matrix(X, "X").sum(1)


def best_split(H: Tensor, s: int) -> Split:
    """Split H into its s rows with the largest |mu(H)| and the rest: H = Z + E.

    H is (n, B), or mu(H) itself as (n,); Z and E have its shape. Among all splits with an s-row-sparse Z this
    one has the smallest mu(E) in every l_q norm at once. So a bound that grows with norms of mu(E) is tightest
    here, and one that is proved here holds for every other split. Of equal rows the first is kept.

    >>> split = best_split(torch.tensor([[1.0, 1.0], [0.0, 3.0], [0.5, 0.0]]), s=1)
    >>> mu(split.Z), mu(split.E)
    (tensor([0., 3., 0.], dtype=torch.float64), tensor([2.0000, 0.0000, 0.5000], dtype=torch.float64))
    """
    h = as_moment(H)
    if not 0 <= s <= len(h):
        raise InputError(f"H has {len(h)} rows and s={s} was given: pass 0 <= s <= {len(h)}")
    X = H.detach().to("cpu", torch.float64)
    D = h.abs().sort(descending=True, stable=True).indices[:s]
    Z = torch.zeros_like(X)
    Z[D] = X[D]
    return Split(Z, X - Z)


def as_moment(H: Tensor) -> Tensor:
    """Return mu(H) of a matrix (n, B); a vector (n,) is taken for mu(H) already.

    >>> as_moment(torch.ones(2, 3)), as_moment(torch.ones(2))
    (tensor([3., 3.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    return as_matrix(H.unsqueeze(1) if H.ndim == 1 else H, "H").sum(1)


def as_matrix(X: Tensor, name: str) -> Tensor:
    """Return X (m, n) detached, on the CPU and in float64; raise `InputError` if it is no finite matrix.

    >>> as_matrix(torch.ones(2), "W")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: W has shape (2,), a matrix is expected: pass two non-empty axes
    """
    if X.ndim != 2 or X.numel() == 0:
        raise InputError(f"{name} has shape {tuple(X.shape)}, a matrix is expected: pass two non-empty axes")
    X = X.detach().to("cpu", torch.float64)
    if not bool(X.isfinite().all()):
        raise InputError(f"{name} has NaN or infinite entries, finite ones are expected: look where it was made")
    return X
