"""The least-squares kernel by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.testing import assert_close

from ispasp.compensate import Sums, solve, sums_of
from ispasp.compensate.solve import squared_error


def problem(seed: int, groups: int, K: int, out: int, N: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(groups, K, N, generator=g, dtype=torch.float64) + 3 * torch.randn(
        groups, K, 1, generator=g, dtype=torch.float64
    )
    T = (
        torch.randn(groups, out, N, generator=g, dtype=torch.float64)
        + torch.randn(groups, out, K, generator=g, dtype=torch.float64) @ X.relu()
    )
    W0 = torch.randn(groups, out, K, generator=g, dtype=torch.float64)
    return X, T, W0, torch.randn(groups, out, generator=g, dtype=torch.float64)


SIZES = (st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))


@given(*SIZES, st.booleans())
def test_the_solution_is_a_minimum_and_errors_are_true(
    seed: int, groups: int, K: int, out: int, N: int, intercept: bool
) -> None:
    X, T, W0, b0 = problem(seed, groups, K, out, N)
    s = sums_of(X, T)
    fit = solve(s, W0, b0, intercept=intercept, ridge=1e-3)
    true = float((T - fit.weight @ X - fit.bias[..., None]).square().sum())
    before = float((T - W0 @ X - b0[..., None]).square().sum())
    assert abs(fit.after - true) <= 1e-9 * before + 1e-9
    assert abs(fit.before - before) <= 1e-9 * before + 1e-9
    assert fit.after <= fit.before
    if not intercept:
        assert torch.equal(fit.bias, b0)
    centred = X - X.mean(-1, keepdim=True) if intercept else X
    strength = 1e-3 * centred.square().sum(-1).mean(-1)
    strength = torch.where(strength > 0, strength, 1.0)

    def cost(W: Tensor, b: Tensor) -> float:
        rest = (T - W @ X - b[..., None]).square().sum((1, 2)) + strength * (W - W0).square().sum((1, 2))
        return float(rest.sum())

    g = torch.Generator().manual_seed(seed)
    for _ in range(5 if fit.used else 0):
        step = 1e-2 * torch.randn(fit.weight.shape, generator=g, dtype=torch.float64)
        shift = 1e-2 * torch.randn(fit.bias.shape, generator=g, dtype=torch.float64) if intercept else 0
        assert cost(fit.weight + step, fit.bias + shift) >= cost(fit.weight, fit.bias) * (1 - 1e-9) - 1e-9


@given(*SIZES, st.floats(-3, 3), st.floats(-3, 3))
def test_scaling_the_data_scales_the_solution(
    seed: int, groups: int, K: int, out: int, N: int, inputs: float, targets: float
) -> None:
    """Inputs 10^a times as large need weights 10^-a times as large: nothing in the ridge knows a scale."""
    X, T, W0, b0 = problem(seed, groups, K, out, N + 1)
    a, c = 10.0**inputs, 10.0**targets
    plain = solve(sums_of(X, T), W0, b0, ridge=1e-2)
    scaled = solve(sums_of(a * X, c * T), c / a * W0, c * b0, ridge=1e-2)
    assert plain.used == scaled.used
    assert_close(scaled.weight, c / a * plain.weight, rtol=1e-5, atol=1e-7 * c / a)
    assert_close(scaled.bias, c * plain.bias, rtol=1e-5, atol=1e-6 * c)


@given(*SIZES, st.integers(1, 39))
def test_parts_of_the_data_add_up(seed: int, groups: int, K: int, out: int, N: int, at: int) -> None:
    X, T, _, _ = problem(seed, groups, K, out, N + 1)
    at = min(at, N)
    parts = sums_of(X[..., :at], T[..., :at]) + sums_of(X[..., at:], T[..., at:])
    for key, value in sums_of(X, T).tensors().items():
        assert_close(parts.tensors()[key], value, rtol=1e-10, atol=1e-9)


def test_a_group_without_signal_does_not_keep_the_others_from_being_fitted() -> None:
    X, T, W0, b0 = problem(0, 2, 4, 3, 50)
    X[1] = 0.7  # constant, as behind a dead ReLU
    fit = solve(sums_of(X, T), W0, b0)
    alone = solve(sums_of(X[:1], T[:1]), W0[:1], b0[:1])
    assert fit.used
    assert_close(fit.weight[0], alone.weight[0])
    assert_close(fit.weight[1], W0[1])  # the data say nothing about it
    assert_close((fit.weight[1] @ X[1]).mean(-1) + fit.bias[1], T[1].mean(-1))  # the shift takes the mean


def test_large_means_do_not_drown_the_signal() -> None:
    g = torch.Generator().manual_seed(1)
    X = 1000 + torch.randn(1, 3, 20_000, generator=g)
    T = torch.tensor([[[1.0, -2.0, 0.5]]]) @ (X - 1000)
    fit = solve(sums_of(X, T), torch.zeros(1, 1, 3), torch.zeros(1, 1), ridge=1e-9)
    assert_close(fit.weight[0, 0], torch.tensor([1.0, -2.0, 0.5]).double(), rtol=1e-3, atol=1e-3)
    assert fit.after < 1e-5 * fit.before


def test_sums_in_half_precision_are_those_of_the_widened_data() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        X, T = (torch.randn(1, k, 300).to(dtype) for k in (4, 2))
        half, wide = sums_of(X, T), sums_of(X.float(), T.float())
        for key, value in wide.tensors().items():
            assert torch.equal(half.tensors()[key], value)
            assert value.dtype == torch.float64


def test_squared_error_is_never_negative() -> None:
    X = torch.randn(1, 2, 5, dtype=torch.float64)
    s = sums_of(X, X)
    assert squared_error(s, torch.eye(2, dtype=torch.float64)[None], torch.zeros(1, 2, dtype=torch.float64)) < 1e-12
    nothing = Sums(*(torch.zeros_like(value) - 1e-30 for value in s.tensors().values()))
    assert squared_error(nothing, torch.zeros(1, 2, 2).double(), torch.zeros(1, 2).double()) == 0.0


@pytest.mark.parametrize("factor", [1e25, 1e20, 1e-20, 1e-30])
def test_squares_that_float32_cannot_hold(factor: float) -> None:
    X, T, W0, b0 = problem(0, 2, 4, 3, 50)
    X, T = X.float(), T.float()
    fit, expected = solve(sums_of(factor * X, factor * T), W0, factor * b0), solve(sums_of(X, T), W0, b0)
    assert_close(fit.weight, expected.weight, rtol=1e-4, atol=1e-5)
    assert_close(fit.bias / factor, expected.bias, rtol=1e-4, atol=1e-5)
    assert fit.after == pytest.approx(factor**2 * expected.after, rel=1e-3)


def test_autocast_does_not_round_the_sums() -> None:
    X, T = torch.randn(1, 4, 300), torch.randn(1, 2, 300)
    plain = sums_of(X, T)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sums_of(X, T)
    for key, value in plain.tensors().items():
        assert torch.equal(found.tensors()[key], value), key


def test_inputs_that_vary_by_rounding_only_leave_the_shift() -> None:
    X = torch.randn(1, 6, 1, generator=torch.Generator().manual_seed(3)).expand(1, 6, 50)
    W0, b0 = torch.ones(1, 2, 6), torch.zeros(1, 2)
    fit = solve(sums_of(X, W0 @ X + 5.0), W0, b0)
    assert fit.used
    assert fit.after < 1e-10 * fit.before
    assert_close(fit.weight, W0.double())
