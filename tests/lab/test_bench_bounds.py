"""Bounds on the change of the output: they hold, and where they are exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ispasp_lab.benchmarks import bounds
from ispasp_lab.models import CifarResNet


def test_with_one_hidden_dimension_all_bounds_are_the_change_itself() -> None:
    (row,) = bounds.run(["two layers"], keep=0.5, images=8)
    assert row.dimensions == 1
    assert row.measured > 0.05
    for bound in (row.telescoped, row.norms, row.local):
        assert bound == pytest.approx(row.measured, rel=1e-5)


@pytest.mark.parametrize("name", ["four layers", "eight layers"])
def test_bounds_hold_and_grow_looser_with_depth(name: str) -> None:
    (row,) = bounds.run([name], keep=0.75, images=8)
    assert row.measured <= row.telescoped * (1 + 1e-6)
    assert row.telescoped <= row.norms * (1 + 1e-6)
    assert row.norms > 3 * row.measured


def test_bounds_hold_on_a_residual_network() -> None:
    torch.manual_seed(0)
    model, x = CifarResNet(8).eval(), torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.uniform_(0.5, 2.0)
                module.weight.normal_()
    row = bounds.measured("resnet8", model, x, bounds.behind_in_resnet, 0.5)
    assert row.dimensions == 3
    assert row.measured <= row.telescoped * (1 + 1e-6) <= row.norms * (1 + 1e-5)


def test_the_norm_of_a_convolution_is_that_of_its_matrix() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
    eye = torch.eye(2 * 6 * 6).reshape(72, 2, 6, 6)
    with torch.no_grad():
        matrix = conv(eye).flatten(1)  # rows are what each input makes
        assert bounds.conv_norm(conv, 6) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-2)
