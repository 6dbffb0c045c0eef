"""Compensation knows no scale: data a thousand times as large lead to the same network."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ispasp
from support.nets import alive, mlp


@pytest.mark.parametrize("factor", [1000.0, 1e-3])
@pytest.mark.parametrize("compensate", ["local", "dense"])
def test_scaled_inputs(compensate: str, factor: float) -> None:
    def build() -> nn.Sequential:
        model = alive(mlp(6, 12, 10, 3))
        for layer in model[::2]:
            layer.bias.data.zero_()  # the network is homogeneous
        return model

    x = torch.randn(100, 6, dtype=torch.float64)
    one = ispasp.prune(build(), [x], compensate=compensate, progress=False)
    many = ispasp.prune(build(), [factor * x], compensate=compensate, progress=False)
    assert one.plan.kept == many.plan.kept
    for a, b in zip(one.layers, many.layers, strict=True):
        assert b.relative_error == pytest.approx(a.relative_error, rel=1e-6)
    for key, value in one.model.state_dict().items():
        expected = factor * value if key.endswith("bias") else value
        assert_close(many.model.state_dict()[key], expected, rtol=1e-6, atol=1e-8 * float(expected.abs().max()))
