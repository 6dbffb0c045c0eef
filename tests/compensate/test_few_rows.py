"""Where rows are few, the refit works in the directions that they span, and gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ispasp
from ispasp.engine.sites import Positions
from ispasp.types import LinearConsumer
from support.nets import alive

NETS = {
    "linear": (lambda: [nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 5)], (6,)),
    "without a bias": (lambda: [nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 5, bias=False)], (6,)),
    "conv": (lambda: [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 6, 3)], (3, 5, 5)),
    "groups": (lambda: [nn.Conv2d(3, 128, 1), nn.ReLU(), nn.Conv2d(128, 6, 3, groups=2)], (3, 3, 3)),
    "norm": (lambda: [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 6, 3, bias=False), nn.BatchNorm2d(6)], (3, 5, 5)),
}


@pytest.mark.parametrize("examples", [(1,), (3,), (9, 8, 5)])
@pytest.mark.parametrize("ridge", ["auto", 1e-3])
@pytest.mark.parametrize("kind", NETS)
def test_few_rows_give_the_fit_of_the_normal_equations(
    kind: str, ridge: Any, examples: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, shape = NETS[kind]
    torch.manual_seed(0)
    net, data = alive(nn.Sequential(*build())), [torch.randn(n, *shape, dtype=torch.float64) for n in examples]
    few: list[bool] = []
    rule = Positions.few

    def noted(*given: Any) -> bool:
        few.append(rule(*given))
        return few[-1]

    options: dict[str, Any] = {"keep": 0.9, "ridge": ridge, "method": "l1", "progress": False}
    monkeypatch.setattr(Positions, "few", noted)
    found = ispasp.prune(net, data, **options)
    assert few[-1]
    monkeypatch.setattr(Positions, "few", lambda *_: False)
    expected = ispasp.prune(net, data, **options)
    for key, value in expected.model.state_dict().items():
        assert_close(found.model.state_dict()[key], value, rtol=1e-6, atol=1e-8)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert a.uncompensated_error == pytest.approx(b.uncompensated_error, rel=1e-6)
        assert a.relative_error == pytest.approx(b.relative_error, rel=1e-4, abs=1e-6)
        assert (a.held_out_error or 0.0) == pytest.approx(b.held_out_error or 0.0, rel=1e-4)


def test_half_precision_is_rounded_to_what_the_network_holds() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 5)).bfloat16()
    result = ispasp.prune(net, [torch.randn(12, 6).bfloat16()], 0.5, progress=False)
    (layer,) = result.layers
    assert layer.relative_error < layer.uncompensated_error
    assert {p.dtype for p in result.model.parameters()} == {torch.bfloat16}


def test_rows_are_few_only_where_nobody_else_has_some() -> None:
    A, H = LinearConsumer(torch.ones(2, 1000)), torch.ones(8, 1000)
    assert Positions("auto", 200, alone=True).few(A, H, 1000)
    assert not Positions("auto", 200).few(A, H, 1000)  # other ranks have examples
    assert not Positions("auto", 300, alone=True).few(A, H, 1000)
    assert not Positions("auto", 10, alone=True).few(A, H, 200)  # a narrow layer is fitted fast anyway
