"""Global response normalisation: frozen, and said so in plain words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ispasp


class Block(nn.Module):
    """An MLP of ConvNeXt V2, channels last."""

    def __init__(self, centred: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.second = nn.Linear(4, 8), nn.Linear(4, 3), nn.Linear(8, 4)
        self.gamma, self.centred = nn.Parameter(torch.rand(8)), centred

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        norms = h.norm(p=2, dim=(1, 2), keepdim=True)
        mean = norms.mean(dim=-1, keepdim=True)
        scale = norms - mean if self.centred else norms / (mean + 1e-6)
        return torch.as_tensor(self.last(self.second(h + self.gamma * h * scale).relu()))


class Pooled(nn.Module):
    """The mean of a norm layer's output, which is an output as well: no global response normalisation."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.head = nn.Linear(4, 8), nn.Linear(8, 4), norm, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.norm(self.second(self.first(x).relu()))
        mean, (left, _) = h.mean(1), h.split(2, dim=2)
        return mean, self.head(mean), left


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.BatchNorm1d(3)])
def test_the_mean_of_a_norm_layer_may_be_an_output(norm: nn.Module) -> None:
    survey = ispasp.survey(Pooled(norm).eval(), torch.randn(5, 3, 4))
    assert [d.name for d in survey.dimensions] == ["first"]


@pytest.mark.parametrize("centred", [False, True])
def test_global_response_normalisation_is_named(centred: bool) -> None:
    survey = ispasp.survey(Block(centred), torch.randn(2, 3, 3, 4))
    assert [d.name for d in survey.dimensions] == ["second"]
    (row,) = [row for row in survey.frozen if row.name == "first"]
    assert row.reason.startswith("mean runs over" if centred else "global response normalisation averages over")
