"""Second moments at some output positions: the same sums over fewer rows, drawn evenly and alike in every run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from compensate.test_fit import CASES, batches
from ispasp.engine.sites import Positions, measure
from ispasp.errors import InputError
from ispasp.types import Consumer, ConvConsumer, LinearConsumer
from ispasp.types.consumer import output_size, patches
from support.nets import alive
from support.problems import Problem, problems


@given(problems(("conv", "transposed", "linear", "heads")), st.integers(1, 3), st.data())
def test_patches_at_positions_are_columns_of_all_patches(problem: Problem, batch: int, data: st.DataObject) -> None:
    A = problem.consumers[0]
    H = problem.as_consumer_gets(A, problem.data(batch))
    size = math.prod(output_size(A, H))
    at = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5)))
    X = patches(A, H).unflatten(-1, (len(H), size))
    assert torch.equal(patches(A, H, at), X[..., at].flatten(-2))


@given(problems(("conv", "transposed", "linear")), st.integers(1, 3))
def test_estimates_from_parts_average_to_the_whole(problem: Problem, batch: int) -> None:
    A = problem.consumers[0]
    H = problem.as_consumer_gets(A, problem.data(batch))
    size = math.prod(output_size(A, H))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(())
    for at in torch.split(order, max(1, size // 2)):
        reading = measure(A, H, ["gram", "moment"], at)
        assert reading.gram is not None and reading.moment is not None
        found = found + reading.gram.total * len(at) / size
        assert_close(reading.moment.maps, measure(A, H).moment.maps)  # first moments take everything
    assert_close(found, measure(A, H, ["gram"]).gram.total)


@pytest.mark.parametrize("kind", CASES)
def test_inputs_and_targets_are_of_the_same_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions in another order give the same network; if targets were of others, they would not."""
    case = CASES[kind]
    dense, data = alive(case.build()), batches(case.shape)
    whole = ispasp.prune(dense, data, positions=None, progress=False)
    asked: list[int] = []

    def shuffled(_: Positions, A: Consumer, H: Tensor, *seed: int) -> Tensor:
        asked.append(math.prod(output_size(A, H)))
        return torch.randperm(asked[-1], generator=torch.Generator().manual_seed(seed[-1]))

    monkeypatch.setattr(Positions, "of", shuffled)
    found = ispasp.prune(dense, data, progress=False)
    assert asked
    for key, value in whole.model.state_dict().items():
        assert_close(found.model.state_dict()[key], value, rtol=1e-7, atol=1e-9)


def test_positions_are_spread_evenly_and_the_same_again() -> None:
    A, H = ConvConsumer(torch.ones(1, 1, 3, 3)), torch.ones(2, 1, 34, 34)
    at = Positions(64, 2).of(A, H, 7, 1)
    assert at is not None
    assert torch.equal(at // 16, torch.arange(64))  # one of every 16 of 1,024
    assert torch.equal(at, Positions(64, 2).of(A, H, 7, 1))
    assert not torch.equal(at, Positions(64, 2).of(A, H, 7, 2))


@pytest.mark.parametrize(
    ("limit", "examples", "columns", "expected"),
    [
        ("auto", 1024, 9, 16),  # 16,384 rows at least
        ("auto", 100, 576, 1152),  # 200 rows for each of 576 columns
        ("auto", 10, 9, None),  # all are needed
        (None, 10**6, 9, None),
        (3, 1, 9, 3),
        (3000, 10**6, 9, None),
    ],
)
def test_how_many_positions(limit: Any, examples: int, columns: int, expected: int | None) -> None:
    A, H = ConvConsumer(torch.ones(1, columns // 9, 3, 3)), torch.ones(1, columns // 9, 50, 50)
    at = Positions(limit, examples).of(A, H, 0)
    assert (None if at is None else len(at)) == expected


def test_single_rows_have_no_positions_to_leave_out() -> None:
    assert Positions("auto", 10**6).of(LinearConsumer(torch.ones(1, 4)), torch.ones(8, 4), 0) is None


def conv_net() -> nn.Module:
    return alive(
        nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 4, 1)
        )
    )


def test_some_positions_are_nearly_as_good_as_all() -> None:
    net, g = conv_net(), torch.Generator().manual_seed(0)
    data, new = (torch.randn(n, 3, 24, 24, generator=g, dtype=torch.float64) for n in (64, 32))
    errors = {}
    for positions in (None, "auto", 40):
        result = ispasp.prune(net, data.split(16), positions=positions, progress=False)
        with torch.no_grad():
            errors[positions] = float((result.model(new) - net(new)).norm())
    assert errors["auto"] != errors[None]
    assert errors["auto"] < 1.02 * errors[None]
    assert errors[40] < 1.05 * errors[None]


@pytest.mark.parametrize("compensate", ["local", "dense"])
@pytest.mark.parametrize("order", ["sequential", "oneshot"])
def test_running_batches_again_takes_the_same_positions(compensate: str, order: str) -> None:
    net, data = conv_net(), torch.randn(24, 3, 12, 12, dtype=torch.float64).split(8)
    options: dict[str, Any] = {"positions": 9, "compensate": compensate, "order": order, "progress": False}
    waiting, again = (ispasp.prune(net, data, memory=memory, **options) for memory in (None, 1))
    assert waiting.plan.kept == again.plan.kept
    for key, value in waiting.model.state_dict().items():
        assert_close(again.model.state_dict()[key], value, rtol=1e-9, atol=1e-9)
    assert waiting.settings["positions"] == 9


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "all", True])
def test_numbers_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"positions=.*pass a number of positions, None for all, or 'auto'"):
        ispasp.prune(conv_net(), [torch.randn(2, 3, 8, 8)], positions=wrong)
