"""Budgets: fractions and counts, and what is neither."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ispasp
from ispasp.budget import Budget, Macs, Params
from ispasp.errors import InputError
from ispasp.types.dimension import Cost

COST = Cost(params=7, macs=9, dense_params=1_000, dense_macs=50_000)


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        (Macs(0.5), 25_000),
        (Params(0.5), 500),
        (Macs(1.0), 50_000),
        (Macs(1), 1),
        (Params(300), 300),
        (Params(np.int64(300)), 300),
        (Params(np.float32(0.25)), 250),
        (Params(0.29), 290),  # 0.29 * 1000 is 290.0 only after rounding
        (Params(0.1234), 123),
        (Params(5_000), 5_000),
    ],
)
def test_limit_is_a_fraction_of_the_dense_count_or_the_count(budget: Budget, limit: int) -> None:
    assert budget.limit(COST) == limit
    assert type(budget.limit(COST)) is int


@pytest.mark.parametrize("kind", [Macs, Params])
@pytest.mark.parametrize(
    ("amount", "message"),
    [
        (0.0, r"\(0.0\) is not a fraction: .* pass (Macs|Params)\(0.5\)"),
        (-0.5, "is not a fraction"),
        (float("nan"), "is not a fraction"),
        (float("inf"), "is not a fraction"),
        (2.5e9, r"pass (Macs|Params)\(2500000000\) for a count"),
        (0, r"leaves nothing of the network: pass a float .* or an int >= 1"),
        (-3, "leaves nothing"),
        (True, "is given a bool"),
        ("half", "is given a str"),
        (None, "is given a NoneType"),
    ],
)
def test_bad_amounts_are_refused_with_a_remedy(kind: type[Budget], amount: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        kind(amount)  # type: ignore[arg-type]


def test_a_limit_that_the_narrowest_network_just_meets_is_within_reach() -> None:
    Macs(600).check(COST, least=600)
    with pytest.raises(InputError, match=r"Macs\(600\) is out of reach: .* has 601 of 50,000; pass a larger count"):
        Macs(600).check(COST, least=601)


def test_counts_are_those_of_the_survey() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    found = ispasp.survey(net, torch.ones(1, 4))
    expected = found.cost(found.plan({"0": 3, "2": 5}))
    assert Macs(0.5).count(found.costs, {"0": 3, "2": 5}) == expected.macs == 4 * 3 + 3 * 5 + 5 * 2
    assert Params(0.5).count(found.costs, {"0": 3, "2": 5}) == expected.params
    assert Macs(0.5).count(found.costs, {}) == expected.dense_macs
