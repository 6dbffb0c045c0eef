"""`compensate="dense"` aims at the dense network, with the skip connection and what earlier layers have lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from support.nets import ResNet, alive, mlp

SHARP = 1e-13  # a ridge that leaves the exact solution alone


def double_(layer: nn.Module, reader: nn.Module) -> None:
    """Make units k + n copies of units k, twice as large: as good as superfluous."""
    n = len(layer.weight) // 2
    layer.weight.data[n:] = 2 * layer.weight.data[:n]
    if layer.bias is not None:
        layer.bias.data[n:] = 2 * layer.bias.data[:n]
    assert reader.weight.shape[1] == 2 * n


def output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x)


@pytest.mark.parametrize("compensate", ["local", "dense"])
@pytest.mark.parametrize("order", ["sequential", "oneshot"])
def test_copies_of_units_can_go_without_a_trace(compensate: str, order: str) -> None:
    dense = alive(mlp(6, 12, 10, 8, 3))
    for a, b in pairwise(dense[::2]):
        double_(a, b)
    x = torch.randn(64, 6, dtype=torch.float64)
    keep = {"0": range(6), "2": range(5, 10), "4": [0, 1, 2, 7]}  # each unit or its copy
    result = ispasp.prune(dense, [x], keep, compensate=compensate, order=order, ridge=SHARP, progress=False)
    assert_close(output(result.model, x), output(dense, x), rtol=0, atol=1e-6)
    assert max(layer.relative_error for layer in result.layers) < 1e-6
    bare = ispasp.prune(dense, [x], keep, compensate=None, progress=False)
    assert (output(bare.model, x) - output(dense, x)).abs().max() > 0.1


def test_copies_of_filters_can_go_without_a_trace_in_a_resnet() -> None:
    dense = alive(ResNet())
    blocks = [dense.layer1[0], dense.layer1[1], dense.layer2[0]]
    for block in blocks:  # an even number of filters, the second half copies of the first, through the norms as well
        hidden = block.conv1.out_channels = 2 * (block.conv1.out_channels // 2)
        block.conv1.weight.data = block.conv1.weight.data[:hidden].clone()
        block.conv2.weight.data = block.conv2.weight.data[:, :hidden].clone()
        block.conv2.in_channels = block.bn1.num_features = hidden
        for tensor in (*block.bn1.parameters(), block.bn1.running_mean, block.bn1.running_var):
            tensor.data = tensor.data[:hidden].clone()
            tensor.data[hidden // 2 :] = tensor.data[: hidden // 2]
        block.conv1.weight.data[hidden // 2 :] = block.conv1.weight.data[: hidden // 2]
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(n, 3, 9, 9, generator=g, dtype=torch.float64) for n in (9, 8)]
    keep = {name: range(units // 2) for name, units in (("layer1.0.conv1", 6), ("layer1.1.conv1", 8), ("layer2.*", 10))}
    result = ispasp.prune(dense, batches, keep, ridge=SHARP, progress=False)
    assert len(result.layers) == 3
    assert_close(output(result.model, batches[0]), output(dense, batches[0]), rtol=0, atol=1e-6)


class Lost(nn.Module):
    """The first block adds relu(x0) to channel 2, which the second block does not read but could add as well."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.after = after
        self.up1, self.down1 = nn.Linear(4, 2, bias=False), nn.Linear(2, 4)
        self.up2, self.down2 = nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=after != "norm")
        self.norm, self.gamma = nn.BatchNorm1d(4), nn.Parameter(torch.empty(4))
        alive(self)
        self.up1.weight.data = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]).double()
        self.down1.weight.data = torch.tensor([[0.0, 0], [0, 0], [3.0, 0], [0, 2.0]]).double()
        self.up2.weight.data = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [1.0, 1.0, 0, 0]]).double()
        self.down1.bias.data.zero_()
        self.down2.weight.data[:, 2] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down1(torch.relu(self.up1(x)))
        y = self.down2(torch.relu(self.up2(x)))
        if self.after == "norm":
            y = self.norm(y)
        elif self.after == "scale":
            y = self.gamma * nn.functional.dropout(y, 0.5, self.training)
        elif self.after == "in place":
            y += x
            return y
        return x + y if self.after != "skip last" else y + x


@pytest.mark.parametrize("after", ["skip first", "skip last", "norm", "scale", "in place"])
def test_a_later_block_makes_good_what_the_skip_connection_lacks(after: str) -> None:
    dense = Lost(after).eval()
    x = torch.randn(80, 4, dtype=torch.float64)
    keep = {"up1": [1], "up2": [0, 1]}  # what is lost with unit 0 of the first block is still in the second one
    aimed = ispasp.prune(dense, [x], keep, ridge=SHARP, progress=False)
    local = ispasp.prune(dense, [x], keep, compensate="local", ridge=SHARP, progress=False)
    assert_close(output(aimed.model, x), output(dense, x), rtol=0, atol=1e-6)
    assert (output(local.model, x) - output(dense, x)).abs().max() > 0.5


