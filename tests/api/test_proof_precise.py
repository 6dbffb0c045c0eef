"""The proof in float64: half precision, and refits that amplify rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ispasp
import ispasp._prune as module
from ispasp.surgery.remove import Undo
from ispasp.types.plan import Plan

remove_ = module.remove_


class Wide(nn.Module):
    """512 units; casts to float32 and back in its forward, as norms of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 512), nn.Linear(512, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.relu(self.a(x)))
        wide = y.to(torch.float32)
        return self.c((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(y.dtype))


def swapped(model: nn.Module, plan: Plan, undo: Undo, *rest: Any) -> None:
    """Surgery that exchanges two of 256 units at the consumer: hardly more than rounding in bfloat16."""
    remove_(model, plan, undo, *rest)
    weight = model.b.weight.data
    undo.callback(lambda: setattr(model.b.weight, "data", weight))
    order = torch.arange(weight.shape[1])
    order[:2] = torch.tensor([1, 0])
    model.b.weight.data = weight[:, order]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compensate", [None, "dense"])
def test_a_wrong_unit_is_found_in_half_precision(
    dtype: torch.dtype, compensate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Wide().to(dtype), torch.randn(64, 16).to(dtype)
    result = ispasp.prune(model, [x], {"a": 0.5}, compensate=compensate, progress=False)
    assert result.evidence.precise is not None
    assert result.evidence.precise < 1e-9
    assert all(p.dtype == dtype for p in result.model.parameters())
    monkeypatch.setattr(module, "remove_", swapped)
    with pytest.raises(ispasp.errors.SurgeryError, match="does not equal masking"):
        ispasp.prune(model, [x], {"a": 0.5}, compensate=compensate, progress=False)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Normed(nn.Module):
    """128 units behind a BatchNorm: every kind of tensor that surgery cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 128), nn.BatchNorm1d(128), nn.Linear(128, 16)
        with torch.no_grad():
            for value in (self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var):
                value.add_(0.3 * torch.rand_like(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


def one_wrong_index(name: str, axis: int) -> Any:
    """Surgery that takes a removed unit in place of the first kept one, in one tensor only."""

    def damaged(model: nn.Module, plan: Plan, undo: Undo, *rest: Any) -> None:
        dense = model.state_dict()[name].clone()
        remove_(model, plan, undo, *rest)
        gone = next(unit for unit in range(128) if unit not in plan.kept["a"])
        model.state_dict()[name].select(axis, 0).copy_(dense.select(axis, gone))

    return damaged


def normed(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Normed().to(dtype).eval(), torch.randn(64, 16).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_surgery_is_proved(dtype: torch.dtype) -> None:
    model, x = normed(dtype)
    assert ispasp.prune(model, [x], 0.75, progress=False).evidence.holds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "axis"),
    [("a.weight", 0), ("a.bias", 0), ("b.weight", 1), ("norm.weight", 0), ("norm.bias", 0), ("norm.running_mean", 0),
     ("norm.running_var", 0)],
)  # fmt: skip
def test_one_wrong_index_in_any_tensor_is_found(
    dtype: torch.dtype, name: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = normed(dtype)
    monkeypatch.setattr(module, "remove_", one_wrong_index(name, axis))
    with pytest.raises(ispasp.errors.SurgeryError, match="does not equal masking"):
        # units that are silent on the two examples of the proof can prove nothing: this method keeps loud ones
        ispasp.prune(model, [x], 0.75, method="ispasp", progress=False)


def test_half_precision_that_float64_cannot_check_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Normed().bfloat16().eval(), torch.randn(200, 16).bfloat16()
    assert "half precision" not in " ".join(ispasp.prune(model, [x], 0.75, progress=False).advice)
    monkeypatch.setattr("ispasp._proof._precise", lambda *_: None)
    advice = ispasp.prune(model, [x], 0.75, progress=False).advice
    assert any("compared in half precision only" in text for text in advice)


class Difference(nn.Module):
    """The last layer's outputs cancel to 1e-6 of what they are sums of: float32 has nothing left."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        y = self.b(h) + 1e6
        return y - 1e6


def test_rounding_that_is_amplified_is_no_wrong_surgery(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Difference(), torch.randn(64, 16)
    noisy = ispasp.prune(model, [x], 0.5, compensate=None, progress=False)
    assert noisy.evidence.holds
    monkeypatch.setattr(module, "remove_", swapped)
    with pytest.raises(ispasp.errors.SurgeryError, match="does not equal masking"):
        ispasp.prune(model, [x], 0.5, compensate=None, progress=False)


def test_an_ill_conditioned_refit_is_accepted_with_advice() -> None:
    """Six layers refitted to 40 examples with hardly any ridge: weights explode, and with them rounding."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model, x = nn.Sequential(*layers, nn.Linear(64, 4)), torch.randn(34, 64)
    result = ispasp.prune(model, [x], 0.5, ridge=1e-12, progress=False)
    assert result.evidence.holds
    assert result.evidence.precise is None or any("rounding is amplified" in line for line in result.advice)


def test_the_model_is_as_before_if_even_float64_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(64, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(module, "remove_", swapped)
    with pytest.raises(ispasp.errors.SurgeryError, match="does not equal masking"):
        ispasp.prune_(model, [x], {"a": 0.5}, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_attention_that_is_swapped_agrees_in_half_precision() -> None:
    """The swapped attention projects (examples, positions), torch's own (positions, examples)."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(3, 8), nn.Linear(8, 4)
            self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.stem(x)
            return self.head(self.attention(h, h, h)[0])

    torch.manual_seed(0)
    model, x = Attend().to(torch.bfloat16), torch.randn(2, 6, 3, dtype=torch.bfloat16)
    result = ispasp.prune(model, [x], {"stem": 6}, compensate=None, progress=False)
    assert result.model.stem.out_features == 6
    assert result.evidence.precise is not None
    assert result.evidence.precise < 1e-12


def test_products_without_a_layer_agree_in_half_precision() -> None:
    """What an einsum makes cannot be cut like a layer's outputs; the outputs of the model are compared."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(6, 8))
            self.b, self.c = nn.Parameter(torch.randn(8, 10)), nn.Parameter(torch.randn(10, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(torch.einsum("nti,io->nto", x, self.a))
            return torch.relu(torch.einsum("nti,io->nto", h, self.b)) @ self.c

    torch.manual_seed(0)
    model, x = Products().to(torch.bfloat16), torch.randn(2, 5, 6, dtype=torch.bfloat16)
    result = ispasp.prune(model, [x], 0.5, compensate=None, progress=False)
    assert (result.model.a.shape, result.model.b.shape) == ((6, 4), (4, 5))
    assert result.evidence.precise is not None
    assert result.evidence.precise < 1e-12
