"""Compensated weights are those of ridge least squares on stacked data, for every kind of consumer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import ispasp
from support.direct import fitted, seen_by
from support.nets import Attention, alive


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    consumer: str
    groups: int = 1


def two(first: nn.Module, second: nn.Module, *more: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(first, nn.ReLU(), second, *more)


CASES = {
    "linear": Case(two(nn.Linear(6, 10), nn.Linear(10, 4)), (6,), "2"),
    "tokens": Case(two(nn.Linear(6, 10), nn.Linear(10, 4)), (5, 6), "2"),
    "conv": Case(two(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3, 2, 1, 2)), (3, 8, 8), "2"),
    "conv, padded to the same size": Case(two(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 2, padding="same")), (3, 6, 6), "2"),
    "conv1d": Case(two(nn.Conv1d(3, 8, 3), nn.Conv1d(8, 4, 3, padding=1)), (3, 9), "2"),
    "conv3d": Case(two(nn.Conv3d(2, 6, 2), nn.Conv3d(6, 3, 2)), (2, 4, 4, 4), "2"),
    "groups": Case(two(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3, groups=2)), (3, 8, 8), "2", 2),
    "transposed": Case(two(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3, 2, 1, 1)), (3, 6, 6), "2"),
    "transposed groups": Case(two(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 2, 2, groups=2)), (3, 6, 6), "2", 2),
    "separable": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 9, 1), nn.ReLU6(), nn.Conv2d(9, 9, 3, padding=1, groups=9), nn.ReLU6(), nn.Conv2d(9, 4, 1)
        ),
        (3, 6, 6),
        "4",
    ),
    "heads": Case(lambda: Attention(12, 4), (5, 12), "out"),
}


def batches(shape: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(n, *shape, generator=g, dtype=torch.float64) for n in (5, 5, 5)]


STRONG = ("linear", "groups", "transposed groups")


@pytest.mark.parametrize(("kind", "ridge"), [*((kind, 1e-4) for kind in CASES), *((kind, 0.3) for kind in STRONG)])
def test_the_fit_is_that_of_stacked_data(kind: str, ridge: float) -> None:
    case = CASES[kind]
    dense, data = alive(case.build()), batches(case.shape)
    options = {"keep": 0.5, "progress": False, "ridge": ridge}
    bare = ispasp.prune(dense, data, compensate=None, **options)
    result = ispasp.prune(dense, data, compensate="local", **options)
    assert bare.plan.kept == result.plan.kept
    inputs, plain = seen_by(bare.model, case.consumer, data)
    _, targets = seen_by(dense, case.consumer, data)
    layer, new = bare.model.get_submodule(case.consumer), result.model.get_submodule(case.consumer)

    expected = fitted(layer, inputs, targets, ridge=ridge, groups=case.groups)
    assert_close(new.weight.detach(), expected.weight, rtol=1e-7, atol=1e-9)
    assert_close(new.bias.detach(), expected.bias, rtol=1e-7, atol=1e-9)

    (told,) = result.layers
    assert told.relative_error == pytest.approx(expected.error, rel=1e-6)
    lost = sum(float((a - b).square().sum()) for a, b in zip(plain, targets, strict=True)) ** 0.5
    assert told.uncompensated_error == pytest.approx(lost / expected.size, rel=1e-6)
    assert told.relative_error < told.uncompensated_error


def test_dense_equals_local_in_the_first_layer_without_a_skip() -> None:
    dense, data = alive(CASES["conv"].build()), batches((3, 8, 8))
    local, aimed = (ispasp.prune(dense, data, compensate=how, progress=False) for how in ("local", "dense"))
    for key, value in local.model.state_dict().items():
        assert_close(aimed.model.state_dict()[key], value, rtol=1e-9, atol=1e-12)


class Functional(nn.Module):
    """Parameters used in all the ways of writing a product."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fc = how, nn.Linear(6, 10)
        self.w = nn.Parameter(torch.empty(10, 4) if how in ("x @ w", "addmm", "mm") else torch.empty(4, 10))
        self.b = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc(x))
        if self.how == "addmm":
            return torch.addmm(self.b, h, self.w)
        if self.how == "linear":
            return F.linear(h, self.w, self.b)
        if self.how == "w @ x":
            return (self.w @ h.T).T
        return h @ self.w if self.how == "x @ w" else torch.mm(h, self.w)


@pytest.mark.parametrize("how", ["addmm", "linear", "x @ w", "mm", "w @ x"])
def test_products_written_out_are_fitted_as_linear_layers(how: str) -> None:
    dense, data = alive(Functional(how)), batches((6,))
    options = {"keep": 0.5, "progress": False, "ridge": 1e-3}
    result = ispasp.prune(dense, data, compensate="local", **options)
    bare = ispasp.prune(dense, data, compensate=None, **options)
    biased = how in ("addmm", "linear")
    layer = nn.Linear(5, 4, bias=biased, dtype=torch.float64)
    across = how in ("addmm", "x @ w", "mm")
    layer.weight.data = bare.model.w.detach().T.contiguous() if across else bare.model.w.detach()
    if biased:
        layer.bias.data = bare.model.b.detach()
    with torch.no_grad():
        inputs = [torch.relu(bare.model.fc(x)) for x in data]
        targets = [dense(x) for x in data]
    expected = fitted(layer, inputs, targets, ridge=1e-3, intercept=biased)
    assert_close(result.model.w.detach(), expected.weight.T if across else expected.weight, rtol=1e-7, atol=1e-9)
    if biased:
        assert_close(result.model.b.detach(), expected.bias, rtol=1e-7, atol=1e-9)
    else:
        assert "no shift: its module has no place for a bias" in result.layers[0].notes[0]
