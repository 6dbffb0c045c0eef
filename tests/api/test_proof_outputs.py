"""The proof compares outputs of every kind, and says where there was nothing to compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ispasp
import ispasp._prune as module
from ispasp.surgery.remove import Undo
from ispasp.surgery.verify import compare
from ispasp.types.plan import Plan

remove_ = module.remove_
X = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))

OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "floats": lambda y: y,
    "doubles": lambda y: y.double(),
    "complex": lambda y: torch.complex(y, y + 1),
    "integers": lambda y: (y * 1000).long(),
    "classes": lambda y: y.argmax(-1),
    "booleans": lambda y: y > 0,
    "none": lambda y: None,
    "a constant": lambda y: torch.ones(3),
    "not numbers": lambda y: y * math.nan,
    "minus infinity": lambda y: torch.full_like(y, -math.inf),
}


class Gated(nn.Module):
    """What lies behind the gate reads zeros; `functional` consumers are no layers that could be watched."""

    def __init__(self, output: Callable[[Tensor], Any], gate: float = 0.0, *, functional: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12), nn.Linear(12, 3)
        self.gate = nn.Parameter(torch.full((1,), gate))
        self.output, self.functional = output, functional

    def forward(self, x: Tensor) -> Any:
        x = self.gate * self.b(F.relu(self.a(x)))
        h = F.relu(self.c(x))
        return self.output(h @ self.d.weight.T + self.d.bias if self.functional else self.d(h))


def rolled(model: nn.Module, plan: Plan, undo: Undo, *rest: Any) -> None:
    """Surgery whose last consumer reads other units than it should."""
    remove_(model, plan, undo, *rest)
    weight = model.d.weight.data
    undo.callback(lambda: setattr(model.d.weight, "data", weight))
    model.d.weight.data = weight.roll(1, 1)


@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_wrong_surgery_is_found_whatever_the_output(kind: str, gate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Gated(OUTPUTS[kind], gate)
    result = ispasp.prune(model, [X], {"c": 6}, progress=False)
    assert not result.unproved
    assert result.verified < 1e-5
    assert result.layers[0].certificate is not None
    monkeypatch.setattr(module, "remove_", rolled)
    with pytest.raises(ispasp.errors.SurgeryError, match="does not equal masking"):
        ispasp.prune(model, [X], {"c": 6}, progress=False)


@pytest.mark.parametrize("kind", ["floats", "complex", "doubles"])
def test_consumers_that_are_no_layers_are_seen_in_the_output(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Gated(OUTPUTS[kind], functional=True)
    assert not ispasp.prune(model, [X], {"c": 6}, progress=False).unproved
    monkeypatch.setattr(module, "remove_", rolled)
    with pytest.raises(ispasp.errors.SurgeryError, match="does not equal masking"):
        ispasp.prune(model, [X], {"c": 6}, progress=False)


@pytest.mark.parametrize("kind", ["none", "a constant", "not numbers", "minus infinity"])
def test_what_cannot_be_proved_is_said(kind: str) -> None:
    torch.manual_seed(0)
    result = ispasp.prune(Gated(OUTPUTS[kind], functional=True), [X], {"c": 6}, progress=False)
    assert list(result.unproved) == ["c"]
    assert result.layers[0].certificate is None
    assert "not proved" in str(result)
    assert '"unproved": {"c"' in result.to_json()


def test_the_gate_is_put_back() -> None:
    model = Gated(OUTPUTS["floats"])
    gate = model.gate
    ispasp.prune_(model, [X], {"c": 6}, progress=False)
    assert model.gate is gate
    assert model.gate.tolist() == [0.0]


def test_surgery_alone_says_what_it_cannot_prove() -> None:
    model = Gated(OUTPUTS["none"], functional=True)
    plan = ispasp.survey(model, X).plan({"c": 6})
    with pytest.warns(UserWarning, match="c: not proved"):
        ispasp.apply_(model, plan, X)


def test_a_float32_model_that_ends_in_float64_is_not_refused() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).double()

    result = ispasp.prune(Ending(), [X], 0.5, progress=False)
    assert 1e-9 < result.verified < 1e-4


@pytest.mark.parametrize(
    ("found", "expected", "error", "entries"),
    [
        ([torch.tensor([math.nan, 1.0])], [torch.tensor([math.nan, 1.0])], 0.0, 1),
        ([torch.tensor([math.nan, 1.0])], [torch.tensor([math.inf, 1.0])], math.inf, 0),
        ([torch.tensor([-math.inf])], [torch.tensor([math.inf])], math.inf, 0),
        ([torch.tensor([-math.inf])], [torch.tensor([-math.inf])], 0.0, 0),
        ([torch.tensor([1, 2])], [torch.tensor([1, 3])], 0.5, 2),
        ([torch.tensor([True])], [torch.tensor([True])], 0.0, 0),
        ([torch.tensor([1j])], [torch.tensor([-1j])], 2.0, 2),
        ([torch.tensor([1.0])], [torch.tensor([1])], math.inf, 0),
        ([torch.zeros(2)], [torch.zeros(2)], 0.0, 0),
        ([torch.zeros(2)], [torch.zeros(3)], math.inf, 0),
    ],
)
def test_comparing(found: list[Tensor], expected: list[Tensor], error: float, entries: int) -> None:
    outcome = compare(found, expected)
    assert (max(outcome.error, outcome.flipped), outcome.entries) == (error, entries)


def test_comparisons_that_rounding_flips_are_not_held_against_surgery() -> None:
    """All outputs are zero up to rounding, so that their signs are noise; the layers themselves agree."""

    class Signs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = nn.Linear(8, 16), nn.Linear(16, 40), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(F.relu(self.a(x)))
            return (y - y.flip(0).flip(0).mul(3).div(3)) > 0

    torch.manual_seed(0)
    result = ispasp.prune(Signs(), [X], 0.5, progress=False)
    assert result.verified < 1e-5


def test_hooks_that_change_a_consumer_are_part_of_the_model() -> None:
    torch.manual_seed(0)
    model = Gated(OUTPUTS["floats"], gate=1.0)
    model.d.register_forward_hook(lambda module, args, output: output * 2 + 1)
    result = ispasp.prune(model, [X], 0.5, progress=False)
    assert result.verified < 1e-5
