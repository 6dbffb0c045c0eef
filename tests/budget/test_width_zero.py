"""Width zero: hidden dimensions that go with all their units, and what then is left of a residual branch."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import ispasp
from ispasp.budget import Curve, allocate
from ispasp.budget.allocate import choices
from ispasp.errors import InputError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.surgery.empty import EmptyConv, EmptyNorm
from support.nets import Encoder, Inception, ResidualMLP, ResNet, alive, mlp

G = torch.Generator().manual_seed(0)
ROWS = torch.randn(48, 5, generator=G, dtype=torch.float64)
IMAGES = torch.randn(48, 3, 9, 9, generator=G, dtype=torch.float64)
TOKENS = torch.randn(48, 4, 12, generator=G, dtype=torch.float64)


class Mobile(nn.Module):
    """An inverted residual: a depthwise convolution between two of 1 x 1, and a branch with pooling inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.expand, self.norm1 = nn.Conv2d(6, 10, 1, bias=False), nn.BatchNorm2d(10)
        self.depth, self.norm2 = nn.Conv2d(10, 10, 3, padding="same", groups=10, bias=False), nn.BatchNorm2d(10)
        self.project = nn.Conv2d(10, 6, 1)
        self.up, self.down = nn.Conv2d(6, 8, 1), nn.Conv2d(8, 6, 1)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(torch.relu(self.norm2(self.depth(torch.relu(self.norm1(self.expand(x)))))))
        x = x + self.down(nn.functional.max_pool2d(torch.relu(self.up(x)), 3, 1, 1))
        return self.fc(x.mean((2, 3)))


