"""Restricted isometry constants and Assumption 1."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ispasp.errors import InputError
from ispasp_lab import reference
from ispasp_lab.theory import assumption1, restricted_isometry

SEEDS = st.integers(0, 2**31)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def nearly_orthonormal(m, n, seed, noise=0.01):
    return torch.linalg.qr(normal(m, n, seed=seed)).Q + noise * normal(m, n, seed=seed + 1) / m**0.5


def brute_force(W, r):
    identity = torch.eye(r, dtype=W.dtype)
    sets = combinations(range(W.shape[1]), r)
    return max(float(torch.linalg.matrix_norm(W[:, T].T @ W[:, T] - identity, 2)) for T in map(list, sets))


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 8), st.integers(1, 6), st.integers(1, 6))
def test_exact_is_the_definition_and_the_other_methods_bracket_it(seed, m, n, r):
    W = normal(m, n, seed=seed) / m**0.5
    delta = brute_force(W, min(r, n))
    exact = restricted_isometry(W, r, "exact")
    assert exact.exact and exact.upper == pytest.approx(delta, abs=1e-12) and exact.r == min(r, n)
    for method in ("auto", "monte_carlo", "coherence"):
        known = restricted_isometry(W, r, method, samples=4)
        assert known.lower <= delta + 1e-12 and delta <= known.upper + 1e-12


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 5))
def test_the_inequality_of_the_definition_holds_for_sparse_vectors(seed, r):
    W, x = normal(6, 7, seed=seed) / 6**0.5, normal(7, seed=seed + 1)
    x[torch.randperm(7, generator=torch.Generator().manual_seed(seed))[r:]] = 0
    delta = restricted_isometry(W, r).upper
    assert abs((W @ x).square().sum() - x.square().sum()) <= delta * x.square().sum() + 1e-12


def test_constants_grow_with_the_number_of_columns():
    W = normal(20, 8, seed=0) / 20**0.5
    deltas = [restricted_isometry(W, r).upper for r in range(1, 10)]
    assert deltas == sorted(deltas) and deltas[7] == deltas[8]


def test_correlated_columns_are_found_where_random_sets_miss_them():
    W = torch.linalg.qr(normal(60, 60, seed=0)).Q
    W[:, 7] = (W[:, 3] + W[:, 7]) / 2**0.5  # one correlated pair among 1770
    found = restricted_isometry(W, 3, "monte_carlo", samples=8)
    assert found.lower == pytest.approx(0.5**0.5) and found.upper == pytest.approx(0.5**0.5)


def test_sampling_comes_close_to_enumeration():
    W = normal(30, 18, seed=0) / 30**0.5
    exact, sampled = (restricted_isometry(W, 6, method) for method in ("exact", "monte_carlo"))
    assert 0.95 * exact.lower < sampled.lower <= exact.lower + 1e-12


def test_sampling_is_repeatable():
    W = normal(50, 80, seed=0) / 50**0.5
    first, again = (restricted_isometry(W, 10, seed=3) for _ in range(2))
    assert first == again and not first.exact and 0 < first.lower < first.upper


@given(SEEDS, st.integers(1, 4))
def test_fewer_outputs_than_columns_mean_one_or_more(seed, m):
    assert restricted_isometry(normal(m, 6, seed=seed), m + 1).lower >= 1
    assert assumption1(normal(m, 6, seed=seed), s=2).holds is False


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 4), st.floats(0.1, 10))
def test_rescaling_finds_the_best_factor(seed, r, c):
    W = c * normal(8, 5, seed=seed)
    known = restricted_isometry(W, r, rescale=True)
    assert restricted_isometry(known.scale * W, r).upper == pytest.approx(known.upper, abs=1e-9)
    for factor in (0.9, 1.1):
        assert restricted_isometry(factor * known.scale * W, r).upper > known.upper
    assert restricted_isometry(W / c, r, rescale=True).upper == pytest.approx(known.upper, abs=1e-9)


def test_algorithm_1_does_not_see_the_scale():
    H, W = normal(12, 9, seed=0).relu(), normal(5, 12, seed=1)
    for s in (1, 3, 5):
        assert reference.algorithm1(H, W, s=s, T=6) == reference.algorithm1(H, 0.01 * W, s=s, T=6)


@pytest.mark.parametrize(
    ("W", "holds"),
    [
        (nearly_orthonormal(40, 30, seed=0), True),
        (normal(4000, 12, seed=1) / 4000**0.5, True),
        (normal(40, 30, seed=2) / 40**0.5, False),
        (normal(10, 300, seed=3), False),
    ],
)
def test_assumption_1_is_decided(W, holds):
    verdict = assumption1(W, s=1)
    assert verdict.holds is holds and "delta_4" in verdict.reason


def test_assumption_1_stays_open_between_the_bounds():
    verdict = assumption1(nearly_orthonormal(80, 80, seed=0, noise=0.04), s=10)
    assert verdict.holds is None and verdict.isometry.lower <= 0.1 < verdict.isometry.upper


def test_kaiming_weights_fail_by_their_scale_alone():
    W = torch.empty(2000, 10)
    torch.nn.init.kaiming_normal_(W, nonlinearity="relu", generator=torch.Generator().manual_seed(0))
    squared = W.double().square().sum(0)  # 2 d_out / d_hid = 400
    assert (squared / 400 - 1).abs().max() < 0.1
    assert assumption1(W, s=1).holds is False and assumption1(W, s=1, rescale=True).holds is True


def test_a_zero_matrix_is_no_isometry_at_any_scale():
    known = restricted_isometry(torch.zeros(3, 3), 2, rescale=True)
    assert known.lower == known.upper == 1 and known.scale == 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: restricted_isometry(torch.eye(3), 0), "r=0"),
        (lambda: restricted_isometry(torch.eye(3), 1, "guess"), "'guess'"),
        (lambda: restricted_isometry(torch.eye(60), 30, "exact"), "too many"),
        (lambda: restricted_isometry(torch.ones(3), 1), r"shape \(3,\)"),
        (lambda: assumption1(torch.eye(3), s=0), "s=0"),
    ],
)
def test_wrong_values_are_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
