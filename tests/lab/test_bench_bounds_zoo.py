"""What bounds by layer errors can say about the networks of the zoo."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ispasp import survey
from ispasp_lab.benchmarks import bounds, bounds_zoo
from ispasp_lab.zoo import Case
from ispasp_lab.zoo.coverage import random_units
from support.zoo import case
from test_zoo import SMALLER

LARGE = "torchvision/resnet18"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n == LARGE else n for n in SMALLER])
def test_one_dimension_at_a_time_bounds_the_change(name: str) -> None:
    row = bounds_zoo.measured(case(name), 0.75)
    assert 0 < row.measured <= row.telescoped * (1 + 1e-9)
    assert row.least is None or row.least > 0


@pytest.mark.parametrize("name", ["mean_pool", "batch_norm_mlp", "swiglu", "unflatten"])
def test_with_nothing_behind_the_consumer_the_least_is_the_change(name: str) -> None:
    row = bounds_zoo.measured(case(f"plain/{name}"), 0.75)
    assert row.dimensions == 1
    assert row.least == pytest.approx(row.measured, rel=1e-6) == row.telescoped


def test_ops_without_a_second_derivative_have_no_least() -> None:
    row = bounds_zoo.measured(case("transformers/mixtral"), 0.75)
    assert row.least is None
    assert row.telescoped >= row.measured > 0


def test_the_least_is_made_of_the_norms_of_jacobians() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()

    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    row = bounds_zoo.measured(Case("a/chain", "a", build, lambda: x), 0.5)
    net = build()
    H = net[1](net[0](x))
    (jacobian,) = bounds._jacobian_norms(net, "2", x).tolist()
    kept = random_units(survey(net, x), 0.5)
    gone = [unit for unit in range(8) if unit not in kept["0"]]
    with torch.no_grad():
        d0 = H[:, gone] @ net[2].weight[:, gone].T
        between = torch.relu(net[2](H) - d0)
        rest = [unit for unit in range(8) if unit not in kept["2"]]
        d1 = between[:, rest] @ net[4].weight[:, rest].T
        expected = (jacobian * d0.norm() + d1.norm()) / net(x).norm()
    assert row.least == pytest.approx(float(expected), rel=1e-3)  # power iteration comes from below