class NormedMLP(ResidualMLP):
    """torch ends the process where it computes the weight norm of a layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.up[0])
        weight_norm(self.head)  # has no units


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


CASES: dict[str, tuple[type[nn.Module], Tensor, dict[str, int]]] = {
    "MLP": (ResidualMLP, ROWS, {"up.0": 0, "up.1": 4}),
    "ResNet": (ResNet, IMAGES, {"layer1.0.conv1": 0, "layer1.1.conv1": 0, "layer2.0.conv1": 5}),
    "depthwise": (Mobile, IMAGES, {"expand": 0, "up": 3}),
    "one of several that are read side by side": (Inception, IMAGES, {"one": 0, "reduce": 0}),
    "heads": (Encoder, TOKENS, {"attention.0": 0, "up.1": 0}),
    "torch's attention": (TorchAttention, TOKENS, {"attention": 0}),
}


@pytest.mark.parametrize("compensate", [None, "dense"])
@pytest.mark.parametrize(("net", "data", "keep"), CASES.values(), ids=list(CASES))
def test_a_branch_goes(
    net: type[nn.Module], data: Tensor, keep: dict[str, int], compensate: Any, tmp_path: Path
) -> None:
    dense = alive(net())
    result = ispasp.prune(dense, [data], keep, compensate=compensate, progress=False)
    assert {row.name: row.kept for row in result.layers} == keep
    assert result.evidence.holds
    assert not result.evidence.unproved
    model = result.model
    assert result.cost.params == sum(p.numel() for p in model.parameters())
    ispasp.save(result, tmp_path)
    loaded = ispasp.load(tmp_path, alive(net()))
    assert torch.equal(loaded.eval()(data), model.eval()(data))
    applied = ispasp.apply_(copy.deepcopy(dense), ispasp.Plan.from_json(result.plan.to_json()), data[:2])
    with ispasp.mask(dense, result.plan, data[:2]) as masked:
        torch.testing.assert_close(applied(data), masked(data))
    model.train()(data).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())


def test_compensation_leaves_the_mean_of_what_goes() -> None:
    dense = alive(ResidualMLP())
    plain, fitted = (
        ispasp.prune(dense, [ROWS], {"up.1": 0}, compensate=how, hold_out=False, progress=False).model
        for how in (None, "dense")
    )
    expected = dense(ROWS)
    assert (fitted(ROWS) - expected).square().mean() < 0.9 * (plain(ROWS) - expected).square().mean()
    torch.testing.assert_close(fitted(ROWS).mean(0), expected.mean(0))


def test_layers_of_width_zero_can_be_copied_saved_whole_and_pruned_again(tmp_path: Path) -> None:
    dense = alive(ResNet())
    result = ispasp.prune(dense, [IMAGES], {"layer1.1.conv1": 0}, progress=False)
    block = result.model.get_submodule("layer1.1")
    assert isinstance(block.conv1, EmptyConv)
    assert isinstance(block.bn1, EmptyNorm)
    assert isinstance(block.conv1, nn.Conv2d)
    assert torch.equal(copy.deepcopy(result.model)(IMAGES), result.model(IMAGES))
    again = ispasp.prune(result.model, [IMAGES], 0.5, progress=False)
    assert "layer1.1.conv1" not in again.plan.kept
    ispasp.save(again, tmp_path)
    assert torch.equal(ispasp.load(tmp_path, alive(ResNet())).eval()(IMAGES), again.model(IMAGES))
    assert type(dense.get_submodule("layer1.1.conv1")) is nn.Conv2d


@pytest.mark.parametrize(
    ("net", "data", "keep", "message"),
    [
        (lambda: mlp(5, 9, 3), ROWS, {"0": 0}, "'0' cannot go entirely: without it the output .* would not depend"),
        (Mobile, IMAGES, {"up": 0}, "'up' cannot go entirely: Expected 3D or 4D"),
        (NormedMLP, ROWS, {"up.0": 0}, "'up.0' cannot go entirely: torch cannot compute"),
        (ResidualMLP, ROWS, {"*": 0}, "keep=0 would leave every hidden dimension without units"),
    ],
)
def test_what_cannot_go_is_refused(net: Any, data: Tensor, keep: dict[str, int], message: str) -> None:
    dense = alive(net())
    before = copy.deepcopy(dense.state_dict())
    with pytest.raises(InputError, match=message):
        ispasp.prune_(dense, [data], keep, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())


def test_a_cache_counts_its_tokens_at_the_first_attention() -> None:
    pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    import_torchvision()
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 40, (34, 9), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=r"'model.layers.0.self_attn' cannot go entirely: the cache"):
        ispasp.prune(llama, [{"input_ids": ids}], {"model.layers.0.self_attn": 0}, progress=False)
    keep = {"model.layers.1.self_attn": 0, "model.layers.0.mlp.gate_proj": 0}
    small = ispasp.prune(llama, [{"input_ids": ids}], keep, progress=False).model
    told = [small.generate(ids[:1], max_new_tokens=5, do_sample=False, use_cache=each) for each in (True, False)]
    assert torch.equal(*told)


def test_a_budget_lets_a_useless_branch_go() -> None:
    dense = alive(ResNet())
    with torch.no_grad():
        dense.get_submodule("layer1.1.bn2").weight.mul_(1e-3)
    options: dict[str, Any] = {"keep": ispasp.Macs(0.6), "skip": ["conv1"], "progress": False}
    one, none = (ispasp.prune(dense, [IMAGES], least=least, **options) for least in (1, 0))
    assert len(one.plan.kept["layer1.1.conv1"]) >= 1
    assert none.plan.kept["layer1.1.conv1"] == ()
    assert none.cost.macs <= 0.6 * none.cost.dense_macs
    assert none.curves["layer1.1.conv1"][0][0] == 0


def test_a_budget_out_of_reach_says_so_in_one_sentence() -> None:
    dense = alive(ResNet())
    limit = ispasp.survey(dense, IMAGES).cost().dense_macs // 3
    with pytest.raises(InputError, match="out of reach: with every hidden dimension as narrow as allowed"):
        ispasp.prune(dense, [IMAGES], ispasp.Macs(limit // 40), least=0, progress=False)
    with pytest.raises(InputError, match="least=-1: pass a number of units"):
        ispasp.prune(dense, [IMAGES], ispasp.Macs(0.5), least=-1)


def test_a_budget_leaves_a_unit_in_a_weight_norm() -> None:
    result = ispasp.prune(alive(NormedMLP()), [ROWS], ispasp.Params(0.3), least=0, progress=False)
    assert result.plan.kept["up.0"]
    assert result.cost.params <= 0.3 * result.cost.dense_params


def test_curves_may_begin_at_no_units() -> None:
    curve = Curve((0, 8, 20), (1.0, 0.1, 0.0))
    assert choices(curve, round_to=8).widths.tolist() == [0, 8, 16, 20]
    other = Curve((1, 20), (50.0, 0.0))
    assert allocate({"a": curve, "b": other}, lambda w: w["a"] + w["b"], 20) == {"a": 0, "b": 20}
    assert allocate({"a": curve, "b": other}, lambda w: w["a"] + w["b"], 21, least={"a": 1}) == {"a": 1, "b": 20}


@pytest.mark.long
def test_convolutions_of_width_zero_run_in_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs pip install 'ispasp[onnx]'")
    pytest.importorskip("onnxscript", reason="needs pip install 'ispasp[onnx]'")
    dense = alive(ResNet()).float()
    result = ispasp.prune(dense, [IMAGES.float()], {"layer1.1.conv1": 0}, progress=False)
    assert ispasp.export_onnx(result.model, IMAGES[:2].float(), tmp_path / "small.onnx") < 1e-4
