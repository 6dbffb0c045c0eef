"""Every bound against measured residuals, on matrices that satisfy what it assumes."""

import math

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from ispasp.errors import InputError
from ispasp_lab import reference
from ispasp_lab.theory import (
    RowCompressibility,
    assumption1,
    best_split,
    lemma1,
    lemma2,
    mu,
    restricted_isometry,
    row_compressibility,
    theorem1,
    theorem2,
    theorem3,
    theorem3_as_printed,
)

SEEDS = st.integers(0, 2**31)
T = 5


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def nearly_orthonormal(m, n, seed, noise=0.02):
    return torch.linalg.qr(normal(m, n, seed=seed)).Q + noise * normal(m, n, seed=seed + 1) / m**0.5


def compressible(n, B, p, seed):
    """Rows that are non-negative, sum to i^(-1/p), and are shuffled: the paper's synthetic H."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(n, B, dtype=torch.float64, generator=g) ** 3
    rows = rows / rows.sum(1, keepdim=True) * torch.arange(1, n + 1)[:, None] ** (-1 / p)
    return rows[torch.randperm(n, generator=g)]


def removed(H, S):
    rest = H.clone()
    rest[S] = 0
    return rest


def by_magnitude(h, W, s, T):
    """Algorithm 1 on moments with both rankings by magnitude, for signed H."""
    S, history = [], []
    for _ in range(T):
        y = W.T @ W @ removed(h, S)
        candidates = sorted({*y.abs().topk(min(2 * s, len(h))).indices.tolist(), *S})
        S = [candidates[i] for i in h[candidates].abs().topk(s).indices.tolist()]
        history.append(S)
    return history


# Assumption 1 holds: the constants as printed ------------------------------------------------------------


@settings(max_examples=25)
@given(SEEDS, st.sampled_from([0.3, 0.6, 0.9, 5.0]), st.integers(1, 3), st.sampled_from(["orthonormal", "gaussian"]))
def test_lemma_1_and_theorem_1_under_assumption_1(seed, p, s, kind):
    n = 12
    W = nearly_orthonormal(30, n, seed) if kind == "orthonormal" else normal(12_000, n, seed=seed) / 12_000**0.5
    assume(kind == "orthonormal" or assumption1(W, s).holds)
    assert assumption1(W, s).holds
    H = compressible(n, 6, p, seed)
    h, e = mu(H), mu(best_split(H, s).E)
    for t, S in enumerate(reference.algorithm1(H, W, s=s, T=T), start=1):
        rest = removed(H, S)
        assert mu(rest).norm() <= lemma1(h, e, s=s, t=t, delta=0.1) <= lemma1(h, e, s=s, t=t)
        assert (W @ rest).norm() <= theorem1(W, h, e, s=s, t=t, delta=0.1) <= theorem1(W, h, e, s=s, t=t)


@settings(max_examples=25)
@given(SEEDS, st.integers(1, 3))
def test_sparse_hidden_representations_are_found_exactly(seed, s):
    W = nearly_orthonormal(20, 12, seed)
    assert assumption1(W, s).holds
    H = best_split(normal(12, 4, seed=seed).abs(), s).Z  # E = 0
    S = reference.algorithm1(H, W, s=s, T=20)[-1]
    assert removed(H, S).norm() == 0


# The sharper form: any delta_2s below 1/2, up to scale, any split, signed H by magnitude --------------------


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 3), st.floats(0.05, 0.6), st.sampled_from([0.3, 0.8, 3.0]), st.floats(0.01, 100))
def test_the_sharper_lemma_1_needs_only_delta_2s_below_one_half(seed, s, noise, p, scale):
    n = 9
    W = scale * nearly_orthonormal(10, n, seed, noise)
    delta = restricted_isometry(W, 2 * s, rescale=True).upper
    assume(delta < 0.5)
    H = compressible(n, 4, p, seed)
    h, e = mu(H), mu(best_split(H, s).E)
    for t, S in enumerate(reference.algorithm1(H, W, s=s, T=T), start=1):
        rest = removed(H, S)
        assert mu(rest).norm() <= lemma1(h, e, s=s, t=t, delta=delta)
        assert (W @ rest).norm() <= theorem1(W, h, e, s=s, t=t, delta=delta)


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 3), st.floats(0.05, 0.6))
def test_the_sharper_lemma_1_holds_for_signed_moments_ranked_by_magnitude(seed, s, noise):
    W, h = nearly_orthonormal(10, 9, seed, noise), normal(9, seed=seed + 5) ** 3
    delta = restricted_isometry(W, 2 * s).upper
    assume(delta < 0.5)
    e = best_split(h, s).E
    for t, S in enumerate(by_magnitude(h, W, s, T), start=1):
        assert removed(h, S).norm() <= lemma1(h, e, s=s, t=t, delta=delta)


@given(SEEDS, st.integers(1, 8), st.floats(0, 0.49))
def test_the_best_split_gives_the_smallest_bound(seed, s, delta):
    h = normal(9, seed=seed).abs()
    z = removed(normal(9, seed=seed + 1), torch.arange(9)[s:])
    for d in (None, delta):
        best, other = (lemma1(h, e, s=s, t=3, delta=d) for e in (best_split(h, s).E, h - z))
        assert best <= other + 1e-12


def test_one_step_of_the_sharper_proof():
    """||mu(R)|Omega^c|| <= 2 delta ||mu(R)|| + (1 + 2 delta) ||e||_2 + 2 delta ||e||_1/sqrt(s), Omega by value."""
    worst = 0.0
    for seed in range(200):
        s = 1 + seed % 3
        W = nearly_orthonormal(9, 9, seed, noise=0.3)
        delta = restricted_isometry(W, 2 * s).upper
        h = normal(9, seed=seed + 7).abs() ** 4
        S = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:s]
        split = best_split(h, s)
        r, e = removed(split.Z, S), removed(split.E, S)
        Omega = (W.T @ W @ (r + e)).topk(2 * s).indices
        bound = 2 * delta * r.norm() + (1 + 2 * delta) * e.norm() + 2 * delta * e.norm(1) / s**0.5
        missed = removed(r, Omega).norm()
        assert missed <= bound
        worst = max(worst, float(missed / bound))
    assert worst > 0.1  # the matrices do try the inequality


# Lemma 2 and Theorem 2 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("s", [2, 5, 10])
def test_lemma_2_and_theorem_2_on_the_synthetic_data_of_the_paper(p, s):
    n = 40
    H, W = compressible(n, 20, p, seed=s), nearly_orthonormal(60, n, seed=s)
    assert assumption1(W, s).holds
    fit = row_compressibility(H, p=p)
    assert pytest.approx(1) == fit.R
    e = mu(best_split(H, s).E)
    assert e.norm(1) <= lemma2(p, fit.R, s=s)
    history = reference.algorithm1(H, W, s=s, T=30)
    assert history[-1] == history[-2]  # at rest, so the term that decays with t is gone
    V = W @ removed(H, history[-1])
    assert V.norm() <= theorem2(W, p, fit.R, s=s, delta=0.1) <= theorem2(W, p, fit.R, s=s)


@given(st.floats(0.05, 0.95), st.floats(0.1, 10), st.integers(1, 1000))
def test_theorem_2_is_the_printed_expression(p, R, s):
    W = torch.tensor([[3.0, 4.0]])
    printed = 7 * R * p / (1 - p) * (2 * math.sqrt(s) + 1) * s ** (0.5 - 1 / p)
    assert theorem2(W, p, R, s=s) == pytest.approx(5 * printed)


@pytest.mark.parametrize(("p", "order"), [(3 / 4, -1 / 3), (1 / 2, -1), (1 / 4, -3)])
def test_orders_of_decay(p, order):
    def slope(delta):
        few, many = (theorem2(torch.eye(2), p, 1.0, s=s, delta=delta) for s in (10**6, 10**8))
        return math.log(many / few) / math.log(100)

    assert slope(None) == pytest.approx(order, abs=1e-3)
    assert slope(0.1) == pytest.approx(order - 0.5, abs=1e-3)


def test_without_compressibility_there_is_no_bound():
    assert theorem2(torch.eye(2), 1.0, 1.0, s=3) == math.inf
    assert lemma2(1.5, 1.0, s=3) == math.inf


# Theorem 3 -----------------------------------------------------------------------------------------------


def pruned_layer_by_layer(X, W0, weights, s, T):
    """The output residual of the network pruned greedily, and the dense hidden representations H_0 ... H_(L-1)."""
    H = Hhat = (W0 @ X).relu()
    dense = []
    for i, W in enumerate(weights):
        dense.append(H)
        S = reference.algorithm1(Hhat, W, s=s, T=T)[-1]
        U, Uhat = W @ H, W[:, S] @ Hhat[S]
        H, Hhat = (U, Uhat) if i == len(weights) - 1 else (U.relu(), Uhat.relu())
    return float((H - Hhat).norm()), dense


@settings(max_examples=15)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4), st.sampled_from([2, 20]))
def test_theorem_3_bounds_networks_pruned_from_first_to_last_layer(seed, L, s, t):
    d = 8
    weights = [nearly_orthonormal(d, d, seed + 2 * i) for i in range(L)]
    assert all(assumption1(W, s).holds for W in weights)
    X = compressible(d, 5, 0.4, seed)
    residual, dense = pruned_layer_by_layer(X, torch.eye(d, dtype=X.dtype), weights, s, t)
    moments = [mu(H) for H in dense], [mu(best_split(H, s).E) for H in dense]
    sharp, repaired = (theorem3(weights, *moments, s=s, t=t, delta=delta) for delta in (0.1, None))
    assert residual <= sharp <= repaired
    tail = max(float(e.norm(1)) for e in moments[1])
    transient = 0.444**t * max(float(h.norm()) for h in moments[0])
    assert repaired <= 1.08 * theorem3_as_printed(weights, [tail + transient] * L, s=s)


def test_theorem_3_is_the_sum_with_repaired_indices():
    L, d, s, t = 3, 4, 2, 6
    weights = [normal(d, d, seed=i) for i in range(L)]
    h, e = [normal(d, seed=10 + i) for i in range(L)], [normal(d, seed=20 + i) for i in range(L)]
    c, total = 14 + 7 / math.sqrt(s), 0.0
    for i in range(1, L + 1):
        product = math.prod(math.sqrt(d) * float(weights[j - 1].abs().sum()) for j in range(i, L))
        total += c ** (L - i) * lemma1(h[i - 1], e[i - 1], s=s, t=t) * product
    assert theorem3(weights, h, e, s=s, t=t) == pytest.approx(float(weights[-1].norm()) * total)


@given(SEEDS, st.sampled_from([None, 0.0, 0.3]))
def test_one_hidden_layer_is_theorem_1(seed, delta):
    W, h, e = normal(3, 5, seed=seed), normal(5, seed=seed + 1), normal(5, seed=seed + 2)
    bounds = theorem3([W], [h], [e], s=2, t=4, delta=delta), theorem1(W, h, e, s=2, t=4, delta=delta)
    norm = float(W.norm() if delta is None else torch.linalg.matrix_norm(W, 2))
    assert bounds[0] == bounds[1] == pytest.approx(norm * lemma1(h, e, s=2, t=4, delta=delta))


def test_printed_constants_cover_the_sharper_ones_and_what_a_layer_hands_on():
    """The printed sum has room for 1 (the error handed on) and rate^t: 1 + l2 + l1 + rate^t <= 14 + 7/sqrt(s)."""
    one, zero = torch.ones(1), torch.zeros(1)
    for s in (1, 10, 10_000):
        for delta in (0.0, 0.05, 0.1):
            c = lemma1(zero, one, s=s, t=0, delta=delta)
            assert 1 + c + 1 <= lemma1(zero, one, s=s, t=0) == pytest.approx(14 + 7 / math.sqrt(s))
            assert lemma1(one, zero, s=s, t=3, delta=delta) <= lemma1(one, zero, s=s, t=3)


# Errors --------------------------------------------------------------------------------------------------

H3, W3 = torch.ones(3), torch.eye(3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lemma1(H3, torch.ones(2), s=1, t=1), "3 rows, mu"),
        (lambda: lemma1(H3, H3, s=0, t=1), "s=0"),
        (lambda: lemma1(H3, H3, s=1, t=-1), "t=-1"),
        (lambda: lemma1(H3, H3, s=1, t=1, delta=0.5), r"delta=0\.5"),
        (lambda: theorem1(torch.ones(3, 2), H3, H3, s=1, t=1), r"\(3, 2\)"),
        (lambda: theorem3([], [], [], s=1, t=1), "0 weights"),
        (lambda: theorem3([W3, W3], [H3], [H3], s=1, t=1), "2 weights"),
        (lambda: lemma2(-1.0, 1.0, s=1), "p=-1"),
    ],
)
def test_wrong_values_are_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_the_fit_and_lemma_2_agree():
    assert RowCompressibility(p=0.4, R=2.0).tail(7) == lemma2(0.4, 2.0, s=7)
