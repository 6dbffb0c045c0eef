"""Layers that compute their weight in the forward are pruned as plain ones."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm

import ispasp
from ispasp.surgery.fold import SameConv2d, folded
from ispasp.types.plan import Plan


class StdConv2d(nn.Conv2d):
    """Weight standardisation with a gain for each filter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-6) * self.gain
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class SameStdConv2d(StdConv2d):
    """The same, padded by the size of its input."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for size, kernel, stride in ((x.shape[-1], self.kernel_size[1], self.stride[1]), (x.shape[-2], *self._rows)):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(functional.pad(x, pads))

    @property
    def _rows(self) -> tuple[int, int]:
        return self.kernel_size[0], self.stride[0]


class Attending(nn.Linear):
    """A weight that depends on the input."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * x.mean(), self.bias)


class Twice(nn.Linear):
    """Not one product."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * 2, self.bias) + functional.linear(x, self.weight)


def convolutional(layer: type[StdConv2d] = StdConv2d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        layer(3, 12, 3, padding=1 if layer is StdConv2d else 0, stride=2),
        nn.ReLU(),
        layer(12, 10, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 4),
    )


def linear(wrap: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(wrap(nn.Linear(6, 16)), nn.ReLU(), wrap(nn.Linear(16, 12)), nn.ReLU(), nn.Linear(12, 3))


IMAGES = torch.randn(16, 3, 9, 10, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
NETS: dict[str, tuple[Any, Tensor, tuple[str, ...]]] = {
    "standardised": (convolutional, IMAGES, ("0", "2")),
    "standardised, padded by size": (lambda: convolutional(SameStdConv2d), IMAGES, ("0", "2")),
    "spectral norm": (lambda: linear(parametrizations.spectral_norm), ROWS, ("0", "2")),
    "orthogonal": (lambda: linear(parametrizations.orthogonal), ROWS, ("0", "2")),
    "spectral norm, old": (lambda: linear(spectral_norm), ROWS, ("0", "2")),
}


@pytest.mark.parametrize("name", NETS)
def test_computed_weights_are_folded_and_pruned(name: str, tmp_path: Path) -> None:
    build, x, folded_layers = NETS[name]
    model = build()
    result = ispasp.prune(model, [x], keep=0.5, progress=False)
    assert [(layer.name, layer.kept) for layer in result.layers] == [(k, len(model[int(k)].weight) // 2) for k in "02"]
    assert result.plan.structure.folded == folded_layers
    assert result.verified < 1e-5
    assert type(result.model[2]) in (nn.Linear, nn.Conv2d, SameConv2d)
    assert sum(p.numel() for p in result.model.parameters()) == result.cost.params
    assert sum(p.numel() for p in model.parameters()) == result.cost.dense_params
    assert any("plain weight" in line for line in result.advice)
    ispasp.save(result, tmp_path)
    again = ispasp.load(tmp_path, build())
    assert torch.equal(again.eval()(x), result.model.eval()(x))


def test_survey_and_failed_surgery_leave_the_model_as_it_was() -> None:
    model = convolutional()
    before, layers = copy.deepcopy(model.state_dict()), list(model.modules())
    survey = ispasp.survey(model, IMAGES)
    assert [d.name for d in survey.dimensions] == ["0", "2"]
    assert survey.cost().dense_params == sum(p.numel() for p in model.parameters())

    def interrupt(_: nn.Module) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ispasp.prune_(model, [IMAGES], keep=0.5, evaluate=interrupt, progress=False)
    assert list(model.modules()) == layers
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_plan_folds_only_what_loses_units(verified: bool, known: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[StdConv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), StdConv2d(6, 6, 1), nn.ReLU()],
        *[parametrizations.spectral_norm(nn.Conv2d(6, 5, 1)), nn.ReLU(), nn.Conv2d(5, 2, 1)],
    ).eval()
    survey = ispasp.survey(model, IMAGES)
    assert survey.structure.folded == ("4", "6")
    plan = survey.plan({"2": [1, 2, 5]})
    assert plan.structure.folded == ("4",)
    untouched, plain = (model[0], model[6]), folded(model[4])
    assert plain is not None
    with torch.no_grad():
        expected = model[5:](plain(model[:4](IMAGES) * torch.tensor([0, 1, 1, 0, 0, 1]).view(6, 1, 1)))
    ispasp.apply_(model, plan, IMAGES if verified else None, checked_by=survey if known else None)
    assert (model[0], model[6]) == untouched
    assert type(model[4]) is nn.Conv2d and model[4].in_channels == 3
    assert torch.allclose(model(IMAGES), expected, atol=1e-6)


def test_what_is_understood_already_stays_computed() -> None:
    """Weight norm and masks of torch.nn.utils.prune need no folding."""
    model = linear(parametrizations.weight_norm)
    assert ispasp.survey(model, ROWS).structure.folded == ()
    masked = linear(lambda layer: nn.utils.prune.random_unstructured(layer, "weight", 0.3))
    assert ispasp.survey(masked, ROWS).structure.folded == ()


@pytest.mark.parametrize("layer", [Attending(6, 16), Twice(6, 16), nn.Linear(6, 16), nn.ReLU()])
def test_what_is_no_plain_layer_is_not_folded(layer: nn.Module) -> None:
    assert folded(layer) is None


def test_tied_weights_do_not_come_apart() -> None:
    model = nn.Sequential(StdConv2d(4, 4, 1, bias=False), nn.ReLU(), StdConv2d(4, 4, 1, bias=False), nn.Conv2d(4, 2, 1))
    model[2].weight = model[0].weight
    with pytest.raises(ispasp.errors.NothingToPruneError):
        ispasp.survey(model, torch.randn(2, 4, 3, 3))


def test_an_optimizer_of_replaced_parameters_is_refused() -> None:
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ispasp.errors.InputError, match="build it after pruning"):
        ispasp.prune_(model, [IMAGES], keep=0.5, optimizer=optimizer, progress=False)
    plan = ispasp.survey(model, IMAGES).plan(0.5)
    with pytest.raises(ispasp.errors.InputError, match="build it after pruning"):
        ispasp.apply_(model, plan, optimizer=optimizer)
    assert isinstance(model[0], StdConv2d)
    head = torch.optim.SGD(model[6].parameters(), lr=0.1)
    ispasp.apply_(model, plan, optimizer=head)


@pytest.mark.parametrize("path", ["", "nowhere", "1", "6.weight", "twice"])
def test_plans_that_fold_something_else_are_refused(path: str) -> None:
    model = convolutional()
    model.add_module("twice", Twice(4, 4))
    plan = ispasp.survey(model, IMAGES).plan(0.5)
    text = json.loads(plan.to_json())
    assert text["folded"] == ["0", "2"]
    text["folded"].append(path)
    with pytest.raises(ispasp.errors.PlanError):
        ispasp.apply_(model, Plan.from_json(json.dumps(text)))
    assert isinstance(model[0], StdConv2d) and isinstance(model[2], StdConv2d)
    with pytest.raises(ispasp.errors.PlanError):
        Plan.from_json(json.dumps({**text, "folded": [3]}))


def test_hooks_requires_grad_and_the_training_mode_are_kept() -> None:
    model = convolutional().train()
    model[2].requires_grad_(False)
    calls: list[int] = []
    handle = model[2].register_forward_hook(lambda *_: calls.append(1))
    ispasp.prune_(model, [IMAGES], keep=0.5, progress=False)
    assert all(module.training for module in model.modules())
    assert not model[2].weight.requires_grad and model[0].weight.requires_grad
    calls.clear()
    model(IMAGES)
    handle.remove()
    model(IMAGES)
    assert calls == [1]


def test_slim_attention_keeps_the_training_mode() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), nn.Linear(8, 2)).train()
    result = ispasp.prune(model, [torch.randn(8, 3, 8)], keep=0.5, progress=False)
    assert all(module.training for module in result.model.modules())


def test_training_between_layers_folds_and_saves(tmp_path: Path) -> None:
    model = convolutional()
    result = ispasp.prune(model, [IMAGES], keep=0.5, progress=False, finetune_between=lambda _: None)
    assert result.plan.structure.folded == ("0", "2")
    ispasp.save(result, tmp_path)
    assert torch.equal(ispasp.load(tmp_path, convolutional()).eval()(IMAGES), result.model.eval()(IMAGES))


def test_a_refit_of_all_layers_folds_what_it_rewrites(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), StdConv2d(6, 8, 1), nn.ReLU()]
    model = nn.Sequential(*layers, StdConv2d(8, 5, 1), nn.ReLU(), nn.Conv2d(5, 2, 1))
    result = ispasp.prune(copy.deepcopy(model), [IMAGES], keep={"0": 4}, refit="all", progress=False)
    assert set(result.plan.structure.folded) == {"4", "6"}
    assert sum(p.numel() for p in result.model.parameters()) == result.cost.params
    ispasp.save(result, tmp_path)
    again = ispasp.load(tmp_path, copy.deepcopy(model))
    assert torch.equal(again.eval()(IMAGES), result.model.eval()(IMAGES))


def test_a_layer_that_could_fold_may_stay_whole(tmp_path: Path) -> None:
    result = ispasp.prune(convolutional(), [IMAGES], keep={"2": 4}, compensate=None, progress=False)
    assert result.plan.structure.folded == ("2",)
    ispasp.save(result, tmp_path)
    assert torch.equal(ispasp.load(tmp_path, convolutional()).eval()(IMAGES), result.model.eval()(IMAGES))


def test_structure_names_only_layers_that_fold() -> None:
    structure = ispasp.survey(convolutional(), IMAGES).structure
    assert structure.folding(["2"]).folded == ("2",)
    assert structure.folding([], also=["0.weight"]).folded == ("0",)
    assert replace(structure, folded=()).folding(["2"]).folded == ()
