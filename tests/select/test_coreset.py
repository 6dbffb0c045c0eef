"""Sensitivities against their definitions, and draws against drawing with replacement."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

import ispasp
from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.select import PFP, Coreset
from ispasp.select.coreset import Contribution, _first_drawn, _weights
from ispasp.types import Consumer, ConvConsumer, LinearConsumer, Producer, Reading, Statistics
from support.problems import Problem, problems


def relative_parts(A: Consumer, H: Tensor) -> list[float]:
    """For each unit the largest w_ij a_j / sum over k of w_ik a_k, by loops. Convolutions by one channel at a time."""
    units = A.count_units()
    best = [0.0] * A.channels
    zero = torch.zeros_like(H)
    for sign in (1.0, -1.0):
        terms = []
        for c in range(A.channels):
            alone = zero.clone()
            index = (slice(None), c) if isinstance(A, ConvConsumer) else (..., c)
            alone[index] = H[index]
            terms.append(_of_one_sign(A, alone, sign))
        whole = torch.stack(terms).sum(0)
        for c, term in enumerate(terms):
            ratio = torch.where(whole > 0, term / whole.clamp_min(1e-300), 0.0)
            best[c] = max(best[c], float(ratio.max()))
    unit_of = A.unit_of().tolist()
    return [sum(best[c] for c in range(A.channels) if unit_of[c] == u) for u in range(units)]


def _of_one_sign(A: Consumer, H: Tensor, sign: float) -> Tensor:
    """Sum of the products w x of one sign: of positive w with positive x, and of negative with negative."""
    W = (
        A.weight.double()
        if A.scale is None
        else A.weight.double() * A.scale.double().reshape(-1, *(1,) * (A.weight.ndim - 1))
    )

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        return replace(A, weight=weight, scale=None)(x)

    x, s = H.double(), sign
    return layer((s * W).clamp(min=0), x.clamp(min=0)) + layer((-s * W).clamp(min=0), (-x).clamp(min=0))


@settings(max_examples=25)
@given(problem=problems(), seed=st.integers(0, 3))
def test_pfp_is_the_largest_relative_part(problem: Problem, seed: int) -> None:
    H = problem.data(3, seed)
    for A in problem.consumers:
        X = problem.as_consumer_gets(A, H)
        if A(X).numel() > 256 * A.outputs:
            continue  # more positions than are looked at
        found = PFP().score(Statistics(problem.units, (measure(A, X, ["contribution"]),)))
        assert_close(found, torch.tensor(relative_parts(A, X), dtype=torch.float64))


def test_pfp_looks_at_256_positions_evenly() -> None:
    A, H = LinearConsumer(torch.ones(1, 2)), torch.ones(1, 511, 2)
    H[0, 5, 0] = 0.0  # unit 1 is alone there, but only every second position counts
    assert largest(measure(A, H, ["contribution"])) == [0.5, 0.5]
    H[0, 6, 0] = 0.0
    assert largest(measure(A, H, ["contribution"])) == [0.5, 1.0]


def largest(reading: Reading) -> list[float]:
    found = reading.get(Contribution)
    assert found is not None
    values: list[float] = found.largest().tolist()
    return values


def test_maxima_add_up_over_batches_even_if_one_comes_twice() -> None:
    A, g = LinearConsumer(torch.rand(3, 5)), torch.Generator().manual_seed(0)
    parts = [measure(A, torch.rand(4, 5, generator=g), ["contribution"]) for _ in range(3)]
    together = parts[0] + parts[1] + parts[0] + parts[2] + parts[0]
    found = together.get(Contribution)
    assert found is not None
    each = torch.stack([p.get(Contribution).largest() for p in parts])  # type: ignore[union-attr]
    assert_close(found.largest(), each.amax(0))
    assert found.examples == 20


def test_outputs_that_are_gone_do_not_count() -> None:
    A = LinearConsumer(torch.tensor([[1.0, 1.0], [0.0, 5.0]]), scale=torch.tensor([1.0, 0.0]))
    found = measure(A, torch.tensor([[3.0, 1.0]]), ["contribution"]).get(Contribution)
    assert found is not None
    assert found.largest().tolist() == [0.75, 0.25]


def test_a_coreset_is_norm_times_largest_weight() -> None:
    g = torch.Generator().manual_seed(0)
    W, V, P = torch.randn(4, 6, generator=g), torch.randn(5, 6, 3, 3, generator=g), torch.randn(6, 7, generator=g)
    statistics = Statistics(6, (Reading(LinearConsumer(W)), Reading(ConvConsumer(V))), (Producer(P),))
    expected = [
        float(P[i].norm()) * max(float(W[:, i].abs().max()), *(float(V[o, i].norm()) for o in range(5)))
        for i in range(6)
    ]
    assert_close(Coreset().score(statistics), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_draws_are_those_with_replacement_until_enough_are_different() -> None:
    s, runs = torch.tensor([5.0, 3.0, 1.5, 0.5], dtype=torch.float64), 4000
    p = (s / s.sum()).tolist()
    ours: Counter[tuple[int, ...]] = Counter()
    theirs: Counter[tuple[int, ...]] = Counter()
    mine, exact = torch.zeros(2, 4, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    for seed in range(runs):
        kept = sorted(_first_drawn(s, seed).argsort()[:2].tolist())
        ours[tuple(kept)] += 1
        mine[kept] += torch.tensor(_weights(s, kept, seed), dtype=torch.float64)
        draws: list[int] = []
        while len(set(draws)) < 2:
            draws.append(int(torch.multinomial(s, 1, generator=g)))
        theirs[tuple(sorted(set(draws)))] += 1
        for i in set(draws):
            exact[i] += draws.count(i) / (len(draws) * p[i])
    for pair in theirs:
        assert abs(ours[pair] - theirs[pair]) < 5 * (theirs[pair] + 1) ** 0.5
    assert_close(mine / runs, exact / runs, rtol=0.15, atol=0.05)


@pytest.mark.parametrize("kind", [Coreset, PFP])
def test_units_that_can_never_be_drawn_come_last(kind: type[Coreset] | type[PFP]) -> None:
    H = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.0, 1.0, 0.0])
    made = Producer(torch.tensor([[1.0], [0.0], [2.0], [0.0]]))
    for seed in range(5):
        method = kind(sample=True, seed=seed)
        reading = measure(LinearConsumer(torch.ones(2, 4)), H, ["contribution"])
        statistics = Statistics(4, (reading,), (made,))
        assert method.select(statistics, 2).kept == (0, 2)
        assert method.select(statistics, 3).kept == (0, 1, 2)
        factors = method.factors(statistics, (0, 1, 2))
        assert factors[1] == 1.0
        assert all(f > 0 for f in factors)


def test_prune_applies_the_weights_of_a_draw_without_compensation() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
    x, method = torch.randn(64, 6), Coreset(sample=True, seed=2)
    result = ispasp.prune(net, [x], keep=6, method=method, compensate=None, progress=False)
    kept = list(result.plan.kept["0"])
    statistics = Statistics(12, (Reading(LinearConsumer(net[2].weight.detach())),), (Producer(net[0].weight.detach()),))
    factors = torch.tensor(method.factors(statistics, kept))
    assert len(set(factors.tolist())) > 1
    assert_close(result.model[2].weight, net[2].weight[:, kept] * factors)


def test_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="consumer 0 has no contribution: measure\\(consumer"):
        PFP().select(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),)), 1)
    with pytest.raises(InputError, match="sample=2: pass True"):
        PFP(sample=2)  # type: ignore[arg-type]
