"""(p, R) row-compressibility: fit, definition and tails."""

import math

import pytest
import torch
from hypothesis import assume, given, strategies as st

from ispasp.errors import InputError
from ispasp_lab.theory import RowCompressibility, best_split, row_compressibility

MOMENTS = st.lists(st.floats(-1e3, 1e3).filter(lambda x: x == 0 or abs(x) > 1e-3), min_size=1, max_size=12)


def power_law(p, R, n):
    return R * torch.arange(1, n + 1, dtype=torch.float64) ** (-1 / p)


@pytest.mark.parametrize("p", [0.3, 0.5, 0.9, 2.0])
@pytest.mark.parametrize("R", [0.1, 7.0])
def test_a_power_law_is_recovered(p, R):
    h = power_law(p, R, 50)[torch.randperm(50, generator=torch.Generator().manual_seed(0))]
    fit = row_compressibility(h * torch.tensor([1, -1] * 25))
    assert fit.p == pytest.approx(p) and pytest.approx(R) == fit.R


@given(MOMENTS)
def test_the_definition_holds_for_the_fit_and_for_no_smaller_magnitude(h):
    h = torch.tensor(h, dtype=torch.float64)
    fit = row_compressibility(h)
    assert fit.holds(h)
    if fit.R > 0:
        assert not RowCompressibility(fit.p, fit.R * 0.999).holds(h)
        assert pytest.approx(row_compressibility(h[h != 0], p=fit.p).R) == fit.R if fit.p > 0 else True


@given(MOMENTS, st.floats(0.2, 0.95), st.integers(1, 12))
def test_tails_bound_the_best_split_of_what_the_definition_allows(h, p, s):
    h = torch.tensor(h, dtype=torch.float64)
    assume(s <= len(h))
    fit = row_compressibility(h, p=p)
    e = best_split(h, s).E
    for q in (1, 2):
        assert e.norm(q) <= fit.tail(s, order=q) * (1 + 1e-9)


def test_the_integral_bound_on_the_tail_is_nearly_attained():
    fit = RowCompressibility(p=0.5, R=1.0)
    h = power_law(0.5, 1.0, 100_000)
    assert 0.98 < h[50:].sum() / fit.tail(50) < 1
    assert 0.98 < h[50:].norm() / fit.tail(50, order=2) < 1


def test_tails_without_a_bound_are_infinite():
    assert RowCompressibility(p=1.0, R=1.0).tail(3) == math.inf
    assert RowCompressibility(p=math.inf, R=1.0).tail(3, order=2) == math.inf
    assert RowCompressibility(p=1.0, R=0.0).tail(3) == 0


def test_the_matrix_and_its_moments_give_the_same_fit():
    H = torch.rand(20, 5, generator=torch.Generator().manual_seed(0))
    assert row_compressibility(H) == row_compressibility(H.double().sum(1))


@pytest.mark.parametrize(
    ("h", "p", "R"), [([0.0, 0.0], 0.0, 0.0), ([0.0, -3.0], 0.0, 3.0), ([2.0, 2.0, 2.0], math.inf, 2.0)]
)
def test_edge_cases(h, p, R):
    fit = row_compressibility(torch.tensor(h))
    assert fit.p == p and pytest.approx(R) == fit.R and fit.holds(torch.tensor(h))
    assert fit.bound(1) == pytest.approx(R)


def test_a_single_row_leaves_no_tail():
    fit = RowCompressibility(p=0.0, R=3.0)
    assert fit.bound(2) == 0 and fit.tail(1) == 0 and not fit.holds(torch.tensor([3.0, 1e-9]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: RowCompressibility(p=-1.0, R=1.0),
        lambda: RowCompressibility(p=1.0, R=float("nan")),
        lambda: RowCompressibility(p=0.5, R=1.0).bound(0),
        lambda: RowCompressibility(p=0.5, R=1.0).tail(0),
        lambda: row_compressibility(torch.ones(3), p=0.0),
        lambda: row_compressibility(torch.ones(3), p=1e-4),
    ],
)
def test_wrong_values_are_refused_with_a_remedy(call):
    with pytest.raises(InputError, match=r"given|pass"):
        call()
