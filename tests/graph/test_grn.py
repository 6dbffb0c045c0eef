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


@pytest.mark.parametrize("centred", [False, True])
def test_global_response_normalisation_is_named(centred: bool) -> None:
    survey = ispasp.survey(Block(centred), torch.randn(2, 3, 3, 4))
    assert [d.name for d in survey.dimensions] == ["second"]
    (row,) = [row for row in survey.frozen if row.name == "first"]
    assert row.reason.startswith("mean runs over" if centred else "global response normalisation averages over")
