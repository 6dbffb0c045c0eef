"""Greedy local imitation against its definition, and the rate that it claims."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

import ispasp
from ispasp.engine import measure
from ispasp.select import GFSConvex, GFSLocal
from ispasp.select.gfs import imitations
from ispasp.types import LinearConsumer, Statistics


def outputs(n: int, m: int, seed: int, signed: bool = True) -> Tensor:
    """What each unit puts into the output, flat: (n, m)."""
    draw = torch.randn if signed else torch.rand
    return draw(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(Y: Tensor, a: Tensor) -> float:
    """||sum of Y - sum of a_i n Y_i||^2, as in the paper."""
    return float((Y.sum(0) - len(Y) * (a[:, None] * Y).sum(0)).square().sum())


def best_step(Y: Tensor, a: Tensor) -> float:
    """The least error of any (1 - g) a + g e_i, over a fine grid of g, with a unit that is always zero."""
    n = len(Y)
    wide, weights = torch.cat([Y, torch.zeros(1, Y.shape[1], dtype=Y.dtype)]), torch.cat([a, 1 - a.sum()[None]])
    target, least = Y.sum(0), float("inf")
    for i in range(n + 1):
        low = -float(weights[i]) / (1 - float(weights[i])) if weights[i] < 1 else 0.0
        g = torch.linspace(low, 1.0, 4001, dtype=torch.float64)[:, None]
        unit = torch.zeros(n + 1, dtype=torch.float64)
        unit[i] = 1.0
        tried = (1 - g) * weights + g * unit  # (grid, n + 1)
        least = min(least, float((target - n * tried @ wide).square().sum(1).min()))
    return least


@settings(max_examples=20)
@given(n=st.integers(2, 6), m=st.integers(1, 5), seed=st.integers(0, 10**6), signed=st.booleans())
def test_every_step_is_the_best_one(n: int, m: int, seed: int, signed: bool) -> None:
    Y = outputs(n, m, seed, signed)
    a = torch.zeros(n, dtype=torch.float64)
    for after in islice(imitations(Y @ Y.T, free=100), 8):
        before, now = error(Y, a), error(Y, after)
        assert now <= best_step(Y, a) + 1e-9 * before + 1e-12
        assert bool((after >= 0).all())
        assert float(after.sum()) <= 1 + 1e-12
        a = after


@settings(max_examples=30)
@given(n=st.integers(2, 12), m=st.integers(1, 8), seed=st.integers(0, 10**6), signed=st.booleans())
def test_the_error_falls_as_fast_as_claimed(n: int, m: int, seed: int, signed: bool) -> None:
    Y = outputs(n, m, seed, signed)
    points = n * torch.cat([Y, torch.zeros(1, m, dtype=Y.dtype)])
    R2 = float(torch.cdist(points, points).max()) ** 2
    errors = [error(Y, a) for a in islice(imitations(Y @ Y.T, free=60), 60)]
    for k, found in enumerate(errors, start=1):
        assert found <= 2 * R2 / (k + 2) + 1e-9 * R2


def test_with_its_weights_it_beats_greedy_addition_without() -> None:
    wins = 0
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        H, W = (
            torch.rand(200, 24, generator=g, dtype=torch.float64),
            torch.randn(8, 24, generator=g, dtype=torch.float64),
        )
        statistics = Statistics(24, (measure(LinearConsumer(W), H, ["gram"]),))
        found = GFSConvex().select(statistics, 6).kept
        factors = torch.tensor(GFSConvex().factors(statistics, found))
        ours = float((H @ W.T - (H[:, list(found)] * factors) @ W[:, list(found)].T).norm())
        local = list(GFSLocal().select(statistics, 6).kept)
        theirs = float((H @ W.T - H[:, local] @ W[:, local].T).norm())
        wins += ours < theirs
    assert wins >= 9


@settings(max_examples=20)
@given(n=st.integers(1, 8), seed=st.integers(0, 10**6), data=st.data())
def test_sets_have_the_size_that_was_asked_for_even_where_fewer_suffice(n: int, seed: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 2))
    Y = outputs(n, 3, seed) * (torch.arange(n) < rank)[:, None]  # all others put nothing into the output
    s = data.draw(st.integers(1, n))
    H, W = torch.ones(1, n, dtype=torch.float64), Y.T
    selection = GFSConvex().select(Statistics(n, (measure(LinearConsumer(W), H, ["gram"]),)), s)
    assert len(selection.kept) == s
    if 0 < rank <= s:
        assert set(selection.kept) >= {*range(min(rank, n))} or error(Y, torch.ones(n) / n) == 0


def test_prune_applies_its_weights_without_compensation() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
    x = torch.randn(64, 6)
    result = ispasp.prune(net, [x], keep=6, method="gfs-convex", compensate=None, hold_out=False, progress=False)
    kept = list(result.plan.kept["0"])
    with torch.no_grad():
        H = torch.relu(net[0](x))
    statistics = Statistics(12, (measure(LinearConsumer(net[2].weight.detach()), H, ["gram"]),))
    factors = torch.tensor(GFSConvex().factors(statistics, kept))
    assert_close(result.model[2].weight, net[2].weight[:, kept] * factors, rtol=1e-4, atol=1e-5)


def test_refuses_no_steps() -> None:
    with pytest.raises(ispasp.IspaspError, match="steps=0: pass an integer >= 1"):
        GFSConvex(steps=0)
