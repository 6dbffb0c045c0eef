"""Where the printed paper does not hold: the counter-examples of docs/theory.md, numbered as there."""

import math
import re
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from ispasp_lab import reference
from ispasp_lab.theory import assumption1, best_split, lemma1, lemma2, mu, theorem1, theorem3, theorem3_as_printed

SEEDS = st.integers(0, 2**31)
R5 = math.sqrt(5)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def removed(H, S):
    rest = H.clone()
    rest[S] = 0
    return rest


def residual(W, H, S):
    return float((W @ removed(H, S)).norm())


def pruned_output(H0, weights, s, T=20):
    """The network that reads H0, pruned from first to last layer; the last layer has no ReLU."""
    H = H0
    for W in weights:
        S = reference.algorithm1(H, W, s=s, T=T)[-1]
        U = W[:, S] @ H[S]
        H = U.relu()
    return U


# Lemma 1 ----------------------------------------------------------------------------------------------------


def test_1_value_ranking_breaks_the_first_step_of_lemma_1_under_assumption_1():
    W = torch.eye(6, dtype=torch.float64)
    W[:2, 1] = torch.tensor([-0.05, math.sqrt(1 - 0.05**2)])
    s, h = 2, column(1.0, 0.01, 0.0, 0.0, 0.0, 0.0)
    assert assumption1(W, s).holds
    y = mu(W.T @ W @ h)
    Delta, Omega = [0, 1], y.sort(descending=True, stable=True).indices[: 2 * s].tolist()  # S empty, E = 0
    assert Omega == [0, 2, 3, 4]
    assert y[Delta].norm() > y[Omega].norm()
    assert y[1].abs() == pytest.approx(0.04) and y[[2, 3, 4]].norm() == 0  # Delta \ Omega against Omega \ Delta
    assert y[Delta].clamp(min=0).norm() <= y[Omega].norm()  # the repair: positive parts


def test_2_value_ranking_breaks_lemma_1_for_signed_hidden_representations():
    H, W = column(-1.0, 0.0, 0.0, 0.0), torch.eye(4, dtype=torch.float64)
    assert assumption1(W, s=1).holds
    E = best_split(H, s=1).E
    S = reference.algorithm1(H, W, s=1, T=20)[-1]
    assert mu(removed(H, S)).norm() == 1
    assert lemma1(mu(H), mu(E), s=1, t=20) < 1e-6


def test_3_the_dense_vector_is_no_sparse_approximation():
    h, s = torch.ones(2), 1
    assert reference.algorithm1(h[:, None], torch.eye(2), s=s, T=1) == [[0]]
    b = h  # 2s = n: the candidates are everything
    b_s = removed(h, [1])
    assert (b - b_s).norm() == 1 and (h - b).norm() == 0
    assert (b - b_s).norm() <= mu(best_split(h[:, None], s).E).norm()  # the repair: compare with Z


def test_4_the_lower_bound_has_a_wrong_sign():
    h, s = torch.tensor([2.0, 1.0, 1.0, 1.0]), 1  # W = I, S empty, Z the first row: Delta = {0}, Omega = {0, 1}
    e = best_split(h, s).E
    measured = 0.0  # of y over Delta \ Omega, which is empty; delta_s = 0
    assert measured < -e.norm() + e.norm(1) / math.sqrt(2 * s)
    assert measured >= -e.norm() - e.norm(1) / math.sqrt(2 * s)


def test_5_the_printed_constants_are_rounded_down():
    assert 2 * (0.1 + 0.1) / 0.9 > 0.444 and 6.6 / 0.9 > 7.333 and 4.4 / 0.9 > 4.888


# Theorem 1, Lemma 2 -----------------------------------------------------------------------------------------


def test_6_theorem_1_is_false_for_signed_hidden_representations():
    H, W = torch.tensor([[1.0, -1.0]] * 3), torch.eye(3)
    S = reference.algorithm1(H, W, s=1, T=20)[-1]
    assert theorem1(W, mu(H), mu(best_split(H, 1).E), s=1, t=20) == 0
    assert residual(W, H, S) == 2


def test_7_lemma_2_is_false_for_other_splits():
    H, s = column(1.0, 0.25, 0.0), 2  # p = 1/2, R = 1
    Z, E = torch.zeros_like(H), H
    assert torch.equal(Z + E, H) and mu(E).norm(1) == 1.25
    assert lemma2(0.5, 1.0, s=s) == 0.5
    assert mu(best_split(H, s).E).norm(1) <= 0.5


# Theorem 3 --------------------------------------------------------------------------------------------------


