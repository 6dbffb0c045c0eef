"""i-SpaSP from first moments returns the paper's set at every iteration, and its evidence is right."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from ispasp.engine import measure
from ispasp.select import ISpaSP, TopK, i_spasp, select_units
from ispasp.select.evidence import descending
from ispasp.select.ispasp import activation, couplings
from ispasp.types import ConvConsumer, LinearConsumer, Selection, Statistics
from ispasp.types.consumer import Geometry
from ispasp_lab import reference
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
    assert selection.start == i_spasp(problem.statistics(Hs[0]), s).start  # residuals refer to the first


@given(problems(), st.integers(1, 12), st.integers(1, 3))
def test_minibatches_come_round_again(problem: Problem, s: int, parts: int) -> None:
    s, T = min(s, problem.units), 7
    Hs = [problem.data(2, part=t % parts) for t in range(T)]
    expected = reference.algorithm2([[H] for H in Hs], problem.layers, s=s, channels_per_unit=problem.channels_per_unit)
    selection = i_spasp([problem.statistics(H) for H in Hs[:parts]], s, iterations=T)
    assert sets_of(selection, T) == expected


@given(problems(), st.integers(1, 12), st.integers(1, 7), st.integers(1, 4))
def test_the_option_takes_a_new_minibatch_per_iteration(problem: Problem, s: int, T: int, parts: int) -> None:
    s, method = min(s, problem.units), ISpaSP(iterations=T, minibatches=True)
    Hs = [problem.data(2, part) for part in range(parts)]
    apart = tuple(problem.statistics(H) for H in Hs)
    whole = replace(problem.statistics(torch.cat(Hs)), parts=apart)
    selection = method.select(whole, s)
    assert selection == i_spasp(list(apart), s, iterations=T)
    rounds = [[Hs[t % parts]] for t in range(T)]
    expected = reference.algorithm2(rounds, problem.layers, s=s, channels_per_unit=problem.channels_per_unit)
    assert sets_of(selection, T) == expected
    alone = replace(apart[0], parts=apart[:1])
    assert method.select(alone, s) == ISpaSP(iterations=T).select(apart[0], s)


def test_the_option_sees_mini_batches_and_not_their_sum() -> None:
    A = LinearConsumer(torch.eye(2))
    parts = tuple(Statistics(2, (measure(A, torch.tensor([h])),)) for h in ([9.0, 1.0], [1.0, 2.0]))
    whole = replace(parts[0] + parts[1], parts=parts)
    assert (ISpaSP(minibatches=True).parts, ISpaSP(iterations=7, minibatches=True).parts, ISpaSP().parts) == (20, 7, 0)
    assert ISpaSP().select(whole, 1).kept == (0,)
    last = ISpaSP(iterations=2, minibatches=True).select(whole, 1)
    assert [step.kept for step in last.steps] == [(0,), (1,)]
    assert ISpaSP(iterations=3, minibatches=True).select(whole, 1).kept == (0,)
    assert (whole + whole).parts == parts + parts  # they are not added, there are more of them


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
    A = ConvConsumer(conv.weight, geometry=Geometry(conv.stride, conv.padding))
    Hs = [torch.rand(3, 6, 8, 8, dtype=torch.float64), torch.rand(2, 6, 5, 7, dtype=torch.float64)]
    statistics = Statistics(6, (measure(A, Hs[0]) + measure(A, Hs[1]),))
    assert set(statistics.readings[0].moment.maps) == {(8, 8), (5, 7)}
    assert_close(activation(statistics), sum(H.sum((0, 2, 3)) for H in Hs))
    assert sets_of(i_spasp(statistics, 2), 6) == reference.algorithm2([Hs] * 6, [conv], s=2)


@given(problems(), st.integers(1, 4))
def test_activation_sums_over_data_positions_channels_and_consumers(problem: Problem, batch: int) -> None:
    H = problem.data(batch)
    total = H.transpose(0, 1).reshape(problem.units, -1).sum(1)
    assert_close(activation(problem.statistics(H)), len(problem.consumers) * total, rtol=1e-9, atol=1e-9)


@given(st.lists(st.booleans(), min_size=2, max_size=12).filter(any), st.booleans(), st.integers(0, 10**6))
def test_channels_outside_the_hidden_dimension_do_not_count(inside: list[bool], conv: bool, seed: int) -> None:
    g, mine = torch.Generator().manual_seed(seed), torch.tensor(inside)
    kernel, size = ((3,), (5,)) if conv else ((), ())
    W = torch.randn(4, len(inside), *kernel, generator=g, dtype=torch.float64)
    H = torch.rand(6, len(inside), *size, generator=g, dtype=torch.float64)
    units = torch.where(mine, mine.cumsum(0) - 1, -1)
    consumer = ConvConsumer if conv else LinearConsumer
    whole, alone = consumer(W, units=units), consumer(W[:, mine])
    n, needs = alone.channels, ("moment", "magnitude", "gram")
    ours, theirs = (Statistics(n, (measure(A, X, needs),)) for A, X in ((whole, H), (alone, H[:, mine])))
    for s in range(1, n + 1):
        assert TopK().select(ours, s).kept == TopK().select(theirs, s).kept
        a, b = i_spasp(ours, s), i_spasp(theirs, s)
        assert [step.kept for step in a.steps] == [step.kept for step in b.steps]
        assert_close(a.residuals, b.residuals, rtol=1e-6, atol=1e-6)
        assert_close(a.moment_residuals, b.moment_residuals, rtol=1e-6, atol=1e-6)
        assert_close(select_units(whole, H, s).residuals, a.residuals, rtol=1e-6, atol=1e-6)


def test_equal_units_go_by_index() -> None:
    torch.manual_seed(0)
    W = torch.randn(3, 1, dtype=torch.float64).repeat(1, 10)  # ten copies of one unit
    H = torch.rand(7, 1, dtype=torch.float64).repeat(1, 10) / 3
    assert select_units(W, H, keep=3).kept == (0, 1, 2)
    assert select_units(W, H, keep=3, method="topk").kept == (0, 1, 2)


@pytest.mark.parametrize("method", ["ispasp", "topk"])
def test_the_order_of_summation_decides_nothing_but_a_billionth_does(method: str) -> None:
    g = torch.Generator().manual_seed(0)
    same = torch.rand(99, generator=g, dtype=torch.float64)
    H = torch.stack([same[torch.randperm(99, generator=g)] for _ in range(10)], dim=1)  # equal sums, other last bits
    H = H[:, H.sum(0).argsort()]  # the last bits speak for the highest index
    assert float(H.sum(0)[0]) < float(H.sum(0)[-3])
    W = torch.ones(3, 10, dtype=torch.float64)
    assert select_units(W, H, keep=3, method=method).kept == (0, 1, 2)
    H[0, 4] += 1e-9
    assert select_units(W, H, keep=3, method=method).kept == (0, 1, 4)


@pytest.mark.parametrize(("bits", "order"), [(48, [0, 1]), (30, [1, 0])])
def test_values_are_compared_to_forty_bits(bits: int, order: list[int]) -> None:
    for scale in (1.0, -1.0, 2.0**60, 2.0**-60):
        x = scale * torch.tensor([1.0, 1.0 + 2.0**-bits], dtype=torch.float64)
        assert descending(x).tolist() == (order if scale > 0 else [0, 1])


def test_rounding_noise_in_the_residual_decides_nothing() -> None:
    # Once unit 1 is kept, nothing is left to explain: units 2 and 3 cancel, exactly in tenths, to 6e-17 in binary.
    W = torch.tensor([[0.0, 1, 0, 0, 1], [0, 0, 1, 1, 1]], dtype=torch.float64)
    H = torch.tensor([[50.0, 10, 1, -3, 0], [0, 0, 2, 0, 0]], dtype=torch.float64)
    assert float((H / 10).sum(0)[2:4].sum()) != 0.0
    for data in (H, H / 10):
        found = sets_of(select_units(W, data, 1), 4)
        assert found == [[1], [0], [0], [0]] == reference.algorithm1(data.T, W, s=1, T=4)


@given(problems(), st.integers(1, 12))
def test_early_stop_changes_nothing(problem: Problem, s: int) -> None:
    s, statistics = min(s, problem.units), problem.statistics(problem.data(3))
    selection = i_spasp(statistics, s, iterations=50)
    assert selection.converged
    assert selection.iterations < 50
    never_early = i_spasp([statistics, statistics], s, iterations=50)
    assert never_early.kept == selection.kept
    assert (never_early.iterations, never_early.converged) == (50, False)  # another batch could change the set


@given(problems(), st.integers(1, 12), st.integers(1, 3))
def test_converged_means_that_a_further_iteration_changes_nothing(problem: Problem, s: int, T: int) -> None:
    s, statistics = min(s, problem.units), problem.statistics(problem.data(3))
    selection, further = (i_spasp(statistics, s, iterations=t) for t in (T, T + 1))
    assert selection.converged or selection.iterations == T
    assert selection.converged or 2 * s < problem.units  # all units are candidates: Top-K at once
    assert not selection.converged or further.kept == selection.kept


def test_the_selector_hands_its_options_on() -> None:
    H, W = torch.rand(5, 6), torch.eye(6)
    assert select_units(W, H, 1, ISpaSP(iterations=1)).iterations == 1
    assert not select_units(W, H, 1, ISpaSP(iterations=1)).converged
    assert select_units(W, H, 1, ISpaSP(iterations=2)).iterations == 2


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


def test_magnitudes_of_the_channels_of_a_head_do_not_cancel() -> None:
    H = torch.tensor([[5.0, -5.0, 0.5, 0.5, 0.4, 0.4]])  # three heads of two channels
    consumer = LinearConsumer(torch.eye(6), units=torch.tensor([0, 0, 1, 1, 2, 2]))
    assert select_units(consumer, H, keep=1).kept == (1,)
    assert select_units(consumer, H, keep=1, method=ISpaSP(rank="magnitude")).kept == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_layers_are_pruned_like_their_values_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    H, W = torch.rand(4096, 16).to(dtype), torch.randn(4, 16).to(dtype)
    assert select_units(W, H, keep=4) == select_units(W.double(), H.double(), keep=4)


@given(problems(), st.integers(1, 12))
def test_magnitude_rank_does_not_see_the_sign(problem: Problem, s: int) -> None:
    s, H = min(s, problem.units), problem.data(3)
    here, there = (i_spasp(problem.statistics(X), s, rank="magnitude").kept for X in (H, -H))
    assert here == there
