"""Methods on Gram matrices against the definitions: exhaustive search on the data, and scikit-learn."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Lasso as SklearnLasso
from sklearn.linear_model import lars_path, orthogonal_mp
from torch import Tensor

from ispasp import InputError
from ispasp.calibrate import measure
from ispasp.calibrate.patches import patches
from ispasp.select import OBS, CoSaMP, GFSLocal, Lasso, Selector, ThiNet, select_units
from ispasp.select.energy import columns, total_energy
from ispasp.types import Consumer, ConvConsumer, Gram, LinearConsumer, Reading, Statistics
from ispasp.types.geometry import Geometry
from support.problems import Problem, problems

FEW = settings(max_examples=max(1, settings.default.max_examples // 2))
ON_GRAMS = (GFSLocal, ThiNet, Lasso, CoSaMP, OBS)


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


@pytest.mark.parametrize("kind", ["neurons", "filters"])
def test_obs_keeps_one_of_each_pair_of_twins(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    size = (40, 5) if kind == "neurons" else (3, 5, 7, 7)
    H = torch.rand(size, generator=g).repeat_interleave(2, dim=1) * torch.tensor([3.0, 1.0]).repeat(5).reshape(
        -1, *(1,) * (len(size) - 2)
    )  # unit 2 i + 1 is a third of unit 2 i
    W = torch.randn(4, 10, *(3,) * (len(size) - 2), generator=g)
    kept = select_units(W, H, 5, "obs").kept
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


def dictionary(A: Consumer, H: Tensor, units: int) -> np.ndarray:
    """Columns A H_i. (outputs x examples x positions, units)"""
    unit_of, axes = A.unit_of(), (1,) * (A.weight.ndim - 2)
    return torch.stack([A(H * (unit_of == i).reshape(-1, *axes)).flatten() for i in range(units)], dim=1).numpy()


def tangled(seed: int, kind: str, units: int = 12) -> tuple[Consumer, Tensor]:
    """Activations that lie near few directions, so that units stand in for each other."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(4, units, generator=g, dtype=torch.float64)
    if kind == "conv":
        H = torch.einsum("bdhw,dc->bchw", torch.randn(4, 4, 5, 5, generator=g, dtype=torch.float64), mix)
        A: Consumer = ConvConsumer(
            torch.randn(3, units, 3, 3, generator=g, dtype=torch.float64), geometry=Geometry(padding=(1, 1))
        )
    else:
        H = torch.randn(40, 4, generator=g, dtype=torch.float64) @ mix
        A = LinearConsumer(torch.randn(3, units, generator=g, dtype=torch.float64))
    return A, (H + 0.3 * torch.randn(H.shape, generator=g, dtype=torch.float64)).relu()


def pieces(X: np.ndarray) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """scikit-learn's path for y = X 1: penalty and support in the middle of every piece between two kinks."""
    alphas, _, path = lars_path(X, X.sum(1), method="lasso")
    middles = (path[:, :-1] + path[:, 1:]) / 2
    return (alphas[:-1] + alphas[1:]) / 2, [tuple(np.flatnonzero(beta).tolist()) for beta in middles.T]


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("seed", range(5))
def test_lasso_has_the_support_that_scikit_learn_finds(kind: str, seed: int) -> None:
    A, H = tangled(seed, kind)
    X = dictionary(A, H, 12)
    alphas, supports = pieces(X)
    for s in range(1, 12):
        alpha, support = next((a, S) for a, S in zip(alphas, supports, strict=True) if len(S) == s)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tolerances: the support is what counts
            by_descent = SklearnLasso(alpha, fit_intercept=False, tol=1e-12, max_iter=200_000).fit(X, X.sum(1))
        kept = select_units(A, H, s, "lasso").kept
        assert support == kept
        assert tuple(np.flatnonzero(by_descent.coef_)) == kept