def test_every_layer_may_be_refitted_from_the_first_pruned_one_on() -> None:
    """A consumer that loses nothing makes good what others have lost."""
    dense = Lost("skip first").eval()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), dense, nn.Linear(4, 3, bias=False)).double()
    x = torch.randn(80, 4, dtype=torch.float64)
    torch.nn.init.eye_(model[0].weight)
    options = {"keep": {"1.up1": [1]}, "ridge": SHARP, "progress": False}
    result = ispasp.prune(model, [x], refit="all", **options)
    assert_close(output(result.model, x), output(model, x), rtol=0, atol=1e-6)
    assert torch.equal(result.model[0].weight, model[0].weight)  # comes before anything is pruned
    assert result.model[0].bias is None
    bare = ispasp.prune(model, [x], refit="consumers", **options)
    assert (output(bare.model, x) - output(model, x)).abs().max() > 0.5


def test_a_layer_that_loses_nothing_may_gain_a_bias(tmp_path: Path) -> None:
    def build(seed: int = 0) -> nn.Module:
        return alive(mlp(5, 16, 12, 3, bias=False), seed)

    x = torch.randn(100, 5, dtype=torch.float64)
    result = ispasp.prune(build(), [x], {"0": 0.5}, refit="all", bias="add", ridge=1e-4, progress=False)
    assert all(isinstance(result.model[k].bias, nn.Parameter) for k in (2, 4))
    assert result.model[0].bias is None
    assert result.cost.params == sum(p.numel() for p in result.model.parameters())
    ispasp.save(result, tmp_path)
    assert torch.equal(output(ispasp.load(tmp_path, build(1)), x), output(result.model, x))
    bare = ispasp.prune(build(), [x], {"0": 0.5}, refit="consumers", progress=False)
    auto = ispasp.prune(build(), [x], {"0": 0.5}, refit="all", progress=False).model
    assert isinstance(auto[2].bias, nn.Parameter) and auto[4].bias is None  # the last reads no pruned units
    left, more = ((output(r.model, x) - output(build(), x)).norm() for r in (result, bare))
    assert left < more


def test_a_consumer_that_loses_nothing_is_not_touched() -> None:
    torch.manual_seed(0)
    dense = Lost("skip first").eval()
    x = torch.randn(80, 4, dtype=torch.float64)
    result = ispasp.prune(dense, [x], {"up1": [1]}, refit="consumers", progress=False)
    assert torch.equal(result.model.down2.weight, dense.down2.weight)
    assert not torch.equal(result.model.down1.weight, dense.down1.weight[:, 1:])


def test_an_output_that_the_norm_switches_off_is_left_alone() -> None:
    dense = Lost("norm").eval()
    dense.norm.weight.data[2] = 0.0
    x = torch.randn(80, 4, dtype=torch.float64)
    result = ispasp.prune(dense, [x], {"up1": [1], "up2": [0, 1]}, progress=False)
    assert all(torch.isfinite(t).all() for t in result.model.state_dict().values() if t.is_floating_point())
    assert result.model.down2.weight.detach().abs().max() < 100


def test_errors_of_earlier_layers_are_corrected() -> None:
    """The second layer sees inputs that the first has changed; only the dense target knows what they were."""
    dense = alive(mlp(5, 16, 12, 3), seed=4)
    x = torch.randn(400, 5, dtype=torch.float64)
    left = {}
    for compensate in (None, "local", "dense"):
        result = ispasp.prune(dense, [x], 0.5, compensate=compensate, progress=False)
        left[compensate] = float((output(result.model, x) - output(dense, x)).norm() / output(dense, x).norm())
    assert left["dense"] < left["local"] < left[None]


@pytest.mark.parametrize(("compensate", "refit"), [("dense", "all"), ("local", "consumers"), (None, "consumers")])
def test_by_default_all_layers_are_refitted_to_the_dense_network(compensate: Any, refit: Any) -> None:
    x = torch.randn(60, 5, dtype=torch.float64)
    options = {"keep": {"0": 0.5}, "compensate": compensate, "progress": False}
    result = ispasp.prune(alive(mlp(5, 16, 12, 3)), [x], **options)
    asked = ispasp.prune(alive(mlp(5, 16, 12, 3)), [x], refit=refit, **options)
    assert result.settings["refit"] == refit
    assert torch.equal(output(result.model, x), output(asked.model, x))
