"""i-SpaSP from first moments returns the paper's set at every iteration, and its evidence is right."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from ispasp import ISpaSP, TopK, i_spasp, reference, select_units
from ispasp.select.coupling import activation, couplings
from ispasp.types import LinearConsumer, Selection, Statistics
from support.problems import Problem, problems


def sets_of(selection: Selection, T: int) -> list[list[int]]:
    """The set after each of T iterations: a stable set stays."""
    found = [list(step.kept) for step in selection.steps]
    return found + [found[-1]] * (T - len(found))


@given(problems(), st.integers(1, 12), st.integers(1, 8), st.integers(1, 6))
def test_same_sets_as_the_paper_with_the_full_data(problem: Problem, s: int, T: int, batch: int) -> None:
    s = min(s, problem.units)
    H = problem.data(batch)
    expected = reference.algorithm2([[H]] * T, problem.layers, s=s, channels_per_unit=problem.channels_per_unit)
    selection = i_spasp(problem.statistics(H), s, iterations=T)
    assert sets_of(selection, T) == expected


@given(problems(), st.integers(1, 12), st.integers(1, 6), st.integers(1, 4))
def test_same_sets_as_the_paper_with_a_new_minibatch_per_iteration(
    problem: Problem, s: int, T: int, batch: int
) -> None:
    s = min(s, problem.units)
    Hs = [problem.data(batch, part=t) for t in range(T)]
    expected = reference.algorithm2([[H] for H in Hs], problem.layers, s=s, channels_per_unit=problem.channels_per_unit)
    selection = i_spasp([problem.statistics(H) for H in Hs], s, iterations=T)
    assert [list(step.kept) for step in selection.steps] == expected


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 9), st.integers(1, 20), st.integers(0, 10**6))
def test_autodiff_and_matrix_form_of_the_reference_agree(d_hid: int, d_out: int, B: int, s: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    H = torch.rand(d_hid, B, generator=g, dtype=torch.float64)
    W = torch.randn(d_out, d_hid, generator=g, dtype=torch.float64)
    s = min(s, d_hid)
    by_matrix = reference.algorithm1(H, W, s=s, T=5)
    by_autodiff = reference.algorithm2([[H.T]] * 5, [lambda x: x @ W.T], s=s)
    assert by_matrix == by_autodiff
    assert sets_of(select_units(W, H.T, s, ISpaSP(iterations=5)), 5) == by_matrix


@given(problems(), st.integers(1, 4))
def test_importance_equals_autodiff(problem: Problem, batch: int) -> None:
    H = problem.data(batch)
    kept = set(range(0, problem.units, 2))
    expected = reference.importance(H, kept, problem.layers, problem.channels_per_unit)
    removed = torch.tensor([float(i not in kept) for i in range(problem.units)], dtype=torch.float64)
    y = torch.stack([c.importance(removed) for c in couplings(problem.statistics(H))]).sum(0)
    assert_close(y, expected, rtol=1e-9, atol=1e-9)


@given(problems(), st.integers(2, 6))
def test_statistics_add(problem: Problem, parts: int) -> None:
    Hs = [problem.data(2, part) for part in range(parts)]
    merged = problem.statistics(Hs[0])
    for H in Hs[1:]:
        merged = merged + problem.statistics(H)
    whole = problem.statistics(torch.cat(Hs))
    assert_close(activation(merged), activation(whole))
    assert merged.readings[0].moment.examples == whole.readings[0].moment.examples == 2 * parts
    assert i_spasp(merged, 1).kept == i_spasp(whole, 1).kept


def test_a_convolution_called_with_two_sizes() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(6, 4, 3, padding=1, stride=2, dtype=torch.float64)
    A = select_consumer(conv)
    Hs = [torch.rand(3, 6, 8, 8, dtype=torch.float64), torch.rand(2, 6, 5, 7, dtype=torch.float64)]
    from ispasp.calibrate import measure

    statistics = Statistics(6, (measure(A, Hs[0]) + measure(A, Hs[1]),))
    assert set(statistics.readings[0].moment.maps) == {(8, 8), (5, 7)}
    assert sets_of(i_spasp(statistics, 2), 6) == reference.algorithm2([Hs] * 6, [conv], s=2)


def select_consumer(conv: torch.nn.Conv2d):
    from ispasp.types import ConvConsumer
    from ispasp.types.geometry import Geometry

    return ConvConsumer(conv.weight.detach(), geometry=Geometry(conv.stride, conv.padding))


def test_channels_outside_the_hidden_dimension_do_not_count() -> None:
    torch.manual_seed(0)
    W, H = torch.randn(5, 7, dtype=torch.float64), torch.rand(20, 7, dtype=torch.float64)
    inside = [1, 2, 5, 6]
    unit_of = torch.full((7,), -1)
    unit_of[inside] = torch.arange(4)
    whole = select_units(LinearConsumer(W, units=unit_of), H, keep=1)
    alone = select_units(W[:, inside], H[:, inside], keep=1)
    assert whole.kept == alone.kept
    assert_close(whole.residuals, alone.residuals)
    assert_close(whole.moment_residuals, alone.moment_residuals)


def test_equal_units_go_by_index() -> None:
    torch.manual_seed(0)
    W = torch.randn(3, 1, dtype=torch.float64).repeat(1, 10)  # ten copies of one unit
    H = torch.rand(7, 1, dtype=torch.float64).repeat(1, 10) / 3
    assert select_units(W, H, keep=3).kept == (0, 1, 2)
    assert select_units(W, H, keep=3, method="topk").kept == (0, 1, 2)


@given(problems(), st.integers(1, 12))
def test_early_stop_changes_nothing(problem: Problem, s: int) -> None:
    s, statistics = min(s, problem.units), problem.statistics(problem.data(3))
    selection = i_spasp(statistics, s, iterations=50)
    assert selection.converged
    assert selection.iterations < 50
    assert i_spasp([statistics, statistics], s, iterations=50).kept == selection.kept  # never stops early


@given(problems(), st.integers(1, 12))
def test_kept_activation_never_falls(problem: Problem, s: int) -> None:
    s, statistics = min(s, problem.units), problem.statistics(problem.data(3))
    h = activation(statistics)
    sums = [float(h[list(step.kept)].sum()) for step in i_spasp(statistics, s).steps]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(sums))


@given(problems(("linear", "heads", "conv")), st.data())
def test_keeping_half_is_topk(problem: Problem, data: st.DataObject) -> None:
    s = data.draw(st.integers((problem.units + 1) // 2, problem.units))
    H = problem.data(3).abs()  # Top-K scores magnitudes, i-SpaSP values: the same for ReLU
    statistics = problem.statistics(H, ("moment", "magnitude"))
    assert i_spasp(statistics, s).kept == TopK().select(statistics, s).kept


def test_magnitude_rank_sees_negative_activations() -> None:
    H = torch.tensor([[-9.0, 0.1, 0.2, 0.3, 0.4, 0.5]])
    W = torch.eye(6)
    assert 0 not in select_units(W, H, keep=1, method=ISpaSP()).kept
    assert select_units(W, H, keep=1, method=ISpaSP(rank="magnitude")).kept == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_activations_are_summed_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    H, W = torch.rand(4096, 16).to(dtype), torch.randn(4, 16).to(dtype)
    selection = select_units(W, H, keep=4)
    assert selection.kept == select_units(W.double(), H.double(), keep=4).kept