def test_8_relu_of_a_difference_does_not_bound_the_difference_of_relus():
    U, V = torch.zeros(1, 1), torch.ones(1, 1)
    assert mu(U.relu() - V.relu()).norm(1) == 1 and mu((U - V).relu()).norm(1) == 0
    assert (U.relu() - V.relu()).abs().sum() <= (U - V).abs().sum()  # the repair: ReLU is 1-Lipschitz


def test_9_errors_of_both_signs_cancel_in_mu():
    H0 = torch.tensor([[4.0, 4.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    rows = [[1.0, 2.0, -2.0], [0.0, -1.0, -1.0], [-4.0, 1.0, -1.0]]
    W1 = torch.tensor(rows, dtype=torch.float64)
    W1, W2 = W1 / W1.norm(dim=1, keepdim=True), torch.eye(3, dtype=torch.float64)
    s, t = 1, 20
    assert assumption1(W1, s).holds and assumption1(W2, s).holds
    H1 = (W1 @ H0).relu()
    Hhat1 = (W1[:, [0]] @ H0[[0]]).relu()
    assert reference.algorithm1(H0, W1, s=s, T=t)[-1] == [0]
    E1, Delta1 = best_split(H1, s).E, H1 - Hhat1
    assert mu(E1).norm() == 0 and mu(Delta1).norm() < 1e-12
    V = W2 @ H1 - pruned_output(H0, [W1, W2], s)
    assert float(V.norm()) == pytest.approx(2 * math.sqrt(2) / 3)
    assert theorem1(W2, mu(H1), mu(E1) + mu(Delta1), s=s, t=t) < 1e-4  # the first step of the proof
    E0 = best_split(H0, s).E
    assert V.norm() <= theorem3([W1, W2], [mu(H0), mu(H1)], [mu(E0), mu(E1)], s=s, t=t, delta=1e-9)


def test_10_the_sum_forgets_the_tail_of_the_first_layer():
    H0 = column(2.0, 1.0)
    W1 = torch.tensor([[2.0, 1.0], [-1.0, 2.0]], dtype=torch.float64) / R5
    W2 = torch.eye(2, dtype=torch.float64)
    assert assumption1(W1, s=1).holds and assumption1(W2, s=1).holds
    H1 = (W1 @ H0).relu()  # (sqrt 5, 0): one row, no tail; nor has the output W2 H1
    E0, E1 = best_split(H0, 1).E, best_split(H1, 1).E
    assert mu(E1).norm(1) < 1e-12
    V = W2 @ H1 - pruned_output(H0, [W1, W2], s=1)
    assert float(V.norm()) == pytest.approx(1 / R5)
    assert theorem3_as_printed([W1, W2], [float(mu(E1).norm(1))] * 2, s=1) < 1e-9
    assert V.norm() <= theorem3([W1, W2], [mu(H0), mu(H1)], [mu(E0), mu(E1)], s=1, t=20)


def test_11_the_product_takes_the_wrong_weights():
    tiny, large = 1e-9, 1e3
    turn = torch.tensor([[2.0, 1.0], [-1.0, 2.0]], dtype=torch.float64) / R5
    weights = [tiny * turn.T, large * turn, torch.eye(2, dtype=torch.float64)]
    assert all(assumption1(W, s=1, rescale=True).holds for W in weights)
    H = [column(R5 / tiny, 0.0)]
    for W in weights[:2]:
        H.append((W @ H[-1]).relu())
    E = [best_split(h, 1).E for h in H]
    tail = max(float(mu(e).norm(1)) for e in E)
    assert tail == pytest.approx(1)  # that of H_1 = (2, 1); H_0 and H_2 have one row
    V = weights[2] @ H[2] - pruned_output(H[0], weights, s=1)
    assert float(V.norm()) == pytest.approx(large / R5)
    assert V.norm() > 10 * theorem3_as_printed(weights, [tail] * 3, s=1)
    assert V.norm() <= theorem3(weights, [mu(h) for h in H], [mu(e) for e in E], s=1, t=100)


@pytest.mark.parametrize("L", [1, 2, 3, 4])
def test_11_under_assumption_1_the_wrong_product_does_no_harm(L):
    """There ||vec W||_1 >= 0.94 d, so that the printed first term covers all the right ones, up to 8 %."""
    d, s = 6, 2
    weights = [torch.linalg.qr(normal(d, d, seed=i)).Q for i in range(L)]
    assert all(assumption1(W, s).holds and W.abs().sum() >= math.sqrt(0.9) * d for W in weights)
    zero, tail = torch.zeros(d), torch.ones(d) / d  # the l1 norm is 1, in every layer
    repaired = theorem3(weights, [zero] * L, [tail] * L, s=s, t=20)
    assert repaired <= 1.08 * theorem3_as_printed(weights, [1.0] * L, s=s)


def test_12_at_a_fixed_fraction_the_bound_of_theorem_3_can_grow_with_s():
    p, L = 1 / 4, 3

    def printed(s):
        d = 4 * s
        return theorem3_as_printed([torch.eye(d)] * L, [lemma2(p, 1.0, s=s)] * L, s=s)  # the smallest ||vec W||_1

    assert printed(100) > 2 * printed(10)


def test_12_the_last_layer_decays_faster_than_listed():
    p, L = 1 / 4, 3

    def order(i):  # of d^((L - i)/2) s^(1 - 1/p) at d = 4 s
        red = [(4 * s) ** ((L - i) / 2) * lemma2(p, 1.0, s=s) for s in (10, 100)]
        return math.log10(red[1] / red[0])

    assert [order(i) for i in (3, 2, 1)] == pytest.approx([-3, -2.5, -2])  # listed: -2.5, -2, -1.5


# Algorithm 1 ------------------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 9), st.integers(1, 9), st.integers(1, 6))
def test_13_keeping_half_or_more_is_top_k(seed, n, s, m):
    s = max(min(s, n), (n + 1) // 2)  # 2s >= n
    H, W = normal(n, 4, seed=seed).relu(), normal(m, n, seed=seed + 1)
    top_k = sorted(mu(H).sort(descending=True, stable=True).indices[:s].tolist())
    assert reference.algorithm1(H, W, s=s, T=3) == [top_k] * 3


@given(SEEDS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_14_kept_activations_never_decrease_and_the_sets_come_to_rest(seed, n, s, m, signed):
    s = min(s, n)
    H, W = normal(n, 4, seed=seed), normal(m, n, seed=seed + 1)
    H = H if signed else H.relu()
    h, T = mu(H), s * (n - s) + 2
    history = reference.algorithm1(H, W, s=s, T=T)
    assert history[-1] == history[-2]
    visited = [tuple(S) for S, _ in groupby(history)]
    assert len({*visited}) == len(visited)  # no set comes back
    kept = [float(h[S].sum()) for S in history]
    assert all(after >= before - 1e-9 for before, after in pairwise(kept))
    if not signed:  # then the left-hand side of Lemma 1 never increases either
        left = [float(mu(removed(H, S)).norm()) for S in history]
        assert all(after <= before + 1e-9 for before, after in pairwise(left))


def test_15_the_output_residual_can_increase():
    H, W = column(1.0, 4.0, 3.0), torch.tensor([[2.0, -1.0, 2.0]], dtype=torch.float64)
    history = reference.algorithm1(H, W, s=1, T=3)
    assert history == [[2], [1], [1]]
    assert [residual(W, H, S) for S in history] == [2, 8, 8]


@given(SEEDS, st.integers(1, 8), st.integers(1, 8), st.integers(1, 5))
def test_16_top_k_satisfies_the_bounds_with_constant_one_and_no_assumption(seed, n, s, m):
    s = min(s, n)
    H, W = normal(n, 4, seed=seed).relu(), normal(m, n, seed=seed + 1)
    E = best_split(H, s).E
    S = mu(H).topk(s).indices.tolist()
    assert mu(removed(H, S)).norm() == pytest.approx(float(mu(E).norm()))
    assert residual(W, H, S) <= torch.linalg.matrix_norm(W, 2) * mu(E).norm() + 1e-12


def test_16_yet_algorithm_1_can_be_better_than_top_k():
    H, W = column(9.0, 1.0, 2.0), torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64)
    assert reference.algorithm1(H, W, s=1, T=3) == [[2]] * 3
    assert residual(W, H, [2]) == 1 and residual(W, H, [0]) == 3


# The page ---------------------------------------------------------------------------------------------------


def test_the_page_names_tests_that_exist_and_its_example_runs():
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = re.findall(r"`(test_\w+)\*?`", page)
    assert len(names) > 10 and [name for name in names if f"def {name}" not in source] == []
    numbered = {int(n) for n in re.findall(r"^def test_(\d+)_", source, re.MULTILINE)}
    assert numbered == {int(n) for n in re.findall(r"^(\d+)\. ", page, re.MULTILINE)} == {*range(1, 17)}
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found = {}
    exec(example, found)  # noqa: S102
    assert found["delta"] < 1e-5 and 0.4 < found["fit"].p < 0.6