@pytest.mark.parametrize(("seed", "outputs"), [(0, 3), (1, 1), (2, 1)])
def test_lasso_lets_units_go_again(seed: int, outputs: int) -> None:
    g = torch.Generator().manual_seed(seed)
    H = torch.randn(60, 6, generator=g, dtype=torch.float64) @ torch.randn(6, 30, generator=g, dtype=torch.float64)
    H = H + 0.05 * torch.randn(60, 30, generator=g, dtype=torch.float64)
    A = LinearConsumer(torch.randn(outputs, 30, generator=g, dtype=torch.float64))
    _, supports = pieces(dictionary(A, H, 30))
    assert any(not set(a) <= set(b) for a, b in pairwise(supports))  # else this shows nothing
    for s in range(1, 31):
        assert select_units(A, H, s, "lasso").kept == next(S for S in supports if len(S) == s)


def test_lasso_fills_up_with_energy_when_the_penalty_is_gone() -> None:
    A = LinearConsumer(torch.ones(1, 4))
    H = torch.tensor([[1.0, 3.0, 2.0, 0.0]])  # rank one: unit 1 alone makes the output
    assert [select_units(A, H, s, "lasso").kept for s in (1, 2, 3)] == [(1,), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize("method", ["cosamp", "obs", "gfs-local", "thinet", "lasso"])
@pytest.mark.parametrize("seed", range(5))
def test_one_output_agrees_with_orthogonal_matching_pursuit(method: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    planted = sorted(rng.choice(40, 6, replace=False).tolist())
    w = np.full(40, 0.02)
    w[planted] = rng.uniform(1, 3, 6) * rng.choice([-1, 1], 6)
    H = rng.standard_normal((120, 40))
    X = H * w
    recovered = orthogonal_mp(X / np.linalg.norm(X, axis=0), X.sum(1), n_nonzero_coefs=6)
    assert np.flatnonzero(recovered).tolist() == planted
    assert select_units(torch.from_numpy(w[None]), torch.from_numpy(H), 6, method).kept == tuple(planted)


@pytest.mark.parametrize("seed", range(8))
def test_cosamp_is_the_algorithm_on_the_data(seed: int) -> None:
    A, H = tangled(seed, "linear", units=20)
    X = dictionary(A, H, 20)
    u, Phi, s = X.sum(1), X / np.linalg.norm(X, axis=0), 4
    a, sets = np.zeros(20), []
    for _ in range(20):
        merged = set(np.argsort(-np.abs(Phi.T @ (u - Phi @ a)))[: 2 * s]) | set(np.flatnonzero(a))
        on = sorted(merged)
        b = np.zeros(20)
        b[on] = np.linalg.lstsq(Phi[:, on], u, rcond=None)[0]
        a = np.where(np.isin(np.arange(20), np.argsort(-np.abs(b))[:s]), b, 0)
        sets.append(tuple(np.flatnonzero(a)))
    selection = select_units(A, H, s, "cosamp")
    assert tuple(step.kept for step in selection.steps) == tuple(sets[: selection.iterations])
    assert selection.kept == sets[-1]


def test_cosamp_that_may_not_go_on_says_so() -> None:
    A, H = tangled(0, "linear", units=20)
    assert not select_units(A, H, 4, CoSaMP(iterations=1)).converged
    assert select_units(A, H, 20, CoSaMP()).converged


def test_cosamp_keeps_the_largest_outputs_when_it_sees_all_units() -> None:
    A, H = tangled(3, "conv")
    (reading,) = (measure(A, H, ["gram"]),)
    largest = torch.argsort(total_energy(Statistics(12, (reading,))).diagonal(), descending=True)[:7]
    assert select_units(A, H, 7, "cosamp").kept == tuple(sorted(largest.tolist()))


@pytest.mark.parametrize("method", ["gfs-local", "cosamp"])
def test_units_that_cancel_are_not_worth_keeping(method: str) -> None:
    H = torch.tensor([[5.0, -5.0, 1.0, 1.0], [-4.0, 4.0, 1.0, 0.5]])
    assert select_units(torch.ones(1, 4), H, 1, method).kept in {(2,), (3,)}


def test_thinet_does_not_see_units_that_cancel() -> None:
    H = torch.tensor([[5.0, -5.0, 1.0, 1.0], [-4.0, 4.0, 1.0, 0.5]])  # removing one of the pair alone costs most
    assert select_units(torch.ones(1, 4), H, 2, "thinet").kept == (0, 1)


@pytest.mark.parametrize("cls", ON_GRAMS)
def test_a_missing_gram_matrix_is_named(cls: type[Selector]) -> None:
    A = LinearConsumer(torch.eye(3))
    statistics = Statistics(3, (measure(A, torch.ones(1, 3), ["gram"]), Reading(A)))
    with pytest.raises(InputError, match=rf"{cls.name} needs a Gram matrix at every consumer: take them"):
        cls().select(statistics, 1)


@pytest.mark.parametrize("cls", ON_GRAMS)
def test_data_that_are_all_zero_keep_the_first_units(cls: type[Selector]) -> None:
    assert select_units(torch.ones(2, 5), torch.zeros(3, 5), 2, cls()).kept == (0, 1)


@pytest.mark.parametrize("cls", ON_GRAMS)
def test_the_scale_of_data_and_weights_does_not_matter(cls: type[Selector]) -> None:
    A, H = tangled(1, "linear")
    here = select_units(A.weight, H, 5, cls()).kept
    assert select_units(A.weight * 1e-12, H, 5, cls()).kept == here
    assert select_units(A.weight, H * 1e12, 5, cls()).kept == here


def rounded(seed: int) -> Statistics:
    """A singular Gram matrix that was summed in float32, so it has negative eigenvalues."""
    g = torch.Generator().manual_seed(seed)
    A, H = LinearConsumer(torch.randn(6, 30, generator=g)), torch.randn(4, 30, generator=g)
    return Statistics(30, (Reading(A, gram=Gram((H.T @ H)[None], 4)),))


@pytest.mark.parametrize("cls", ON_GRAMS)
@pytest.mark.parametrize("seed", range(3))
def test_a_gram_matrix_in_float32_is_taken_as_it_is(cls: type[Selector], seed: int) -> None:
    for s in (1, 5, 15, 29):
        selection = cls().select(rounded(seed), s)
        assert len(selection.kept) == s
        assert selection == cls().select(rounded(seed), s)


def test_a_gram_matrix_that_is_none_says_so() -> None:
    A = LinearConsumer(torch.eye(2))
    indefinite = Gram(torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), 1)
    with pytest.raises(InputError, match="not positive definite with ridge=1e-06.*larger ridge"):
        OBS().select(Statistics(2, (Reading(A, gram=indefinite),)), 1)


@pytest.mark.parametrize("ridge", [0, -1.0, float("inf"), float("nan"), "small", True])
def test_a_ridge_that_is_none_is_refused(ridge: object) -> None:
    with pytest.raises(InputError, match="ridge=.*: pass a number > 0"):
        OBS(ridge=ridge)


@pytest.mark.parametrize("iterations", [0, -1, 2.5, "3", True])
def test_iterations_that_are_none_are_refused(iterations: object) -> None:
    with pytest.raises(InputError, match="iterations=.*: pass an integer >= 1"):
        CoSaMP(iterations=iterations)


def test_depthwise_consumers_have_one_regression_per_unit() -> None:
    g = torch.Generator().manual_seed(0)
    W, H = torch.randn(6, 1, 3, 3, generator=g), torch.rand(4, 6, 5, 5, generator=g)
    A = ConvConsumer(W, geometry=Geometry(groups=6))
    alone = A(H).square().sum((0, 2, 3))  # nobody can stand in for a unit: what it puts out is lost
    kept = tuple(sorted(torch.argsort(alone, descending=True)[:3].tolist()))
    assert {select_units(A, H, 3, cls()).kept for cls in ON_GRAMS if cls is not Lasso} == {kept}
