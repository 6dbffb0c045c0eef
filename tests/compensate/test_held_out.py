"""Held-out errors, the ridge that is chosen by them, and advice where data are few."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.compensate.solve import RIDGE, Halves, held_out, solve, sums_of
from support.nets import alive


def data(rows: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and weights of a noisy linear problem with 20 inputs."""
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(1, 3, 20, generator=g, dtype=torch.float64)
    X = torch.randn(1, 20, rows, generator=g, dtype=torch.float64)
    return X, W @ X + noise * torch.randn(1, 3, rows, generator=g, dtype=torch.float64), W


def halves(X: Tensor, T: Tensor) -> Halves:
    n = X.shape[-1] // 2
    return Halves(sums_of(X[..., :n], T[..., :n]), sums_of(X[..., n:], T[..., n:]))


def test_it_is_the_error_of_one_half_on_the_other() -> None:
    X, T, W = data(100, 0.5)
    found = held_out(halves(X, T), 0 * W, torch.zeros(1, 3), intercept=False, ridge=1e-3)  # 100 rows > 4 x 20 columns
    fit = solve(sums_of(X[..., :50], T[..., :50]), 0 * W, torch.zeros(1, 3), intercept=False, ridge=1e-3)
    assert found is not None
    assert math.isclose(found.after, float((T - fit.weight @ X)[..., 50:].square().sum()), rel_tol=1e-9)
    assert math.isclose(found.before, float(T[..., 50:].square().sum()), rel_tol=1e-9)


def test_few_noisy_data_take_a_larger_ridge() -> None:
    X, T, W = data(44, 3.0)
    few = held_out(halves(X, T), 0 * W, torch.zeros(1, 3), intercept=True)
    X, T, W = data(4000, 0.01)
    many = held_out(halves(X, T), 0 * W, torch.zeros(1, 3), intercept=True)
    assert few is not None
    assert many is not None
    assert few.ridge > many.ridge == RIDGE


def test_one_example_has_no_other_half() -> None:
    X, T, W = data(1, 0.0)
    empty = Halves(sums_of(X, T), sums_of(X[..., :0], T[..., :0]))
    assert held_out(empty, 0 * W, torch.zeros(1, 3), intercept=True) is None
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    result = ispasp.prune(model, [torch.randn(1, 4)], 0.5, progress=False)
    assert result.layers[0].held_out_error is None


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).double()


def test_in_sample_errors_flatter_and_held_out_ones_do_not(net: nn.Module) -> None:
    x, new = torch.randn(64, 16).double(), torch.randn(4000, 16).double()
    result = ispasp.prune(net, [x], 0.5, progress=False)
    layer = result.layers[0]
    assert layer.held_out_error is not None
    assert layer.relative_error is not None
    with torch.no_grad():
        real = float((result.model(new) - net(new)).norm() / (net(new) - net[2].bias).norm())
    assert layer.relative_error < 0.8 * real
    assert 0.8 * real < layer.held_out_error < 1.5 * real


def test_many_examples_make_both_agree(net: nn.Module) -> None:
    result = ispasp.prune(net, [torch.randn(4000, 16).double()], 0.5, progress=False)
    layer = result.layers[0]
    assert layer.held_out_error == pytest.approx(layer.relative_error, rel=0.1)


def test_a_fit_that_is_worse_on_new_examples_is_left_alone() -> None:
    """Targets have nothing to do with the inputs: whatever is fitted to one half is wrong on the other."""
    X, T, W = data(30, 0.0)
    T = torch.randn(T.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = held_out(halves(X, T), 0 * W, torch.zeros(1, 3), intercept=False)
    assert found is not None
    assert found.ridge == 10.0
    assert found.after > 0.9 * found.before


def test_too_few_examples_are_told(net: nn.Module) -> None:
    result = ispasp.prune(net, [torch.randn(8, 16).double()], 0.5, progress=False)
    assert result.advice == (
        "too few examples: 8 examples make 8 rows, but 1 of 1 layers have more columns to refit; "
        "pass about 320 examples",
    )
    assert result.advice[0] in " ".join(str(result).split())
    assert ispasp.prune(net, [torch.randn(640, 16).double()], 0.5, progress=False).advice == ()


def test_some_of_many_outputs_choose_the_ridge_and_are_measured() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(1, 20, 44, generator=g, dtype=torch.float64)
    W = torch.randn(1, 700, 20, generator=g, dtype=torch.float64)
    T = W @ X + 3.0 * torch.randn(1, 700, 44, generator=g, dtype=torch.float64)
    b = torch.zeros(1, 700)
    found = held_out(halves(X, T), 0 * W, b, intercept=True)
    each = {r: held_out(halves(X, T), 0 * W, b, intercept=True, ridge=r) for r in (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)}
    assert found is not None
    assert found.ridge == min(each, key=lambda r: each[r].after if each[r] else math.inf)
    assert found.after == each[found.ridge].after
    assert found.before == found.size == pytest.approx(float(T[:, ::6].square().sum()))  # 117 of 700


def test_advice_where_new_examples_are_fitted_much_worse() -> None:
    """There are as many rows as columns, but the fit learns the examples by heart; more of them are as good as new."""
    torch.manual_seed(0)
    net = alive(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)))
    few, many = (torch.randn(n, 64).double() for n in (80, 1000))
    result = ispasp.prune(net, [few], 0.5, ridge=1e-6, progress=False)
    (layer,) = result.layers
    assert layer.held_out_error is not None and layer.held_out_error > 1.25 * layer.relative_error
    (advice,) = result.advice
    assert advice.startswith("1 of 1 layers fit the calibration examples much better than new ones, 2 most of all")
    assert f"(error {layer.relative_error:.1%}, held out {layer.held_out_error:.1%})" in advice
    wanted = int(advice.split("about ")[1].split()[0].replace(",", ""))
    assert 80 < wanted < 800
    assert ispasp.prune(net, [many[:wanted]], 0.5, ridge=1e-6, progress=False).advice == ()
