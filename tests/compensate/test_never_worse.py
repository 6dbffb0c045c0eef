"""Compensation never makes the fitted error worse, on any network."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st

import ispasp
from support.naive import Written
from support.networks import Network, networks
from support.written import NETWORKS

EXAMPLES = int(os.environ.get("ISPASP_EXAMPLES", "4"))
fuzz = settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
OPTIONS = st.fixed_dictionaries(
    {
        "compensate": st.sampled_from(["dense", "local"]),
        "order": st.sampled_from(["sequential", "oneshot"]),
        "scope": st.sampled_from(["blocks", "all"]),
        "keep": st.sampled_from([0.3, 0.6]),
        "method": st.sampled_from(["ispasp", "l1"]),
        "memory": st.sampled_from([None, 1]),
        "refit": st.sampled_from(["consumers", "all"]),
    }
).filter(lambda options: options["refit"] == "consumers" or options["compensate"] == "dense")


def check(result: ispasp.Result) -> None:
    for layer in result.layers:
        assert (layer.relative_error is None) == (layer.uncompensated_error is None)
        if layer.relative_error is not None:
            assert 0 <= layer.relative_error <= layer.uncompensated_error * (1 + 1e-9) + 1e-12, layer
        assert layer.name in result.unproved or layer.certificate < 1e-8, layer
    assert result.verified < 1e-9
    assert result.cost.params == sum(p.numel() for p in result.model.parameters())


@pytest.mark.long
@given(networks(), OPTIONS)
@fuzz
def test_random_networks(network: Network, options: dict[str, object]) -> None:
    check_random(network, options)


@pytest.mark.long
@given(networks(), OPTIONS)
@settings(fuzz, max_examples=5 * EXAMPLES)
def test_many_random_networks(network: Network, options: dict[str, object]) -> None:
    check_random(network, options)


def check_random(network: Network, options: dict[str, object]) -> None:
    dense = copy.deepcopy(network.model)
    try:
        result = ispasp.prune(network.model, [network.batch], progress=False, **options)
    except ispasp.errors.NothingToPruneError:
        assume(False)
        raise
    except ispasp.errors.SurgeryError:
        assume(not network.stubborn)  # sizes stand in the code of its forward
        raise
    check(result)
    same = zip(network.model.state_dict().values(), dense.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


WAYS = [(compensate, order) for compensate in ("local", "dense") for order in ("sequential", "oneshot")]


@pytest.mark.parametrize(
    ("name", "compensate", "order"),
    [*(("resnet", *way) for way in WAYS), ("streams of an mlp", *WAYS[2]), ("densenet", *WAYS[2])],
)
def test_every_way_to_compensate_helps(name: str, compensate: str, order: str) -> None:
    net: Written = NETWORKS[name]
    options = {"keep": 0.6, "progress": False, "order": order, "ridge": 1e-4, **net.options}
    result = ispasp.prune(net.build(), net.batches(), compensate=compensate, **options)
    check(result)
    assert (
        sum(layer.relative_error < 0.95 * layer.uncompensated_error for layer in result.layers)
        >= len(result.layers) - 1
    )


def test_where_no_fit_is_better_the_weight_stays_and_the_report_says_so() -> None:
    g = torch.Generator().manual_seed(0)  # small whole numbers: nothing is rounded
    dense = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).double()
    for parameter in dense.parameters():
        parameter.data = torch.randint(-3, 4, parameter.shape, generator=g).double()
    dense[0].weight.data[3:] = 0.0
    dense[0].bias.data[3:] = -1.0  # three units that never fire
    x = torch.randint(-3, 4, (64, 4), generator=g).double()
    result = ispasp.prune(dense, [x], {"0": [0, 1, 2]}, progress=False)
    assert result.layers[0].notes == ("2: not compensated: no better fit",)
    assert torch.equal(result.model[2].weight, dense[2].weight[:, :3])
    assert result.layers[0].relative_error == result.layers[0].uncompensated_error < 1e-7  # rounding of the sums


def _lost(dense: torch.nn.Sequential, pruned: torch.nn.Sequential, x: torch.Tensor) -> float:
    """What the last linear layer, with the mean of its BatchNorm, gives in float64 against the dense network."""
    h, target = dense[0](x).double()[:, : pruned[2].in_features], dense[2](dense[0](x)).double()
    shift = dense[3].running_mean - pruned[3].running_mean if len(dense) > 3 else pruned[2].bias
    return float((target - h @ pruned[2].weight.double().T - shift.double()).norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
def test_what_rounding_takes_back_is_seen(dtype: torch.dtype, norm: bool) -> None:
    """Faint units go: the fit changes weights by less than half precision can say."""
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        last = [torch.nn.BatchNorm1d(4)] if norm else []
        layers = [torch.nn.Linear(8, 16), torch.nn.Identity(), torch.nn.Linear(16, 4, bias=not norm), *last]
        dense = torch.nn.Sequential(*layers).eval()
        for parameter in dense.parameters():
            parameter.data = torch.randn(parameter.shape, generator=g)
        dense[0].weight.data[8:] *= 1e-4
        dense[0].bias.data[8:] *= 1e-4
        dense, x = dense.to(dtype), torch.randn(200, 8, generator=g).to(dtype)
        options = {"keep": {"0": range(8)}, "progress": False}
        found = ispasp.prune(dense, [x], compensate="local", **options)
        bare = ispasp.prune(dense, [x], compensate=None, **options)
        with torch.no_grad():
            before, after = (_lost(dense, result.model, x) for result in (bare, found))
        assert after <= before * (1 + 1e-6)
