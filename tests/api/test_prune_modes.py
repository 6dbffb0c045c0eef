"""Ways to run that must not matter: in-place forwards, autocast, memory formats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from support.nets import ResNet, alive


class InPlace(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x.mul_(2).sub_(1)).relu_())
        return out


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
@pytest.mark.parametrize("memory", [None, 1])
def test_a_forward_that_writes_into_its_input(order: str, memory: int | None) -> None:
    model, batches = InPlace().eval(), [torch.rand(8, 4) for _ in range(3)]
    before = [batch.clone() for batch in batches]
    result = ispasp.prune(model, batches, 3, order=order, memory=memory, compensate=None, progress=False)  # type: ignore[arg-type]
    assert all(batch.equal(known) for batch, known in zip(batches, before, strict=True))
    kept = list(result.plan.kept["a"])
    x = 2 * before[0] - 1
    expected = model.a(x).relu()[:, kept] @ model.b.weight[:, kept].T + model.b.bias
    assert_close(result.model(before[0].clone()), expected)


def test_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    x = torch.rand(32, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = ispasp.prune(model, [x], 0.5, compensate=None, progress=False)
        assert torch.is_autocast_cache_enabled()
    kept = list(result.plan.kept["0"])
    assert len(kept) == 8
    expected = model[:2](x)[:, kept] @ model[2].weight[:, kept].T + model[2].bias
    assert_close(result.model(x), expected)  # in float32 again


def test_channels_last_stays() -> None:
    model = alive(ResNet()).float().to(memory_format=torch.channels_last)
    result = ispasp.prune(model, [torch.randn(4, 3, 9, 9)], 0.5, progress=False)
    weight = result.model.get_submodule("layer1.0.conv2").weight
    assert isinstance(weight, Tensor)
    assert weight.shape[1] < model.get_submodule("layer1.0.conv2").weight.shape[1]  # type: ignore[index, union-attr]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
