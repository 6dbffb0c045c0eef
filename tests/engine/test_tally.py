"""Statistics of mini-batches apart, as `ISpaSP(minibatches=True)` wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from ispasp.engine import measure
from ispasp.engine.sites import Tally
from ispasp.select import ISpaSP, i_spasp
from ispasp.types import LinearConsumer, Reading, Statistics

UNITS, ITERATIONS = 40, 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, UNITS), nn.ReLU(), nn.Linear(UNITS, 6)).double()


def batches(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(4, 10, generator=g, dtype=torch.float64) for _ in range(count)]


def read(model: nn.Sequential, data: Sequence[Tensor]) -> Statistics:
    """Of the data together, by running the first layers by hand."""
    H = torch.cat([model[:2](x) for x in data])
    weight = model[2].weight
    assert isinstance(weight, Tensor)
    return Statistics(UNITS, (measure(LinearConsumer(weight.detach()), H),))


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
@pytest.mark.parametrize("count", [1, 3, 5, 12])
def test_every_iteration_gets_another_mini_batch(order: Literal["sequential", "oneshot"], count: int) -> None:
    model, data = network(), batches(count)
    method = ISpaSP(iterations=ITERATIONS, minibatches=True)
    result = ispasp.prune(model, data, 0.1, method=method, order=order, compensate=None, progress=False)
    parts = [read(model, data[k::ITERATIONS]) for k in range(min(count, ITERATIONS))]
    assert result.plan.kept["0"] == i_spasp(parts, 0.1, iterations=ITERATIONS).kept


def test_mini_batches_may_decide_otherwise() -> None:
    """Else the test before is blind."""
    model, data = network(), batches(3)
    plans = [
        ispasp.prune(model, data, 0.1, method=ISpaSP(minibatches=flag), compensate=None, progress=False).plan.kept
        for flag in (True, False)
    ]
    assert plans[0] != plans[1]


def rows(value: float) -> tuple[Reading, ...]:
    return (measure(LinearConsumer(torch.eye(1)), torch.tensor([[value]])),)


def moments(statistics: Sequence[Statistics]) -> list[float | None]:
    found = [part.readings[0].moment for part in statistics]
    return [None if moment is None else float(moment.maps[()]) for moment in found]


def test_machines_deal_out_the_parts_round_robin() -> None:
    alone, tallies = Tally(4), [Tally(4, machine, 2) for machine in range(2)]
    for number in range(7):
        alone.add("fc", rows(2.0**number), number)
        tallies[number % 2].add("fc", rows(2.0**number), number // 2)
    found = [tally.statistics(1, ["fc"]) for tally in tallies]
    assert moments(found[0].parts) == [2.0**0 + 2.0**4, None, 2.0**2 + 2.0**6, None]
    together = [sum(value or 0.0 for value in pair) for pair in zip(*(moments(f.parts) for f in found), strict=True)]
    assert together == moments(alone.statistics(1, ["fc"]).parts)


def test_the_parts_add_up_to_the_whole() -> None:
    tally = Tally(3)
    for number in range(8):
        tally.add("fc", rows(float(number)), number)
    found = tally.statistics(1, ["fc"])
    assert_close(sum(value or 0.0 for value in moments(found.parts)), moments([found])[0])
