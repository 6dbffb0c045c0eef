"""ThiNet's scale of the kept units: applied where nothing else compensates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from ispasp.compensate import refit
from ispasp.select import ThiNet


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))


def conv() -> nn.Sequential:
    first = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
    return nn.Sequential(*first, nn.Conv2d(12, 5, 3, bias=False), nn.BatchNorm2d(5))


def transposed() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 5, 2, stride=2))


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))


def made(make: Callable[[], nn.Sequential]) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, 6) if make in (mlp, deep) else torch.randn(8, 3, 7, 7)
    return make().double().eval(), x.double()


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
@pytest.mark.parametrize("make", [mlp, conv, transposed, deep])
def test_the_scale_makes_the_error_smaller(make: Callable[[], nn.Sequential], order: str) -> None:
    model, x = made(make)
    options: dict[str, Any] = {"keep": 0.5, "compensate": None, "order": order, "progress": False}
    plain = ispasp.prune(model, [x], method=ThiNet(rescale=False), **options)
    scaled = ispasp.prune(model, [x], method="thinet", **options)
    assert scaled.layers[0].kept == plain.layers[0].kept
    errors = [result.layers[0].relative_error for result in (scaled, plain)]
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[0] < errors[1]
    far = [(result.model(x) - model(x)).norm().item() for result in (scaled, plain)]
    assert far[0] < far[1]
    assert scaled.verified < 1e-9


@pytest.mark.parametrize("compensate", ["local", "dense"])
def test_compensation_needs_no_scale(compensate: str) -> None:
    model, x = made(conv)
    options: dict[str, Any] = {"keep": 0.5, "compensate": compensate, "progress": False}
    one, other = (ispasp.prune(model, [x], method=ThiNet(rescale=flag), **options).model for flag in (True, False))
    for key, value in one.state_dict().items():
        assert value.equal(other.state_dict()[key]), key


def test_the_scale_is_that_of_least_squares() -> None:
    model, x = made(mlp)
    result = ispasp.prune(model, [x], keep=4, method="thinet", compensate=None, hold_out=False, progress=False)
    kept = list(result.plan.kept["0"])
    H, W = model[:2](x).detach(), model[2].weight.detach()
    parts = torch.stack([(H[:, [i]] * W[:, i]).flatten() for i in range(16)], 1)  # what each unit adds to the outputs
    w = torch.linalg.lstsq(parts[:, kept], parts.sum(1)[:, None]).solution.flatten()
    assert_close(result.model.get_parameter("2.weight"), W[:, kept] * w, rtol=1e-4, atol=1e-6)


def test_running_out_of_memory_after_the_scale_does_not_scale_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(deep)
    options: dict[str, Any] = {"keep": 0.5, "method": "thinet", "compensate": None, "progress": False}
    expected = ispasp.prune(model, [x], **options).model.state_dict()
    left = [1]
    squared = refit._squared

    def full(values: Tensor) -> float:
        if len(seen) == 2 and left:  # what is lost before, then what is lost with the scale
            left.pop()
            raise MemoryError
        seen.append(values)
        return squared(values)

    seen: list[Tensor] = []
    monkeypatch.setattr(refit, "_squared", full)
    found = ispasp.prune(model, [x], **options).model.state_dict()
    assert not left
    for key, value in expected.items():
        assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=key)
