"""Residuals: from data, from Gram matrices and from moments they are what the definitions say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from ispasp.engine import measure
from ispasp.select import Evidence, energy, i_spasp, select_units
from ispasp.types import ConvConsumer, LinearConsumer, Statistics
from ispasp.types.consumer import Geometry, patches, products_of_rows
from support.problems import Problem, problems


def outputs(problem: Problem, H: torch.Tensor, kept: list[int]) -> list[torch.Tensor]:
    """V of every consumer, by definition: dense minus pruned output of the real layers."""
    mask = torch.zeros(problem.units, dtype=H.dtype)
    mask[kept] = 1
    H_S = H * mask.repeat_interleave(problem.channels_per_unit).reshape(-1, *(1,) * (H.ndim - 2))
    return [(layer(H) - layer(H_S)).detach() for layer in problem.layers]


@given(problems(), st.integers(1, 4), st.data())
def test_gram_path_equals_the_definition(problem: Problem, batch: int, data: st.DataObject) -> None:
    H = problem.data(batch)
    kept = data.draw(st.lists(st.integers(0, problem.units - 1), unique=True))
    V = outputs(problem, H, kept)
    step = Evidence(problem.statistics(H, ("moment", "gram"))).step(kept)
    assert_close(step.residual, float(sum(v.square().sum() for v in V)) ** 0.5, rtol=1e-7, atol=1e-7)
    per_output = [
        v.sum(0) if isinstance(A, ConvConsumer) else v.flatten(0, -2).sum(0)
        for v, A in zip(V, problem.consumers, strict=True)
    ]
    expected = float(sum(v.square().sum() for v in per_output)) ** 0.5
    assert_close(step.moment_residual, expected, rtol=1e-7, atol=1e-7)


@given(problems(), st.integers(1, 12))
def test_data_path_equals_gram_path(problem: Problem, s: int) -> None:
    s, H = min(s, problem.units), problem.data(3)
    by_gram = i_spasp(problem.statistics(H, ("moment", "gram")), s)
    by_data = select_units(problem.consumers, [problem.as_consumer_gets(A, H) for A in problem.consumers], s)
    assert by_gram.kept == by_data.kept
    assert_close(by_gram.residuals, by_data.residuals, rtol=1e-6, atol=1e-6)
    assert_close(by_gram.start.residual, by_data.start.residual, rtol=1e-6, atol=1e-6)


@given(problems(("conv", "transposed", "linear", "heads")), st.integers(1, 3))
def test_patches_turn_a_consumer_into_a_matrix(problem: Problem, batch: int) -> None:
    A = problem.consumers[0]
    H = problem.as_consumer_gets(A, problem.data(batch))
    X = patches(A, H)  # (g, K, N)
    W = A.grouped_weight().flatten(2) if isinstance(A, ConvConsumer) else A.weight[None]
    out = A(H)
    expected = out.movedim(1, 0) if isinstance(A, ConvConsumer) else out.movedim(-1, 0)
    assert_close((W @ X).flatten(0, 1), expected.reshape(A.outputs, -1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [0, 1, 128, 129, 300])
def test_products_of_rows_are_those_of_the_whole_matrix(rows: int) -> None:
    X = torch.randn(2, 2 * rows, 7, dtype=torch.float64)[:, ::2]
    assert_close(products_of_rows(X), X @ X.mT, rtol=1e-13, atol=1e-13)


def test_padding_that_differs_from_axis_to_axis() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv3d(2, 3, (1, 2, 3), (1, 2, 1), (0, 1, 2), bias=False)
    A = ConvConsumer(conv.weight, geometry=Geometry(conv.stride, conv.padding))
    H = torch.rand(2, 2, 3, 4, 5)
    assert_close(A(H), conv(H).detach())
    W, X = A.grouped_weight().flatten(2), patches(A, H)
    assert_close((W @ X).flatten(0, 1), A(H).movedim(1, 0).flatten(1))


def test_a_tap_outside_the_input_is_minus_one() -> None:
    plain = Geometry(padding=(3,)).sources(0, size=2, kernel=2)
    transposed = Geometry(transposed=True).sources(0, size=2, kernel=4)
    assert plain.tolist() == [[-1, -1, -1, 0, 1, -1, -1], [-1, -1, 0, 1, -1, -1, -1]]
    assert transposed.tolist() == [[0, 1, -1, -1, -1], [-1, 0, 1, -1, -1], [-1, -1, 0, 1, -1], [-1, -1, -1, 0, 1]]


def test_a_residual_that_cancels_is_zero_and_not_an_error() -> None:
    forms = []
    for seed in range(20):
        a, b = torch.rand(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        A, H = LinearConsumer(torch.stack([a, b, -(a + b)])[None]), torch.full((1, 3), 0.1, dtype=torch.float64)
        reading = measure(A, H, ["moment", "gram"])
        ones = torch.ones(3, dtype=torch.float64)
        forms.append(float(ones @ energy(A, reading.gram, 3) @ ones))
        assert Evidence(Statistics(3, (reading,))).step(()).residual == pytest.approx(0, abs=1e-8)
    assert min(forms) < 0  # rounding does make a square negative


@given(problems(), st.integers(1, 3))
def test_energy_of_everything_is_the_dense_output(problem: Problem, batch: int) -> None:
    H = problem.data(batch)
    statistics = problem.statistics(H, ("moment", "gram"))
    total = sum(float(energy(r.consumer, r.gram, problem.units).sum()) for r in statistics.readings)
    dense = sum(float(v.square().sum()) for v in outputs(problem, H, []))
    assert_close(total, dense, rtol=1e-7, atol=1e-7)


def test_first_moments_alone_do_not_claim_a_residual() -> None:
    statistics = Statistics(3, (measure(LinearConsumer(torch.randn(2, 3)), torch.rand(4, 3)),))
    selection = i_spasp(statistics, 1)
    assert set(selection.residuals) == {None}
    assert None not in selection.moment_residuals
