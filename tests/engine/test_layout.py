"""Images run with their channels last in memory, where no op can see it: faster, and the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import ispasp
from ispasp.graph.ops import some_of
from ispasp.graph.trace import Trace, trace
from support.nets import alive


class Net(nn.Module):
    """A residual convolutional network that ends in what is given."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.first, self.second = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, 1)
        self.deep, self.drop, self.end = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Dropout(0.1), end
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        h = F.relu_(self.deep(F.relu6(self.first(x))))
        return torch.as_tensor(self.head(self.drop(self.end(x + self.second(h)))))


def in_place(x: Tensor) -> Tensor:
    x.view(len(x), -1).add_(1.0)
    return x.mean((2, 3))


def reshaped_in_place(x: Tensor) -> Tensor:
    x.reshape(len(x), -1).add_(1.0)  # a view of x, unless its layout needs a copy
    return x.mean((2, 3))


ENDS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "mean": (lambda x: x.mean((2, 3)), True),
    "view": (lambda x: x.view(len(x), 8, -1).amax(-1), True),
    "transposed": (lambda x: x.flatten(2).transpose(1, 2).mean(1), True),
    "view that is written into": (in_place, False),
    "reshaped and written into": (reshaped_in_place, False),
    "strides": (lambda x: x.as_strided((len(x), 8), (8 * 36, 36)), False),
    "noise": (lambda x: (x + 0 * torch.randn_like(x)).mean((2, 3)), False),
}


@pytest.mark.parametrize("kind", ENDS)
def test_where_the_layout_may_change(kind: str) -> None:
    end, allowed = ENDS[kind]
    traced, x = trace(Net(end).eval(), torch.randn(2, 3, 6, 6)), torch.randn(2, 3, 6, 6)
    assert traced.any_layout is allowed
    assert traced.laid_out(x).is_contiguous(memory_format=torch.channels_last) is allowed
    assert traced.laid_out(tokens := torch.ones(2, 5, dtype=torch.long)) is tokens


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("options", [{"compensate": None}, {"heal": ispasp.Heal(steps=3)}])
def test_the_network_is_the_same(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = alive(Net(ENDS[kind][0])), torch.randn(40, 3, 6, 6, dtype=torch.float64).split(20)
    found = ispasp.prune(net, data, progress=False, **options)
    monkeypatch.setattr(Trace, "laid_out", lambda _, value: value)
    expected = ispasp.prune(net, data, progress=False, **options)
    assert found.plan.kept == expected.plan.kept
    for key, value in expected.model.state_dict().items():
        assert_close(found.model.state_dict()[key], value, rtol=1e-6, atol=1e-8)


class Doubled(nn.Module):
    """Writes into its input, where that is contiguous: the trace has a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(len(x), -1).mul_(2.0)
        return torch.as_tensor(self.second(self.first(h).relu()))


def test_a_batch_of_another_layout_where_views_are_written_into() -> None:
    net, x = alive(Doubled()), torch.randn(16, 4, 5, dtype=torch.float64)
    assert not trace(net, x).any_layout
    found, expected = (ispasp.prune(net, [each], progress=False) for each in (x.mT.contiguous().mT, x))
    for key, value in expected.model.state_dict().items():
        assert_close(found.model.state_dict()[key], value)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_some_positions_of_an_axis(layout: torch.memory_format, dim: int) -> None:
    x, positions = torch.randn(4, 5, 3, 6).contiguous(memory_format=layout), torch.tensor([2, 0])
    assert torch.equal(some_of(x, dim, positions), x.index_select(dim, positions))
