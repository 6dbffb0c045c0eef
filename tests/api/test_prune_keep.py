"""How much stays: fractions, numbers, globs, units, budgets and recipes."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp._keep import widths
from ispasp.integrations.torchvision import import_torchvision
from ispasp.types.dimension import Cost, HiddenDimension
from support.nets import Encoder, ResNet, alive, mlp

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IMAGES = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
UNITS = {"conv1": 6, "layer1.0.conv1": 7, "layer1.1.conv1": 9, "layer2.0.conv1": 10}


def kept(keep: Any, **options: Any) -> dict[str, int]:
    result = ispasp.prune(alive(ResNet()), [IMAGES], keep, compensate=None, progress=False, **options)
    assert {layer.name: layer.kept for layer in result.layers} == {n: len(k) for n, k in result.plan.kept.items()}
    for layer in result.layers:
        assert result.model.get_submodule(layer.name).out_channels == layer.kept
    return {layer.name: layer.kept for layer in result.layers}


@pytest.fixture(scope="module")
def dimensions() -> tuple[HiddenDimension, ...]:
    return ispasp.survey(alive(ResNet()), IMAGES).dimensions


@pytest.mark.parametrize(
    ("keep", "options", "expected"),
    [
        (0.5, {}, {"conv1": 3, "layer1.0.conv1": 4, "layer1.1.conv1": 5, "layer2.0.conv1": 5}),
        (numpy.float32(0.5), {}, {"conv1": 3, "layer1.0.conv1": 4, "layer1.1.conv1": 5, "layer2.0.conv1": 5}),
        (4, {}, dict.fromkeys(UNITS, 4)),
        (0.01, {}, dict.fromkeys(UNITS, 1)),
        (1.0, {}, {}),
        ({"layer1.*": 0.5}, {}, {"layer1.0.conv1": 4, "layer1.1.conv1": 5}),
        ({"layer1.0.*": 2, "layer1.*": 0.9, "*": 1.0}, {}, {"layer1.0.conv1": 2, "layer1.1.conv1": 8}),
        (0.5, {"skip": ["layer*"]}, {"conv1": 3}),
        (0.5, {"skip": ["conv1", "layer1.1.conv1"]}, {"layer1.0.conv1": 4, "layer2.0.conv1": 5}),
        (0.5, {"round_to": 4}, {"conv1": 4, "layer1.0.conv1": 4, "layer1.1.conv1": 4, "layer2.0.conv1": 4}),
        (0.95, {"round_to": 4}, {"layer1.1.conv1": 8}),
        (0.1, {"round_to": 4}, dict.fromkeys(UNITS, 4)),
        (0.5, {"round_to": 64}, {}),
        ({"conv1": [4, 0, 5]}, {}, {"conv1": 3}),
    ],
)  # fmt: skip
def test_widths(
    keep: Any, options: dict[str, Any], expected: dict[str, int], dimensions: tuple[HiddenDimension, ...]
) -> None:
    assert widths(dimensions, keep, **options).counts == expected


@pytest.mark.parametrize(
    ("keep", "options", "expected"),
    [
        (numpy.float32(0.5), {"round_to": 4, "skip": ["conv1", "*.1.*"]}, {"layer1.0.conv1": 4, "layer2.0.conv1": 4}),
        ({"*.0.*": 2, "*.1.*": 0.9, "conv1": [4, 0, 5]}, {}, {"layer1.1.conv1": 8, "conv1": 3}
         | dict.fromkeys(("layer1.0.conv1", "layer2.0.conv1"), 2)),
        (1.0, {}, {}),
    ],
)  # fmt: skip
def test_prune_takes_these_widths(keep: Any, options: dict[str, Any], expected: dict[str, int]) -> None:
    assert kept(keep, **options) == expected


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
@pytest.mark.parametrize("compensate", [None, "local", "dense"])
def test_given_units_stay_and_the_rest_is_selected(order: str, compensate: str | None) -> None:
    keep = {"0": (7, 1, numpy.int64(4)), "2": 0.5}
    result = ispasp.prune(alive(mlp(6, 10, 8, 3)), [X], keep, order=order, compensate=compensate, progress=False)
    assert result.plan.kept["0"] == (1, 4, 7)
    assert len(result.plan.kept["2"]) == 4
    dense = alive(mlp(6, 10, 8, 3))
    assert torch.equal(result.model[0].weight, dense[0].weight[[1, 4, 7]])


def test_kinds() -> None:
    tokens = torch.randn(4, 6, 12, dtype=torch.float64)
    heads = ispasp.prune(alive(Encoder()), [tokens], kinds=("head",), progress=False)
    assert {layer.kind for layer in heads.layers} == {"head"}
    assert [layer.name for layer in heads.layers] == ["attention.0", "attention.1"]
    assert [layer.units for layer in heads.layers] == [4, 4]
    assert heads.model.attention[0].v.out_features == 6


def test_nothing_to_do_gives_back_the_same_network() -> None:
    dense = alive(ResNet())
    result = ispasp.prune(dense, [IMAGES], 1.0, progress=False)
    assert (result.layers, result.plan.kept) == ((), {})
    for key, value in dense.state_dict().items():
        assert torch.equal(result.model.state_dict()[key], value)


def test_layers_come_in_the_order_of_the_survey() -> None:
    result = ispasp.prune(alive(ResNet()), [IMAGES], progress=False)
    names = [d.name for d in ispasp.survey(alive(ResNet()), IMAGES).dimensions]
    assert [layer.name for layer in result.layers] == names


# Budgets ------------------------------------------------------------------------------------------------------------


def params(model: nn.Module, _batch: Tensor) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(model: nn.Module, batch: Tensor) -> int:
    """Counted anew, of convolutions and linear layers, for one example."""
    total = 0

    def count(layer: nn.Module, _args: tuple[Tensor], output: Tensor) -> None:
        nonlocal total
        total += layer.weight[0].numel() * output.numel()

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    handles = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        model(batch[:1])
    for handle in handles:
        handle.remove()
    return total


def check_budget(dense: nn.Module, data: list[Tensor], budget: Any, **options: Any) -> ispasp.Result:
    counted = macs if isinstance(budget, ispasp.Macs) else params
    limit = budget.amount if isinstance(budget.amount, int) else budget.amount * counted(dense, data[0])
    result = ispasp.prune(dense, data, budget, compensate=None, progress=False, **options)
    assert 0.99 * limit <= counted(result.model, data[0]) <= limit
    assert result.cost == Cost(*(count(model, data[0]) for model in (result.model, dense) for count in (params, macs)))
    assert all(layer.kept % options.get("round_to", 1) == 0 for layer in result.layers)
    return result


@pytest.mark.long
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (ispasp.Macs(0.4), {"scope": "all", "round_to": 8, "method": "topk"}),
        (ispasp.Params(5_000_000), {"order": "oneshot", "method": "topk"}),
    ],
    ids=str,
)
def test_a_budget_is_hit_within_a_percent_on_resnet18(budget: Any, options: dict[str, Any]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = import_torchvision().models.resnet18(num_classes=10).eval()
    g = torch.Generator().manual_seed(0)
    result = check_budget(dense, [torch.randn(2, 3, 32, 32, generator=g)], budget, **options)
    assert len({layer.kept / layer.units for layer in result.layers}) > 1  # it is no uniform fraction


@pytest.mark.parametrize(
    ("budget", "method"),
    [
        (ispasp.Macs(0.5), "ispasp"),
        (ispasp.Macs(3000), "topk"),
        (ispasp.Params(0.3), "l1"),
        (ispasp.Params(numpy.float64(0.7)), "obs"),
        (ispasp.Params(4000), "ispasp"),
    ],
    ids=str,
)
def test_a_budget_is_hit_within_a_percent(budget: Any, method: str) -> None:
    dense = alive(mlp(6, 60, 60, 50, 3))
    result = check_budget(dense, [X], budget, method=method)
    assert result.plan.kept


def test_a_budget_leaves_alone_what_is_skipped() -> None:
    result = check_budget(alive(mlp(6, 60, 60, 50, 3)), [X], ispasp.Macs(0.6), skip=["2"])
    assert "2" not in result.plan.kept


def test_a_budget_keeps_more_where_more_would_be_lost() -> None:
    dense = alive(mlp(6, 60, 60, 3))
    dense[0].weight.data[15:] *= 1e-3  # most units of the first layer hardly matter
    dense[0].bias.data[15:] = 0.0
    result = check_budget(dense, [X], ispasp.Params(0.5))
    widths = {layer.name: layer.kept for layer in result.layers}
    assert widths["0"] < 36
    assert widths.get("2", 60) > 48
    assert set(range(15)) <= set(result.plan.kept["0"])


@pytest.mark.long
def test_a_recipe_is_a_keep() -> None:
    recipe = ispasp.recipes["mobilenet_v2-260M"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = import_torchvision().models.mobilenet_v2(num_classes=4).eval()
    result = ispasp.prune(dense, [torch.randn(2, 3, 32, 32)], recipe, method="l1", compensate=None, progress=False)
    assert {layer.name for layer in result.layers} == {f"features.{b}.conv.0.0" for b in (6, 9, 10, 12, 13)}
    assert all(layer.kept == int(0.4 * layer.units + 0.5) for layer in result.layers)
    assert result.model.features[6].conv[1][0].groups == result.model.features[6].conv[0][0].out_channels


@pytest.mark.parametrize("refit", ["consumers", "all"])
def test_a_budget_of_parameters_counts_the_biases_that_layers_gain(refit: str) -> None:
    dense = alive(nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((8, 64), (64, 48), (48, 96)))))
    x = torch.randn(50, 8, dtype=torch.float64)
    result = ispasp.prune(dense, [x], ispasp.Params(0.5), refit=refit, progress=False)
    parameters = sum(p.numel() for p in result.model.parameters())
    assert any(p.ndim == 1 for p in result.model.parameters())
    assert result.cost.params == parameters
    assert 0.99 <= parameters / (0.5 * sum(p.numel() for p in dense.parameters())) <= 1.0


def test_a_budget_that_the_dense_network_meets_removes_nothing() -> None:
    dense = alive(nn.Sequential(nn.Linear(6, 10, bias=False), nn.ReLU(), nn.Linear(10, 3, bias=False)))
    result = ispasp.prune(dense, [torch.randn(20, 6, dtype=torch.float64)], ispasp.Params(1.0), progress=False)
    assert result.layers == ()


def test_numpy_arrays_tensors_and_sets_name_units() -> None:
    dense, x = alive(mlp(6, 10, 8, 3)), torch.randn(20, 6, dtype=torch.float64)
    for units in (numpy.array([1, 4]), torch.tensor([1, 4]), {4, 1}, range(1, 5, 3)):
        assert ispasp.prune(dense, [x], {"0": units}, progress=False).plan.kept == {"0": (1, 4)}
