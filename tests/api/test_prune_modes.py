"""Ways to run that must not matter: in-place forwards, autocast, memory formats."""

from __future__ import annotations

from typing import Any

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


class Blocks(nn.Module):
    """Layers inside `with` blocks, one of them inside another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(n, m) for n, m in ((4, 16), (16, 12), (12, 8), (8, 3)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.b(x).relu()
            with torch.autocast("cpu", enabled=False):
                x = self.c(x.float()).relu()
            return self.d(x)


@pytest.mark.parametrize("method", ["l1", "obs"])
def test_layers_under_autocast_and_no_grad(method: str) -> None:
    model, x = Blocks().eval(), torch.rand(64, 4)
    options: dict[str, Any] = {"method": method, "progress": False}
    result = ispasp.prune(model, [x], {"a": 8, "b": 6, "c": 4}, compensate=None, **options)
    assert [row.name for row in result.layers] == ["a", "b", "c"]
    with torch.no_grad():
        for reader, name in (("b", "a"), ("c", "b"), ("d", "c")):
            gone = [n for n in range(model.get_submodule(name).out_features) if n not in result.plan.kept[name]]
            model.get_submodule(reader).weight[:, gone] = 0
    assert_close(result.model(x), model(x), rtol=0.02, atol=0.02)
    assert result.model(x).dtype == torch.bfloat16
    healed = ispasp.prune(Blocks().eval(), [x], 0.5, heal=ispasp.Heal(steps=5), **options).healed
    assert healed is not None and healed.after <= healed.before


def test_channels_last_stays() -> None:
    model = alive(ResNet()).float().to(memory_format=torch.channels_last)
    result = ispasp.prune(model, [torch.randn(4, 3, 9, 9)], 0.5, progress=False)
    weight = result.model.get_submodule("layer1.0.conv2").weight
    assert isinstance(weight, Tensor)
    assert weight.shape[1] < model.get_submodule("layer1.0.conv2").weight.shape[1]  # type: ignore[index, union-attr]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
