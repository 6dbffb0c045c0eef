"""Soft filter pruning against its definition: zeroed after every epoch, trained on, removed at the end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ispasp
from ispasp._finetune import finetune
from ispasp.errors import InputError
from ispasp.train import Sgd, Soft
from support.zoo import case

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 3),
    )  # fmt: skip


def batches() -> Batches:
    x = torch.randn(32, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return list(zip(x.split(8), (x.mean((1, 2, 3)) > 0).long().split(8), strict=True))


def zeroed_by_hand(net: nn.Sequential, norm: float) -> dict[str, list[int]]:
    """Zero the half of the filters with the smallest norm, in each convolution. Returns those that stay."""
    kept = {}
    for name in ("0", "3"):
        weight = net[int(name)].weight.data
        norms = [float(row.abs().pow(norm).sum()) for row in weight]
        order = sorted(range(len(norms)), key=lambda i: -norms[i])
        kept[name] = sorted(order[: len(norms) // 2])
        for i in order[len(norms) // 2 :]:
            weight[i] = 0
    return kept


def by_hand(net: nn.Sequential, data: Batches, epochs: int, lr: float, norm: float) -> dict[str, list[int]]:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    kept: dict[str, list[int]] = {}
    net.train()
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        kept = zeroed_by_hand(net, norm)
    return kept


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_is_what_the_paper_says(norm: float) -> None:
    ours, theirs = network(), network()
    soft = Soft(keep=0.5, norm=norm)
    result = finetune(ours, batches(), epochs=3, recipe=Sgd(lr=0.05, schedule="constant"), soft=soft, progress=False)
    kept = by_hand(theirs, batches(), 3, 0.05, norm)
    assert result.plan is not None
    assert {name: list(units) for name, units in result.plan.kept.items()} == kept
    assert ours[0].weight.shape == (4, 1, 3, 3)
    torch.testing.assert_close(ours[0].weight, theirs[0].weight[kept["0"]])
    torch.testing.assert_close(ours[3].weight, theirs[3].weight[kept["3"]][:, kept["0"]])
    torch.testing.assert_close(ours[1].running_var, theirs[1].running_var[kept["0"]])


def test_zeroed_units_are_seen_by_evaluate_and_may_come_back() -> None:
    zero: list[frozenset[int]] = []

    def evaluate(model: nn.Module) -> float:
        weight: Tensor = model[0].weight  # type: ignore[index]
        zero.append(frozenset(torch.nonzero(weight.flatten(1).abs().sum(1) == 0).flatten().tolist()))
        return float(len(zero))

    recipe = Sgd(lr=0.5, schedule="constant")
    net = network()
    result = finetune(net, batches(), epochs=6, recipe=recipe, soft=Soft(0.5), evaluate=evaluate, progress=False)
    assert [len(units) for units in zero] == [4] * 6
    assert len(set(zero)) > 1  # what was zero has grown back
    assert list(result.scores.values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_an_interrupted_run_ends_in_the_same_network(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 4, "recipe": Sgd(lr=0.1), "soft": Soft(0.5), "progress": False}
    whole = finetune(network(), batches(), **options)
    net = network()

    def stop(model: nn.Module) -> float:
        raise KeyboardInterrupt

    saves = {"checkpoint": tmp_path, "checkpoint_every": 3}
    with pytest.raises(KeyboardInterrupt):
        finetune(net, batches(), **options, **saves, evaluate=_third(stop))
    assert net[0].weight.shape[0] == 8  # removed only at the end
    again = finetune(network(), batches(), **options, **saves)
    assert again.resumed == 9
    assert again.plan == whole.plan
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))
    finished = finetune(network(), batches(), **options, **saves)
    assert finished.resumed == 16
    assert finished.plan == whole.plan
    with pytest.raises(InputError, match="soft"):
        finetune(network(), batches(), **{**options, "soft": Soft(0.25)}, **saves)


def _third(call: Any) -> Any:
    seen: list[int] = []

    def evaluate(model: nn.Module) -> float:
        seen.append(1)
        return float(call(model)) if len(seen) == 3 else 0.0

    return evaluate


def test_a_network_from_scratch_with_streams_and_heads() -> None:
    found = case("transformers/bert")
    model = ispasp.reset_(found.build())
    dense = copy.deepcopy(model)
    batch = {**found.batch(), "labels": torch.tensor([0, 1])}
    result = finetune(model, [batch] * 2, epochs=2, recipe=Sgd(lr=0.01), soft=Soft(0.5), progress=False)
    assert result.plan is not None
    assert {len(kept) for kept in result.plan.kept.values()} == {2, 16, 32}  # of 4 heads, 32 in the pooler, 64
    shapes = {name: p.shape for name, p in ispasp.apply_(dense, result.plan).named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes


def test_skipped_units_are_left_alone() -> None:
    net = network()
    finetune(net, batches(), epochs=1, recipe=Sgd(lr=0.1), soft=Soft(0.5, skip="0"), progress=False)
    assert (net[0].out_channels, net[3].out_channels) == (8, 3)
    assert bool((net[0].weight.flatten(1).abs().sum(1) > 0).all())


@pytest.mark.parametrize(
    ("soft", "told"),
    [
        (0.5, "soft is a float: pass ispasp.train.Soft"),
        (Soft(1.0), "removes nothing"),
        (Soft({"nothing": 0.5}), "no hidden dimension fits 'nothing'"),
        (Soft(ispasp.Macs(0.5)), "needs calibration"),
    ],
)
def test_refuses_what_it_cannot_use(soft: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        finetune(network(), batches(), soft=soft, progress=False)
    with pytest.raises(InputError, match="norm=0: pass a number above 0"):
        Soft(0.5, norm=0)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(InputError, match="'0' computes its weight"):
        finetune(normed, [(torch.ones(4, 4), torch.zeros(4).long())], soft=Soft(0.5), progress=False)
