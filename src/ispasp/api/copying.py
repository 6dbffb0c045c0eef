"""A copy of a model to work on."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ispasp.errors import InputError


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also of models that hold computed tensors.

    torch refuses to copy those, such as the weight that an old-style weight_norm leaves behind.

    >>> model = nn.utils.weight_norm(nn.Linear(2, 2))
    >>> copied(model).weight_v is model.weight_v
    False
    """
    computed = [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor) and not v.is_leaf]
    try:
        return copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}): "
            "use prune_, which works in place"
        ) from error
