"""Methods on Gram matrices against exhaustive search on the data, and what they take and refuse."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.select import OBS, CoSaMP, GFSLocal, Lasso, Selector, SubspacePursuit, ThiNet, select_units
from ispasp.select.evidence import columns
from ispasp.select.obs import Fit, _Removals, laid_out
from ispasp.types import ConvConsumer, Gram, LinearConsumer, Reading, Statistics
from ispasp.types.consumer import Geometry, patches
from support.problems import Problem, problems

FEW = settings(max_examples=max(1, settings.default.max_examples // 2))
ON_GRAMS = (GFSLocal, ThiNet, Lasso, CoSaMP, OBS, SubspacePursuit)
REFITTING = (OBS, SubspacePursuit)


def chain(method: Selector, problem: Problem, H: Tensor) -> list[tuple[int, ...]]:
    """What is kept for 1, 2, ..., n units."""
    statistics = problem.statistics(H, ("gram",))
    return [method.select(statistics, s).kept for s in range(1, problem.units + 1)]


def error(problem: Problem, H: Tensor, kept: set[int]) -> float:
    """||A H - A H_S||_F^2 with the real layers."""
    mask = torch.zeros(problem.units, dtype=H.dtype)
    mask[list(kept)] = 1
    H_S = H * mask.repeat_interleave(problem.channels_per_unit).reshape(-1, *(1,) * (H.ndim - 2))
    return sum(float((layer(H) - layer(H_S)).detach().square().sum()) for layer in problem.layers)


@FEW
@given(problems(), st.integers(1, 3))
def test_each_step_of_gfs_is_the_best_addition(problem: Problem, batch: int) -> None:
    H, before = problem.data(batch), set()
    for kept in map(set, chain(GFSLocal(), problem, H)):
        assert before < kept
        best = min(error(problem, H, before | {i}) for i in range(problem.units) if i not in before)
        assert error(problem, H, kept) <= best + 1e-9 * error(problem, H, set())
        before = kept


@FEW
@given(problems(), st.integers(1, 3))
def test_each_step_of_thinet_is_the_best_removal(problem: Problem, batch: int) -> None:
    H, before = problem.data(batch), set(range(problem.units))
    for kept in map(set, reversed(chain(ThiNet(), problem, H)[:-1])):
        assert kept < before
        best = min(error(problem, H, before - {i}) for i in before)
        assert error(problem, H, kept) <= best + 1e-9 * error(problem, H, set())
        before = kept


def refitted(problem: Problem, H: Tensor, kept: set[int], ridge: float) -> float:
    """Least error of any weights that read only `kept`, by least squares on the data itself."""
    total = 0.0
    for A in problem.consumers:
        X = patches(A, problem.as_consumer_gets(A, H))  # (g, K, N)
        W, unit_of = columns(A)
        damping = ridge * (float(X.square().sum(2).mean()) or 1.0)
        for x, w, units in zip(X, W, unit_of, strict=True):
            wide = torch.cat([x, damping**0.5 * torch.eye(len(x), dtype=x.dtype)], dim=1)  # the ridge as data
            stays = torch.isin(units, torch.tensor(sorted(kept)))
            gone = w[:, ~stays] @ wide[~stays]  # what the others have to stand in for
            change = torch.linalg.lstsq(wide[stays].T, gone.T).solution
            total += float((gone.T - wide[stays].T @ change).square().sum())
    return total


@FEW
@given(problems(), st.integers(1, 4), st.sampled_from((1e-6, 1e-2)))
def test_each_step_of_obs_is_the_best_removal_with_refit(problem: Problem, batch: int, ridge: float) -> None:
    H, before = problem.data(batch), set(range(problem.units))
    slack = 1e-9 * refitted(problem, H, set(), ridge)
    for kept in map(set, reversed(chain(OBS(ridge=ridge), problem, H)[:-1])):
        assert kept < before
        best = min(refitted(problem, H, before - {i}, ridge) for i in before)
        assert refitted(problem, H, kept, ridge) <= best * (1 + 1e-5) + slack
        before = kept


@pytest.mark.parametrize("pending", [1, 4, 128])
@pytest.mark.parametrize("taps", [1, 3])
def test_obs_scores_and_updates_are_those_of_least_squares(
    monkeypatch: pytest.MonkeyPatch, taps: int, pending: int
) -> None:
    monkeypatch.setattr(sys.modules[_Removals.__module__], "_PENDING", pending)
    g = torch.Generator().manual_seed(0)
    n, ridge = 8, 1e-3
    X = torch.randn(n * taps, 40, generator=g, dtype=torch.float64)
    W = torch.randn(5, n * taps, generator=g, dtype=torch.float64)
    unit_of = torch.arange(n).repeat_interleave(taps)
    found = _Removals(laid_out(W, X @ X.T, unit_of, ridge))
    wide = torch.cat([X, ridge**0.5 * torch.eye(n * taps, dtype=torch.float64)], dim=1)  # the ridge as data

    def fitted(out: list[int]) -> tuple[Tensor, float]:
        stays = ~torch.isin(unit_of, torch.tensor(out))
        best = torch.zeros_like(W)
        best[:, stays] = torch.linalg.lstsq(wide[stays].T, (W @ wide).T).solution.T
        return best, float(((W - best) @ wide).square().sum())

    for step, unit in enumerate((3, 0, 6, 7, 1)):
        out = [3, 0, 6, 7, 1][:step]
        before = fitted(out)[1]
        increases = found.increase(n)
        for u in set(range(n)) - set(out):
            assert_close(float(increases[u]), fitted([*out, u])[1] - before, rtol=1e-9, atol=1e-9)
        found.remove(unit)
        if step in (1, 4):  # also in between, which must change nothing
            found.catch_up()
            best = fitted([*out, unit])[0]
            known = torch.isin(unit_of, found.units)  # removed units are left out once they are many
            assert_close(found.W.T, best[:, known], rtol=1e-9, atol=1e-9)
            assert not best[:, ~known].any()
    assert len(found.units) <= 4


@pytest.mark.parametrize("taps", [1, 3])
def test_a_fit_knows_what_units_save_and_cost(taps: int) -> None:
    g = torch.Generator().manual_seed(0)
    n, ridge = 6, 1e-3
    X = torch.randn(n * taps, 40, generator=g, dtype=torch.float64)
    W = torch.randn(5, n * taps, generator=g, dtype=torch.float64)
    unit_of = torch.arange(n).repeat(taps)
    wide = torch.cat([X, ridge**0.5 * torch.eye(n * taps, dtype=torch.float64)], dim=1)  # the ridge as data
    regression = laid_out(W, X @ X.T, unit_of, ridge)

    def error(kept: set[int]) -> float:
        stays = torch.isin(unit_of, torch.tensor(sorted(kept), dtype=torch.long))
        fitted = torch.linalg.lstsq(wide[stays].T, (W @ wide).T).solution.T @ wide[stays]
        return float((W @ wide - fitted).square().sum())

    kept = {0, 3, 4}
    fit = Fit(regression, torch.tensor([i in kept for i in range(n)]))
    assert fit.error == pytest.approx(error(kept))
    for unit in (1, 3, 5, 1, 0, 3, 4, 5):  # in and out, until one unit is left
        found = fit.scores(n)
        expected = [abs(error(kept ^ {i}) - error(kept)) for i in range(n)]
        assert found.tolist() == pytest.approx(expected, rel=1e-8)
        fit.move(unit)
        kept ^= {unit}
    assert kept == {3}


@FEW
@given(problems(), st.integers(1, 4), st.integers(1, 12))
def test_swaps_never_raise_the_refitted_error(problem: Problem, batch: int, s: int) -> None:
    H, s, ridge = problem.data(batch), min(s, problem.units), 1e-2
    statistics = problem.statistics(H, ("gram",))
    greedy, swapped = (OBS(ridge=ridge, swaps=swaps).select(statistics, s).kept for swaps in (0, 20))
    slack = 1e-9 * refitted(problem, H, set(), ridge)
    assert refitted(problem, H, set(swapped), ridge) <= refitted(problem, H, set(greedy), ridge) * (1 + 1e-9) + slack
    if len(swapped) == 1 < problem.units:  # one unit: the best exchange is the best set
        best = min(refitted(problem, H, {i}, ridge) for i in range(problem.units))
        assert refitted(problem, H, set(swapped), ridge) <= best * (1 + 2e-6) + slack


def test_swaps_repair_a_greedy_choice() -> None:
    # Unit 2 is the sum of the others and goes first; with one unit left, it would have been the best.
    H = torch.tensor([[1.0, 0.0, 1.1], [0.0, 1.0, 0.9], [1.0, 0.0, 0.9], [0.0, 1.0, 1.1]], dtype=torch.float64)
    W = torch.tensor([[2.0, 2.0, 0.1]], dtype=torch.float64)
    assert select_units(W, H, 1, OBS()).kept != (2,)
    assert select_units(W, H, 1, OBS(swaps=2)).kept == (2,)


@FEW
@given(problems(), st.integers(1, 4), st.integers(1, 12))
def test_the_error_of_subspace_pursuit_falls(problem: Problem, batch: int, s: int) -> None:
    H, s, ridge = problem.data(batch), min(s, problem.units), 1e-2
    selection = SubspacePursuit(ridge=ridge).select(problem.statistics(H, ("gram",)), s)
    errors = [refitted(problem, H, set(step.kept), ridge) for step in selection.steps]
    slack = 1e-9 * refitted(problem, H, set(), ridge)
    assert all(later <= earlier + slack for earlier, later in pairwise(errors))
    alone = [refitted(problem, H, {i}, ridge) for i in range(problem.units)]
    if s == 1:
        assert errors[0] <= min(alone) * (1 + 1e-9) + slack


def test_subspace_pursuit_is_not_topk_where_i_spasp_is() -> None:
    g = torch.Generator().manual_seed(0)
    H = torch.rand(40, 5, generator=g).repeat_interleave(2, dim=1)
    H = H * torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0.5])  # the largest are pairs of twins
    W = torch.randn(4, 10, generator=g)
    assert select_units(W, H, 5, "topk").kept == select_units(W, H, 5, "ispasp").kept
    kept = select_units(W, H, 5, "sp").kept
    assert sorted(unit // 2 for unit in kept) == [0, 1, 2, 3, 4]
    assert not select_units(W, H, 5, SubspacePursuit(iterations=1)).converged


@pytest.mark.parametrize("method", ["obs", "sp"])
@pytest.mark.parametrize("kind", ["neurons", "filters"])
def test_one_of_each_pair_of_twins_is_kept(kind: str, method: str) -> None:
    g = torch.Generator().manual_seed(0)
    size = (40, 5) if kind == "neurons" else (3, 5, 7, 7)
    H = torch.rand(size, generator=g).repeat_interleave(2, dim=1) * torch.tensor([3.0, 1.0]).repeat(5).reshape(
        -1, *(1,) * (len(size) - 2)
    )  # unit 2 i + 1 is a third of unit 2 i
    W = torch.randn(4, 10, *(3,) * (len(size) - 2), generator=g)
    kept = select_units(W, H, 5, method).kept
    assert sorted(unit // 2 for unit in kept) == [0, 1, 2, 3, 4]


def test_obs_leaves_channels_outside_the_hidden_dimension_alone() -> None:
    g = torch.Generator().manual_seed(0)
    H = torch.rand(30, 4, generator=g)
    H[:, 3] = H[:, 0] + 0.01 * H[:, 3]  # outside, and nearly unit 0: it must not stand in for it
    W = torch.tensor([[3.0, 1.0, 1.0, 1.0]])
    inside = LinearConsumer(W, units=torch.tensor([0, 1, 2, -1]))
    assert select_units(inside, H, 1, "obs").kept == (0,)
    assert len({0, 3} & set(select_units(W, H, 3, "obs").kept)) == 1  # inside, it may


def test_obs_with_units_of_different_sizes() -> None:
    g = torch.Generator().manual_seed(0)
    H, units = torch.rand(50, 6, generator=g, dtype=torch.float64), torch.tensor([0, 1, 1, 1, 2, 2])
    A = LinearConsumer(torch.randn(3, 6, generator=g, dtype=torch.float64), units=units)
    G = H.T @ H
    G.diagonal().add_(1e-6 * G.diagonal().mean())
    costs = []
    for u in range(3):
        S, R = units != u, units == u
        schur = G[R][:, R] - G[R][:, S] @ torch.linalg.solve(G[S][:, S], G[S][:, R])
        costs.append(float(torch.trace(A.weight[:, R] @ schur @ A.weight[:, R].T)))
    first = int(np.argmin(costs))
    assert select_units(A, H, 2, "obs").kept == tuple(u for u in range(3) if u != first)


@pytest.mark.parametrize("cls", ON_GRAMS)
def test_a_missing_gram_matrix_is_named(cls: type[Selector]) -> None:
    A = LinearConsumer(torch.eye(3))
    statistics = Statistics(3, (measure(A, torch.ones(1, 3), ["gram"]), Reading(A)))
    with pytest.raises(InputError, match=rf"{cls.name} needs a Gram matrix at every consumer: measure\("):
        cls().select(statistics, 1)


@pytest.mark.parametrize("cls", ON_GRAMS)
def test_data_that_are_all_zero_keep_the_first_units(cls: type[Selector]) -> None:
    assert select_units(torch.ones(2, 5), torch.zeros(3, 5), 2, cls()).kept == (0, 1)


def rounded(seed: int) -> Statistics:
    """A singular Gram matrix that was summed in float32, so it has negative eigenvalues."""
    g = torch.Generator().manual_seed(seed)
    A, H = LinearConsumer(torch.randn(6, 30, generator=g)), torch.randn(4, 30, generator=g)
    return Statistics(30, (Reading(A, Gram((H.T @ H)[None], 4)),))


@pytest.mark.parametrize("cls", ON_GRAMS)
@pytest.mark.parametrize("seed", range(3))
def test_a_gram_matrix_in_float32_is_taken_as_it_is(cls: type[Selector], seed: int) -> None:
    for s in (1, 5, 15, 29):
        selection = cls().select(rounded(seed), s)
        assert len(selection.kept) == s
        assert selection == cls().select(rounded(seed), s)


@pytest.mark.parametrize("cls", REFITTING)
def test_a_gram_matrix_that_is_none_says_so(cls: type[Selector]) -> None:
    A = LinearConsumer(torch.eye(2))
    indefinite = Gram(torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), 1)
    with pytest.raises(InputError, match="not positive definite.*raise ridge=1e-06"):
        cls().select(Statistics(2, (Reading(A, indefinite),)), 1)


@pytest.mark.parametrize("cls", REFITTING)
@pytest.mark.parametrize("ridge", [0, -1.0, float("inf"), float("nan"), "small", True])
def test_a_ridge_that_is_none_is_refused(ridge: object, cls: type[Selector]) -> None:
    with pytest.raises(InputError, match="ridge=.*: pass a number > 0"):
        cls(ridge=ridge)  # type: ignore[call-arg]


@pytest.mark.parametrize("swaps", [-1, 1.5, "all", True])
def test_swaps_that_are_no_number_are_refused(swaps: object) -> None:
    with pytest.raises(InputError, match="swaps=.*: pass an integer >= 0"):
        OBS(swaps=swaps)


def test_depthwise_consumers_have_one_regression_per_unit() -> None:
    g = torch.Generator().manual_seed(0)
    W, H = torch.randn(6, 1, 3, 3, generator=g), torch.rand(4, 6, 5, 5, generator=g)
    A = ConvConsumer(W, geometry=Geometry(groups=6))
    alone = A(H).square().sum((0, 2, 3))  # nobody can stand in for a unit: what it puts out is lost
    kept = tuple(sorted(torch.argsort(alone, descending=True)[:3].tolist()))
    assert {select_units(A, H, 3, cls()).kept for cls in ON_GRAMS if cls is not Lasso} == {kept}
