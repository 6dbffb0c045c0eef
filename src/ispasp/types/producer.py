"""Producers: the layers whose output channels are the units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types.checks import check_finite, checked_tensor


@dataclass(frozen=True, eq=False)
class Producer:
    """A layer that makes the channels of a hidden dimension: one row of weights for each channel.

    `weight` (channels, fan-in): a convolution's filters flattened. `units[c]` is the unit of channel c, -1 for one that
    is not part of the hidden dimension; None means that channel i is unit i. `scale` (channels,) is the weight (gamma)
    of a BatchNorm right after the layer, None without one.

    >>> Producer(torch.ones(4, 3), units=torch.tensor([0, 0, 1, 1])).unit_of()
    tensor([0, 0, 1, 1])
    """

    weight: Tensor
    units: Tensor | None = None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a producer; keep values only."""
        checked_tensor("a producer's weight", self.weight)
        if self.weight.ndim != 2 or self.weight.numel() == 0:
            raise InputError(
                f"a producer's weight is (channels, fan-in), this one has shape {tuple(self.weight.shape)}: "
                "flatten a convolution's filters"
            )
        check_finite("producer weight", self.weight, "repair the layer before pruning it")
        object.__setattr__(self, "weight", self.weight.detach())
        for name in ("units", "scale"):
            value = getattr(self, name)
            if value is None:
                continue
            if tuple(checked_tensor(name, value).shape) != (len(self.weight),):
                raise InputError(
                    f"{name} has shape {tuple(value.shape)}, the producer makes {len(self.weight)} channels: "
                    "pass one value per channel"
                )
            object.__setattr__(self, name, value.detach().long() if name == "units" else value.detach())

    def unit_of(self) -> Tensor:
        """Unit of every channel. (channels,)

        >>> Producer(torch.ones(2, 3)).unit_of()
        tensor([0, 1])
        """
        if self.units is not None:
            return self.units.to(self.weight.device)
        return torch.arange(len(self.weight), device=self.weight.device)
