"""Methods on what each unit contributes, against scikit-learn and least squares on the data."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.linear_model import Lasso as SklearnLasso, lars_path, orthogonal_mp, orthogonal_mp_gram
from torch import Tensor
from torch.testing import assert_close

from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.select import OBS, CoSaMP, GFSLocal, Lasso, Selector, SubspacePursuit, ThiNet, select_units
from ispasp.select.evidence import total_energy
from ispasp.select.lasso import _Active
from ispasp.types import Consumer, ConvConsumer, Gram, LinearConsumer, Reading, Statistics
from ispasp.types.consumer import Geometry
from support.problems import Problem, problems

FEW = settings(max_examples=max(1, settings.default.max_examples // 2))
ON_GRAMS = (GFSLocal, ThiNet, Lasso, CoSaMP, OBS, SubspacePursuit)


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


@FEW
@given(problems(), st.data())
def test_the_factors_of_thinet_are_least_squares(problem: Problem, data: st.DataObject) -> None:
    H = problem.data(5)
    kept = sorted(data.draw(st.sets(st.integers(0, problem.units - 1), min_size=1)))
    factors = ThiNet().factors(problem.statistics(H, ("gram",)), kept)
    assert len(factors) == len(kept)
    X = np.concatenate(
        [dictionary(A, problem.as_consumer_gets(A, H), problem.units) for A in problem.consumers]
    )  # (numbers the consumers put out, units)
    best = np.linalg.lstsq(X[:, kept], X.sum(1), rcond=None)[0]
    error, plain, least = (float(np.sum((X[:, kept] @ w - X.sum(1)) ** 2)) for w in (factors, np.ones(len(kept)), best))
    assert error <= plain * (1 + 1e-9) + 1e-12
    assert error <= least * (1 + 1e-9) + 1e-4 * plain  # what the ridge may cost
    if np.linalg.cond(X[:, kept]) < 10:
        assert np.allclose(factors, best, rtol=1e-3, atol=1e-3)


def test_the_factors_of_thinet_stay_where_the_data_do_not_decide() -> None:
    H = torch.tensor([[1.0, 1.0, 0.0, 2.0], [-1.0, -1.0, 0.0, -2.0]])  # twins, a dead unit, and their sum
    statistics = Statistics(4, (measure(LinearConsumer(torch.ones(1, 4)), H, ["gram"]),))
    assert ThiNet().factors(statistics, (0, 1, 2, 3)) == (1.0, 1.0, 1.0, 1.0)
    assert ThiNet().factors(statistics, (0, 1, 2)) == pytest.approx((2.0, 2.0, 1.0), abs=1e-5)  # twins share
    assert ThiNet(rescale=False).factors(statistics, (0, 1, 2)) == ()
    indefinite = Gram(torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), 1)
    broken = Statistics(2, (Reading(LinearConsumer(torch.ones(1, 2)), indefinite),))
    assert ThiNet().factors(broken, (0, 1)) == (1.0, 1.0)


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


def test_lasso_keeps_its_factor_whatever_enters_and_leaves() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(60, 20, generator=g, dtype=torch.float64) * torch.logspace(0, -4, 20, dtype=torch.float64)
    E = X.T @ X
    active = _Active(E)
    for move in torch.randint(0, 20, (120,), generator=g).tolist():
        if move in active.units:
            active.drop(active.units.index(move))
        else:
            active.add(move)
        S = active.units
        assert_close(active.rows[: len(S)], E[S])
        x = torch.ones(len(S), dtype=torch.float64)
        assert_close(active.solve(E[S][:, S] @ x), x, rtol=1e-7, atol=1e-7)


def test_lasso_fills_up_with_energy_when_the_penalty_is_gone() -> None:
    A = LinearConsumer(torch.ones(1, 4))
    H = torch.tensor([[1.0, 3.0, 2.0, 0.0]])  # rank one: unit 1 alone makes the output
    assert [select_units(A, H, s, "lasso").kept for s in (1, 2, 3)] == [(1,), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize("method", ["cosamp", "obs", "sp", "gfs-local", "thinet", "lasso"])
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


def with_decoys(seed: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Weights (1, 40) and activations (120, 40): six units make the output, 17 pairs of larger ones cancel."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(40)
    planted, one, other = order[:6], order[6:23], order[23:]
    H, w = rng.standard_normal((120, 40)), np.empty(40)
    H[:, other] = H[:, one]
    w[planted] = rng.uniform(1, 2, 6) * rng.choice([-1, 1], 6)
    w[one] = rng.uniform(3, 5, 17)
    w[other] = -w[one]
    return w[None], H, tuple(sorted(planted.tolist()))


@pytest.mark.parametrize("seed", range(5))
def test_recovery_sees_through_units_that_cancel_as_orthogonal_matching_pursuit_does(seed: int) -> None:
    w, H, planted = with_decoys(seed)
    X = H * w
    Phi = X / np.linalg.norm(X, axis=0)
    by_data = orthogonal_mp(Phi, X.sum(1), n_nonzero_coefs=6)
    by_gram = orthogonal_mp_gram(Phi.T @ Phi, Phi.T @ X.sum(1), n_nonzero_coefs=6)
    assert tuple(np.flatnonzero(by_data)) == tuple(np.flatnonzero(by_gram)) == planted
    kept = {cls.name: set(select_units(torch.tensor(w), torch.tensor(H), 6, cls()).kept) for cls in ON_GRAMS}
    for name in ("cosamp", "obs", "sp", "gfs-local"):
        assert kept[name] == set(planted)
    assert not kept["thinet"] & set(planted)  # each of a pair alone looks indispensable
    assert kept["lasso"] != set(planted)  # a penalty on factors favours large units, which then stand for small ones
    largest = np.argsort(-np.linalg.norm(X, axis=0))[:6]
    assert not set(largest.tolist()) & set(planted)  # size alone finds none of them


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
def test_the_scale_of_data_and_weights_does_not_matter(cls: type[Selector]) -> None:
    A, H = tangled(1, "linear")
    here = select_units(A.weight, H, 5, cls()).kept
    assert select_units(A.weight * 1e-12, H, 5, cls()).kept == here
    assert select_units(A.weight, H * 1e12, 5, cls()).kept == here


@pytest.mark.parametrize("iterations", [0, -1, 2.5, "3", True])
@pytest.mark.parametrize("cls", [CoSaMP, SubspacePursuit])
def test_iterations_that_are_none_are_refused(iterations: object, cls: type[Selector]) -> None:
    with pytest.raises(InputError, match="iterations=.*: pass an integer >= 1"):
        cls(iterations=iterations)  # type: ignore[call-arg]
