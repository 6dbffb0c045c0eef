"""What calibration keeps: sums in float64 that merge with `+`, and how many units a `keep` means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.select import Random, i_spasp, select_units, units_to_keep
from ispasp.types import ConvConsumer, Gram, LinearConsumer, Magnitude, Moment, Reading, Selection, Statistics, Step

NEEDS = ("moment", "magnitude", "gram")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_activations_are_summed_in_float64(dtype: torch.dtype) -> None:
    big = 2 / torch.finfo(dtype).eps  # the first number to which this dtype cannot add 1
    H = torch.tensor([[-big], [-1.0], [-1.0], [-1.0]], dtype=dtype)
    reading = measure(LinearConsumer(torch.ones(1, 1)), H, NEEDS)
    assert float(reading.moment.maps[()]) == -(big + 3)
    assert float(reading.magnitude.total) == big + 3
    assert float(reading.gram.total) == big**2 + 3


def test_residuals_on_data_are_computed_in_float64() -> None:
    H = torch.tensor([[1.0, 2.0**-13]])
    assert select_units(torch.ones(1, 2), H, keep=1).start.residual == 1 + 2.0**-13
    third = torch.tensor([[1 / 3]], dtype=torch.float64)
    assert select_units(third, third, keep=1).start.residual == pytest.approx(1 / 9, rel=1e-14)


def test_integer_activations_are_no_trap() -> None:
    H = torch.tensor([[-128, 100, 1]], dtype=torch.int8)  # |-128| does not fit into int8
    A = LinearConsumer(torch.full((1, 3), 0.5))
    assert select_units(A, H, keep=1, method="topk").kept == (0,)
    assert A(H).tolist() == [[-13.5]]


def test_one_vector_is_one_example() -> None:
    A, h = LinearConsumer(torch.eye(3)), torch.tensor([1.0, -2.0, 3.0])
    one, batch = measure(A, h, NEEDS), measure(A, h[None], NEEDS)
    assert_close(one.moment.maps[()], batch.moment.maps[()])
    assert_close(one.magnitude.total, batch.magnitude.total)
    assert_close(one.gram.total, batch.gram.total)
    assert one.moment.examples == one.magnitude.examples == one.gram.examples == 1


def test_adding_changes_neither_part_and_counts_examples() -> None:
    A = ConvConsumer(torch.ones(1, 2, 1))
    a, b = measure(A, torch.ones(3, 2, 4), NEEDS), measure(A, torch.ones(2, 2, 5), NEEDS)
    both = a + b
    assert (set(a.moment.maps), set(b.moment.maps)) == ({(4,)}, {(5,)})
    assert set(both.moment.maps) == {(4,), (5,)}
    assert both.moment.examples == both.magnitude.examples == both.gram.examples == 5
    assert both.magnitude.total.tolist() == [22.0, 22.0]
    assert both.gram.total.tolist() == [[[22.0, 22.0], [22.0, 22.0]]]


@pytest.mark.parametrize("method", ["ispasp", "topk"])
def test_every_consumer_has_a_say(method: str) -> None:
    often, seldom = torch.tensor([[1.0, 5.0]]), torch.tensor([[9.0, 6.0]])
    for Hs in ([often, seldom], [seldom, often]):
        assert select_units([torch.eye(2), torch.eye(2)], Hs, keep=1, method=method).kept == (1,)


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_every_statistic_refuses_nan_and_inf(need: str, bad: float) -> None:
    with pytest.raises(InputError, match="the sum of the activations has .* NaN or Inf"):
        measure(LinearConsumer(torch.eye(2)), torch.tensor([[1.0, bad], [1.0, 1.0]]), [need])


def test_parameters_and_activations_with_gradients_leave_no_graph() -> None:
    layer, H = torch.nn.Linear(4, 3), torch.rand(5, 4, requires_grad=True)
    A = LinearConsumer(layer.weight, scale=torch.ones(3, requires_grad=True))
    reading = measure(A, H, NEEDS)
    kept = (reading.moment.maps[()], reading.magnitude.total, reading.gram.total, A.weight, A.scale)
    assert not any(tensor.requires_grad for tensor in kept)
    assert layer.weight.requires_grad  # the layer itself is untouched
    assert i_spasp(Statistics(4, (reading,)), 2).kept == select_units(A, H, 2).kept


def test_evidence_claims_nothing_when_one_consumer_lacks_a_statistic() -> None:
    A, H = LinearConsumer(torch.eye(3)), torch.rand(4, 3)
    statistics = Statistics(3, (measure(A, H, ["moment", "gram"]), Reading(A)))
    assert Random().select(statistics, 2).start == Step((), moment_residual=None, residual=None)


@pytest.mark.parametrize(
    ("keep", "units", "expected"),
    [
        (0.4, 12, 5),  # 4.8
        (0.35, 12, 4),  # 4.2
        (0.5, 5, 3),  # a half goes up
        (0.01, 12, 1),  # never to zero
        (1.0, 7, 7),
        (1, 7, 1),  # an int is a number
        (7, 7, 7),
        (np.float32(0.25), 8, 2),
        (np.float64(0.25), 8, 2),
        (np.int64(3), 8, 3),
        (np.uint8(3), 8, 3),
    ],
)
def test_units_to_keep(keep: float | int, units: int, expected: int) -> None:
    found = units_to_keep(keep, units)
    assert found == expected
    assert type(found) is int


def test_a_selection_prints_its_first_units_and_both_residuals() -> None:
    steps = (Step(tuple(range(9)), 1.0, 0.5),)
    shown = repr(Selection(tuple(range(9)), Step((), 4.0, 2.0), steps, converged=False))
    assert shown == (
        "Selection(kept 9 units [0, 1, 2, 3, 4, 5, 6, 7, ...], iterations=1, converged=False, "
        "moment residual 4 -> 1, residual 2 -> 0.5)"
    )
    assert repr(Selection((0,), Step(()), (Step((0,)),))) == "Selection(kept 1 units [0], iterations=1, converged=True)"


def test_statistics_of_different_shapes_do_not_broadcast() -> None:
    pairs: list[tuple[Any, Any]] = [
        (Moment({(): torch.ones(4)}, 1), Moment({(): torch.ones(1)}, 1)),
        (Magnitude(torch.ones(4), 1), Magnitude(torch.ones(1), 1)),
        (Gram(torch.ones(1, 4, 4), 1), Gram(torch.ones(2, 4, 4), 1)),
    ]
    for a, b in pairs:
        with pytest.raises(InputError, match=r"shapes \(.*\) and \(.*\) cannot be added: take one"):
            a + b
