"""What the layers of torch.nn say about their own sizes, after their tensors have been cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def _linear(m: Any) -> dict[str, Any]:
    return {"out_features": m.weight.shape[0], "in_features": m.weight.shape[1]}


def _conv(m: Any) -> dict[str, Any]:
    rows, columns = m.weight.shape[:2]
    columns *= m.groups
    return {"in_channels": rows if m.transposed else columns, "out_channels": columns if m.transposed else rows}


def _batch_norm(m: Any) -> dict[str, Any]:
    known = m.weight if m.weight is not None else m.running_mean
    return {} if known is None else {"num_features": known.shape[0]}


def _table(m: Any) -> dict[str, Any]:
    return {"num_embeddings": m.weight.shape[0], "embedding_dim": m.weight.shape[1]}


def _hf_conv1d(m: Any) -> dict[str, Any]:
    return {"nx": m.weight.shape[0], "nf": m.weight.shape[1]}


_SIZES: list[tuple[type[nn.Module], Callable[[Any], dict[str, Any]]]] = [
    (nn.Linear, _linear),
    (nn.modules.conv._ConvNd, _conv),
    (nn.modules.batchnorm._NormBase, _batch_norm),
    (nn.GroupNorm, lambda m: {} if m.weight is None else {"num_channels": m.weight.shape[0]}),
    (nn.PReLU, lambda m: {"num_parameters": m.weight.shape[0]}),
    (nn.Embedding, _table),
    (nn.EmbeddingBag, _table),
    (nn.Bilinear, lambda m: dict(zip(("out_features", "in1_features", "in2_features"), m.weight.shape, strict=True))),
    (nn.LayerNorm, lambda m: {} if m.weight is None else {"normalized_shape": tuple(m.weight.shape)}),
]


def own_sizes(module: nn.Module) -> dict[str, Any]:
    """Attributes that repeat the sizes of the module's tensors, as they are now.

    >>> layer = nn.Linear(4, 3)
    >>> layer.weight.data = layer.weight.data[:2]
    >>> own_sizes(layer)
    {'out_features': 2, 'in_features': 4}
    """
    for cls, sizes in _SIZES:
        if isinstance(module, cls):
            return sizes(module)
    if all(hasattr(module, name) for name in ("nf", "nx", "weight")):  # transformers' Conv1D, a transposed linear
        return _hf_conv1d(module)
    return {}
