"""The energy matrix of a sample of positions: all that an error curve needs of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from ispasp.select.energy import columns, energy
from ispasp.types import Consumer, ConvConsumer, Gram
from ispasp.types.patches import patches

_WIDEST = 8192  # a Gram matrix of more columns takes more than half a gigabyte


def sampled_energy(consumer: Consumer, H: Tensor, units: int, positions: int = 2048) -> Tensor:
    """E with E_ij = sum of <A H_i, A H_j> over at most `positions` outputs, evenly spread. (units, units)

    H is what the consumer gets. A consumer that reads very many channels gives the diagonal of E only: the error of a
    choice is then the sum of its units' own errors.

    >>> from ispasp.types import LinearConsumer
    >>> sampled_energy(LinearConsumer(torch.tensor([[1.0, 2.0]])), torch.tensor([[1.0, 1.0], [0.0, 3.0]]), units=2)
    tensor([[ 1.,  2.],
            [ 2., 40.]], dtype=torch.float64)
    """
    X = _sample(consumer, H.detach(), positions)  # (g, K, N)
    if X.shape[1] > _WIDEST:
        return _diagonal(consumer, X, units)
    return energy(consumer, Gram((X @ X.mT).double(), X.shape[-1]), units)


def _sample(consumer: Consumer, H: Tensor, positions: int) -> Tensor:
    """At most so many columns of the patches, from examples all over the batch."""
    H = H if H.dtype in (torch.float32, torch.float64) else H.float()
    if isinstance(consumer, ConvConsumer):
        each = max(1, H[0, 0].numel())
        wanted = max(1, min(len(H), -(-positions // each)))
        H = H[:: len(H) // wanted][:wanted]
    else:
        H = H.reshape(-1, H.shape[-1])
    if not isinstance(consumer, ConvConsumer) and len(H) > positions:
        H = H[:: len(H) // positions][:positions]
    X = patches(consumer, H)
    return X[..., :: max(1, X.shape[-1] // positions)][..., :positions]


def _diagonal(consumer: Consumer, X: Tensor, units: int) -> Tensor:
    W, unit_of = columns(consumer)  # (g, O/g, K), (g, K)
    E = torch.zeros(units, dtype=torch.float64, device=X.device)
    for group in range(len(W)):
        for unit in range(units):
            mine = unit_of[group] == unit
            G = X[group, mine] @ X[group, mine].T  # (channels of the unit, same)
            V = W[group][:, mine]
            E[unit] += ((V.T @ V) * G.double()).sum()
    return torch.diag(E)
