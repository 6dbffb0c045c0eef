"""mu, its two rules, and the best split."""

import pytest
import torch
from hypothesis import given, strategies as st

from ispasp.errors import InputError
from ispasp_lab.theory import best_split, mu
from ispasp_lab.theory.moments import as_matrix, as_moment

SEEDS = st.integers(0, 2**31)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(SEEDS, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_mu_passes_through_linear_maps(seed, m, n, p):
    A, B, C = normal(m, n, seed=seed), normal(n, p, seed=seed + 1), normal(n, p, seed=seed + 2)
    torch.testing.assert_close(mu(A @ B), A @ mu(B))
    torch.testing.assert_close(mu(B + C), mu(B) + mu(C))


def test_mu_does_not_pass_through_relu():
    X = torch.tensor([[1.0, -1.0]])
    assert mu(X.relu()).item() == 1 and mu(X).relu().item() == 0


@given(SEEDS, st.integers(1, 6), st.integers(0, 6))
def test_best_split_has_the_smallest_tail_in_every_norm(seed, n, s):
    s = min(s, n)
    H = normal(n, 3, seed=seed)
    split = best_split(H, s)
    assert int((split.Z != 0).any(1).sum()) <= s
    torch.testing.assert_close(split.Z + split.E, H)
    e = mu(split.E)
    Z = normal(n, 3, seed=seed + 1)  # any other s-row-sparse matrix, its rows not those of H
    Z[torch.randperm(n, generator=torch.Generator().manual_seed(seed))[s:]] = 0
    for q in (1, 2, float("inf")):
        assert e.norm(q) <= mu(H - Z).norm(q) + 1e-12


def test_best_split_takes_moments_and_keeps_the_first_of_equal_rows():
    split = best_split(torch.tensor([1.0, -2.0, 2.0, 0.5]), s=1)
    assert split.Z.tolist() == [0, -2, 0, 0] and split.E.tolist() == [1, 0, 2, 0.5]


@pytest.mark.parametrize("s", [-1, 3])
def test_best_split_refuses_a_wrong_count(s):
    with pytest.raises(InputError, match=rf"2 rows and s={s}"):
        best_split(torch.ones(2, 2), s)


@pytest.mark.parametrize("X", [torch.ones(2, 2, 2), torch.ones(0, 2), torch.tensor([[float("nan")]])])
def test_only_finite_matrices_are_taken(X):
    with pytest.raises(InputError, match="H has"):
        as_moment(X)


def test_everything_becomes_float64_without_gradient():
    X = as_matrix(torch.ones(2, 2, dtype=torch.float16, requires_grad=True), "X")
    assert X.dtype == torch.float64 and not X.requires_grad
