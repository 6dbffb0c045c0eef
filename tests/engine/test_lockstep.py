"""Sequential pruning in one pass equals the naive procedure that runs the network again for each layer."""

from __future__ import annotations

from itertools import product

import pytest

import ispasp
from ispasp.types.plan import Plan
from support.naive import Written, naive
from support.written import NETWORKS

KEEP = 0.34  # below one half, where i-SpaSP is not Top-K


def plan(net: Written, method: str, **options: object) -> Plan:
    options = {"compensate": None, "progress": False, **net.options, **options}
    return ispasp.prune(net.build(), net.batches(), KEEP, method=method, **options).plan


METHODS = ("ispasp", "obs", "topk", "l1")  # by means, by second moments, by magnitudes, by weights
QUICK = [
    *((name, "ispasp") for name in NETWORKS),
    *((name, "obs") for name in ("mlp", "inception", "called twice", "view changed in place")),
    *(("mlp", method) for method in ("topk", "l1")),
]
LONG = [case for case in product(NETWORKS, METHODS) if case not in QUICK]


@pytest.mark.parametrize(("name", "method"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_lockstep_equals_naive(name: str, method: str) -> None:
    net = NETWORKS[name]
    assert plan(net, method).kept == naive(net, method, KEEP, "surgery")


@pytest.mark.parametrize("name", ["inception", "densenet", "called twice", "heads"])
def test_removing_and_masking_lead_to_the_same_decisions(name: str) -> None:
    net = NETWORKS[name]
    assert naive(net, "obs", KEEP, "masking") == naive(net, "obs", KEEP, "surgery")


@pytest.mark.parametrize("name", ["mlp", "inception"])
def test_the_order_matters_in_these_networks(name: str) -> None:
    """Else lockstep would be right by accident."""
    net = NETWORKS[name]
    assert plan(net, "obs", order="oneshot").kept != naive(net, "obs", KEEP, "surgery")
