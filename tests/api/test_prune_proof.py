"""The proof that removing equals masking: it holds, and it would notice if it did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ispasp
import ispasp._prune as module
from ispasp.surgery.remove import Undo
from ispasp.types.plan import Plan
from support.naive import Written
from support.nets import ResNet, alive
from support.written import NETWORKS

IMAGES = [torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)]
remove_ = module.remove_


def other_units(model: nn.Module, plan: Plan, undo: Undo, *rest: Any) -> None:
    """Cut away other units than those that were decided, everywhere alike."""
    units = plan.structure.units["layer1.1.conv1"]
    moved = tuple(sorted((unit + 1) % units for unit in plan.kept["layer1.1.conv1"]))
    remove_(model, replace(plan, kept={**plan.kept, "layer1.1.conv1": moved}), undo, *rest)


def one_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def damaged(model: nn.Module, plan: Plan, undo: Undo, *rest: Any) -> None:
        remove_(model, plan, undo, *rest)
        tensor = model.get_submodule(name.rpartition(".")[0]).state_dict(keep_vars=True)[name.rpartition(".")[2]]
        data = tensor.data
        undo.callback(lambda: setattr(tensor, "data", data))
        tensor.data = change(data)

    return damaged


SABOTAGE: dict[str, Callable[..., None]] = {
    "other units": other_units,
    "filters in another order": one_tensor("layer1.1.conv1.weight", lambda w: w.roll(1, 0)),
    "consumer reads other filters": one_tensor("layer1.1.conv2.weight", lambda w: w.roll(1, 1)),
    "statistics of other channels": one_tensor("layer1.1.bn1.running_mean", lambda m: m.roll(1)),
    "weights not compensated": one_tensor("layer1.1.conv2.weight", lambda w: w * 1.001),
    "shift not absorbed": one_tensor("layer1.1.bn2.running_mean", lambda m: m + 1e-3),
    "not a number": one_tensor("layer1.1.bn2.running_var", lambda v: v * torch.nan),
}


@pytest.mark.parametrize("how", SABOTAGE)
def test_wrong_surgery_is_noticed_and_taken_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = alive(ResNet(small=True))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sizes = {name: vars(m).get("out_channels") for name, m in model.named_modules()}
    monkeypatch.setattr(module, "remove_", SABOTAGE[how])
    with pytest.raises(
        ispasp.errors.SurgeryError, match=r"removing units does not equal masking them .*the model is as it was"
    ):
        ispasp.prune_(model, IMAGES, progress=False)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert sizes == {name: vars(m).get("out_channels") for name, m in model.named_modules()}
    monkeypatch.undo()
    assert ispasp.prune_(model, IMAGES, progress=False).verified < 1e-12


def test_the_guilty_dimension_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "remove_", SABOTAGE["consumer reads other filters"])
    with pytest.raises(ispasp.errors.SurgeryError, match=r"pass skip=\['layer1.1.conv1'\]"):
        ispasp.prune(alive(ResNet(small=True)), IMAGES, progress=False)


@pytest.mark.parametrize("name", NETWORKS)
def test_certificates_are_rounding_errors(name: str) -> None:
    net: Written = NETWORKS[name]
    result = ispasp.prune(net.build().float(), [x.float() for x in net.batches()[:1]], progress=False, **net.options)
    assert result.verified < 1e-5
    assert max(layer.certificate for layer in result.layers) < 1e-5
    assert len(result.layers) == len(net.names)


class Autoencoder(nn.Module):
    """The weight of one layer is used a second time by hand, and layers are called where nothing is pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(self.b(self.b(x))))
        return self.b(F.linear(h, self.a.weight.T))


def test_certificates_belong_to_the_right_call(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, x = alive(Autoencoder()), torch.randn(5, 6, dtype=torch.float64)
    result = ispasp.prune(dense, [x], compensate=None, progress=False)
    assert [layer.name for layer in result.layers] == ["a"]
    assert result.layers[0].certificate < 1e-12
    assert "Infinity" not in result.to_json()


def test_a_certificate_sees_what_the_output_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer whose output hardly matters is compared by itself."""

    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + 1e-15 * self.b(torch.relu(self.a(x)))

    def damaged(model: nn.Module, plan: Plan, undo: Undo, *rest: Any) -> None:
        remove_(model, plan, undo, *rest)
        model.b.weight.data = model.b.weight.data.roll(1, 1)

    monkeypatch.setattr(module, "remove_", damaged)
    with pytest.raises(ispasp.errors.SurgeryError, match=r"pass skip=\['a'\]"):
        ispasp.prune(alive(Faint()), [torch.randn(9, 6, dtype=torch.float64)], compensate=None, progress=False)
