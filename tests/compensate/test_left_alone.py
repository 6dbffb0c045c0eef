"""Weights that are not a consumer's own are left alone, and the report says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ispasp
from support.nets import CalledTwice, alive


class Tied(nn.Module):
    """Two layers with one weight: what one reads the other makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.relu(h)) * self.c(torch.tanh(h))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.v = nn.Linear(5, 8), nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x)) @ self.v


class Batched(nn.Module):
    """A matrix for each of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.empty(3, 5, 8)), nn.Parameter(torch.empty(3, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.relu(torch.bmm(x.expand(3, -1, -1), self.w1)), self.w2).sum(0)


@pytest.mark.parametrize(
    ("build", "weights", "why"),
    [
        (CalledTwice, {"shared": "shared.weight"}, "its weight is shared or computed, not a parameter of its own"),
        (Tied, {"b": "b.weight"}, "its weight is shared or computed, not a parameter of its own"),
        (Normed, {"b": None}, "its weight is shared or computed, not a parameter of its own"),
        (Vector, {"v": "v"}, "its weight has 1 axes, not the two of a matrix"),
        (Batched, {"w2": "w2"}, "its weight has 3 axes, not the two of a matrix"),
    ],
)
@pytest.mark.parametrize("order", ["sequential", "oneshot"])
def test_not_compensated_and_told(
    build: Callable[[], nn.Module], weights: dict[str, str | None], why: str, order: str
) -> None:
    dense, x = alive(build()), torch.randn(30, 5, dtype=torch.float64)
    result = ispasp.prune(dense, [x], compensate="local", order=order, scope="all", progress=False)
    bare = ispasp.prune(dense, [x], compensate=None, order="oneshot", scope="all", progress=False)
    notes = [note for layer in result.layers for note in layer.notes]
    for path, weight in weights.items():
        assert f"{path}: not compensated: {why}" in notes
        if weight is not None and order == "oneshot":  # else other units stay
            assert torch.equal(result.model.get_parameter(weight), bare.model.get_parameter(weight))


def test_a_bias_that_is_shared_stays_while_the_weight_is_fitted() -> None:
    class SharedBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(5, 4)
            self.c.bias = self.b.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x))) + self.c(x)

    dense, x = alive(SharedBias()), torch.randn(30, 5, dtype=torch.float64)
    result = ispasp.prune(dense, [x], progress=False)
    assert result.layers[0].notes == ("b: no shift: its bias is shared, and stays",)
    assert torch.equal(result.model.b.bias, dense.b.bias)
    assert result.layers[0].relative_error < result.layers[0].uncompensated_error


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1,), (1, 1), (6, 4), (6, 1)])
def test_a_bias_of_addmm_keeps_its_shape(shape: tuple[int, ...]) -> None:
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w, self.b = nn.Linear(5, 8), nn.Parameter(torch.empty(8, 4)), nn.Parameter(torch.empty(shape))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.b, torch.relu(self.a(x)), self.w)

    x = torch.randn(6, 5, dtype=torch.float64)
    result = ispasp.prune(alive(Broadcast()), [x], ridge=1e-4, progress=False)
    assert result.model.b.shape == shape
    told = ("w: not compensated: its bias is not one number for each output",)
    assert result.layers[0].notes == (() if shape[-1] == 4 and len(shape) * shape[0] < 6 else told)
