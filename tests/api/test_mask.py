"""Masking instead of removing: the same output, dense shapes, and everything put back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import ispasp
from support.masking import distance, output
from support.networks import Network, networks
from test_fuzz import EXAMPLES, fuzz, random_plan, surveyed


class Tied(nn.Module):
    """An embedding that is the output layer as well, and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.attend, self.up, self.down = nn.MultiheadAttention(8, 4), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(x + self.down(self.up(x).relu()))


class Exponential(nn.Module):
    """A weight that zeros do not make zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.logs = nn.Linear(4, 8), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.up(x).relu(), self.logs.exp())


def chain(norm: Any, dim: int = 0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), norm(nn.Linear(8, 6), dim=dim), nn.ReLU(), nn.Linear(6, 2))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(32, 2)
    )


MODELS = {
    "tied": (Tied, torch.arange(12).view(3, 4), "all"),
    "conv": (conv, torch.randn(2, 3, 6, 6), "blocks"),
    "weight_norm": (lambda: chain(parametrizations.weight_norm), torch.randn(2, 4), "blocks"),
    "weight_norm over inputs": (lambda: chain(parametrizations.weight_norm, 1), torch.randn(2, 4), "blocks"),
    "weight_norm by hook": (lambda: chain(weight_norm), torch.randn(2, 4), "blocks"),
}


@pytest.mark.parametrize("name", MODELS)
def test_masking_equals_removing(name: str) -> None:
    build, batch, scope = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    found = ispasp.survey(model, batch, scope=scope)
    plan = found.plan({d.name: range(d.units // 2, d.units) for d in found.dimensions})
    before = {key: (value, value.clone()) for key, value in model.state_dict().items()}
    dense = output(model, batch)
    with ispasp.mask(model, plan, batch) as masked:
        assert masked is model
        assert {k: v.shape for k, v in model.state_dict().items()} == {k: v[1].shape for k, v in before.items()}
        seen = output(model, batch)
        assert distance(seen, dense) > 1e-4  # else the comparison is blind
    for key, value in model.state_dict().items():
        assert value.data_ptr() == before[key][0].data_ptr()
        assert torch.equal(value, before[key][1])
    assert all(map(torch.equal, output(model, batch), dense))
    assert distance(output(ispasp.apply_(model, plan), batch), seen) < 1e-5


@pytest.mark.long
@settings(fuzz, max_examples=max(EXAMPLES // 5, 1))
@given(network=networks(), data=st.data())
def test_random_networks(network: Network, data: st.DataObject) -> None:
    plan = random_plan(data, surveyed(network, data.draw(st.sampled_from(["blocks", "all"]))))
    dense = output(network.model, network.batch)
    with ispasp.mask(network.model, plan, network.batch):
        seen = output(network.model, network.batch)
    assert all(map(torch.equal, output(network.model, network.batch), dense))
    assert distance(output(ispasp.apply_(network.model, plan), network.batch), seen) <= 1e-9


def test_a_copy_stays_masked_and_exceptions_put_back() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), ispasp.mask(model, ispasp.survey(model, x).plan(0.5), x) as masked:
        stays = copy.deepcopy(masked)
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert stays[2].weight[:, 4:].count_nonzero() == 0


def test_what_zeros_do_not_mask_is_refused() -> None:
    model, x = Exponential(), torch.randn(3, 4)
    plan = ispasp.survey(model, x).plan(0.5)
    before = model.logs.clone()
    with pytest.raises(ispasp.errors.SurgeryError, match="do not mask these units"), ispasp.mask(model, plan, x):
        pass
    assert torch.equal(model.logs, before)
    with pytest.raises(ispasp.errors.InputError, match=r"pass an ispasp\.Plan"), ispasp.mask(model, 0.5, x):  # type: ignore[arg-type]
        pass
