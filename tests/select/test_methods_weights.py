"""Methods on producers and sensitivities against their definitions, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.testing import assert_close

from ispasp.errors import InputError
from ispasp.select import (
    FPGM,
    L1,
    L2,
    Selector,
    Slimming,
    Spread,
    Taylor,
    by_channel,
    select_units,
    selector,
    sum_by_unit,
)
from ispasp.select.norm import _summed_distances
from ispasp.types import ConvConsumer, LinearConsumer, Producer, Reading, Selection, Sensitivity, Statistics

A = LinearConsumer(torch.eye(4))
ON_WEIGHTS = (L1, L2, FPGM, Slimming)


def statistics(*made: Producer, units: int = 4) -> Statistics:
    return Statistics(units, (Reading(LinearConsumer(torch.eye(units))),), made)


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, list[Producer]]:
    """One or two producers of n units, each with its own rows per unit and some channels outside."""
    n, g = draw(st.integers(3, 9)), torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    made = []
    for _ in range(draw(st.integers(1, 2))):
        rows, outside = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        units = torch.cat([torch.arange(n).repeat(rows), torch.full((outside,), -1)])  # rows of a unit lie apart
        size = (len(units), draw(st.integers(1, 5)))
        made.append(Producer(torch.randn(size, generator=g), units, torch.randn(size[0], generator=g)))
    return n, made


def filters(made: list[Producer], unit: int) -> Tensor:
    return torch.cat([producer.weight[producer.unit_of() == unit].flatten() for producer in made]).double()


@given(layers(), st.data())
def test_scores_are_what_the_definitions_say(problem: tuple[int, list[Producer]], data: st.DataObject) -> None:
    n, made = problem
    s = data.draw(st.integers(1, n))
    F = [filters(made, unit) for unit in range(n)]
    gammas = [torch.cat([p.scale[p.unit_of() == unit] for p in made]).double() for unit in range(n)]
    scores = {
        "l1": [float(f.abs().sum()) for f in F],
        "l2": [float(f.norm()) for f in F],
        "fpgm": [sum(float((f - other).norm()) for other in F) for f in F],
        "slimming": [float(gamma.abs().sum()) for gamma in gammas],
    }
    for name, score in scores.items():
        kept = selector(name).select(statistics(*made, units=n), s).kept
        assert kept == tuple(sorted(sorted(range(n), key=lambda i, score=score: -score[i])[:s]))


def test_fpgm_removes_what_others_can_stand_in_for_and_not_what_is_small() -> None:
    made = Producer(torch.tensor([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0], [0.0, -0.1]]))
    assert FPGM().select(statistics(made), 3).kept == (0, 1, 3)
    assert L2().select(statistics(made), 3).kept == (0, 1, 2)


def test_fpgm_takes_equal_filters_for_equal() -> None:
    W = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 1e6
    made = Producer(W[[0, 1, 2, 1, 1]] + 0.0)  # units 1, 3 and 4 are one filter
    assert FPGM().select(statistics(made, units=5), 2).kept == (0, 2)
    assert FPGM().select(statistics(made, units=5), 3).kept == (0, 1, 2)


@pytest.mark.parametrize("shared", [0.0, 1e6])
def test_fpgm_distances_have_all_their_digits(shared: float) -> None:
    W = shared + torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.stack([(W - row).norm(dim=1).sum() for row in W])
    assert_close(_summed_distances(W), exact, rtol=1e-12, atol=0)


def test_fpgm_of_many_units_is_summed_in_parts() -> None:
    W = torch.randn(1500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score = torch.cdist(W, W, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
    kept = FPGM().select(statistics(Producer(W), units=1500), 100).kept
    assert kept == tuple(sorted(torch.argsort(score, descending=True)[:100].tolist()))


def test_a_concatenation_has_units_that_only_one_producer_makes() -> None:
    first = Producer(torch.tensor([[3.0], [1.0]]), torch.tensor([0, 1]), torch.tensor([0.1, 0.4]))
    second = Producer(torch.tensor([[2.0, 2.0], [0.1, 0.1]]), torch.tensor([2, 3]), torch.tensor([0.2, 0.3]))
    assert L1().select(statistics(first, second), 2).kept == (0, 2)
    assert Slimming().select(statistics(first, second), 2).kept == (1, 3)
    assert FPGM().select(statistics(first, second), 2).kept == (0, 2)


@pytest.mark.parametrize("shape", [(30, 6), (5, 4, 6), (4, 6, 5, 5)])
def test_flap_and_wanda_are_what_the_definitions_say(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    H = torch.randn(shape, generator=g, dtype=torch.float64) + 3
    W = torch.randn(8, 6, *(3, 3)[: len(shape) // 4 * 2], generator=g, dtype=torch.float64)
    units, scale = torch.tensor([0, 0, 1, 2, 3, -1]), torch.rand(8, generator=g, dtype=torch.float64)
    A = (ConvConsumer if W.ndim > 2 else LinearConsumer)(W, units=units, scale=scale)
    X = by_channel(A, H)
    V = (scale.reshape(-1, *(1,) * (W.ndim - 1)) * W).movedim(1, 0).flatten(1)  # (channels, weights)
    expected = {
        "flap": X.var(1) * V.square().sum(1),
        "wanda": X.norm(dim=1) * V.abs().sum(1),
    }
    for name, by_hand in expected.items():
        scores = torch.tensor(select_units([A, A], H, 2, name).scores, dtype=torch.float64)
        assert_close(scores, 2 * sum_by_unit(by_hand, units, 4), rtol=1e-10, atol=1e-10)


def test_flap_lets_a_constant_go_and_wanda_does_not() -> None:
    H = torch.tensor([[9.0, 1.0], [9.0, 0.0], [9.0, 1.0]])
    assert select_units(torch.ones(1, 2), H, 1, "flap").kept == (1,)
    assert select_units(torch.ones(1, 2), H, 1, "wanda").kept == (0,)
    assert select_units(torch.ones(1, 2), H[:1], 1, "flap").scores == (0.0, 0.0)  # one value has no variance


def test_a_spread_counts_values_and_adds() -> None:
    A, conv = LinearConsumer(torch.eye(2)), ConvConsumer(torch.ones(1, 2, 1))
    one = Spread.measure(A, torch.tensor([[1.0, 2.0]]))
    assert (one.examples, one.total.tolist()) == (1, [[1, 1], [1, 2], [1, 4]])
    maps = Spread.measure(conv, torch.ones(3, 2, 5))
    assert (maps.examples, maps.total.tolist()) == (3, [[15, 15], [15, 15], [15, 15]])
    assert ((maps + maps).examples, float((maps + maps).total[0, 0])) == (6, 30)


def test_several_consumers_add_their_sensitivities() -> None:
    readings = [Reading(A, Sensitivity(torch.tensor(total), 5)) for total in ([1.0, 2, 0, 3], [5.0, 0, 1, 0])]
    assert Taylor().select(Statistics(4, tuple(readings)), 2).kept == (0, 3)


def test_producers_as_a_weight_a_producer_or_several() -> None:
    W, H = torch.arange(24.0).reshape(4, 3, 1, 2), torch.rand(5, 4)
    small = Producer(torch.tensor([[1e3], [0.0], [0.0], [0.0]]))
    assert select_units(A, H, 1, "l1", producers=W).kept == (3,)
    assert select_units(A, H, 1, "l1", producers=Producer(W.flatten(1))).kept == (3,)
    assert select_units(A, H, 1, "l1", producers=[Producer(W.flatten(1)), small]).kept == (0,)


@dataclass(frozen=True)
class Misspelt(Selector):
    name: ClassVar[str] = "misspelt"
    needs: ClassVar[tuple[str, ...]] = ("grams",)

    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        raise AssertionError("not reached")


W4, S4 = torch.ones(4, 2), torch.ones(4)
REFUSED = {
    "no producers": (lambda: L1().select(statistics(), 1), "l1 needs producers: pass Statistics"),
    "no producers in the data path": (lambda: select_units(A, S4[None], 1, "fpgm"), "fpgm needs producers"),
    "a producer of other units": (
        lambda: L2().select(statistics(Producer(torch.ones(5, 2))), 1),
        "a producer makes unit 4 of 4: its `units` must be from -1 to 3",
    ),
    "a unit nobody makes": (
        lambda: FPGM().select(statistics(Producer(torch.ones(2, 2), torch.tensor([0, 3]))), 1),
        r"2 of 4 units are made by no producer \(the first is 1\), so fpgm cannot score them: pass all",
    ),
    "no BatchNorm": (
        lambda: Slimming().select(statistics(Producer(W4, scale=S4), Producer(W4)), 1),
        "producer 1 has no BatchNorm after it.*choose another method such as 'l1'",
    ),
    "no sensitivity": (lambda: select_units(A, S4[None], 1, "taylor"), "consumer 0 has no sensitivity: calibrate"),
    "no spread": (lambda: selector("flap").select(statistics(), 1), "consumer 0 has no spread: take it with measure"),
    "a spread of other channels": (
        lambda: selector("wanda").select(Statistics(4, (Reading(A, Spread(torch.ones(3, 5), 1)),)), 1),
        r"spread of consumer 0 has shape \(3, 5\), expected \(3, 4\)",
    ),
    "a sensitivity per channel": (
        lambda: Taylor().select(Statistics(4, (Reading(A, Sensitivity(torch.ones(8), 1)),)), 1),
        r"sensitivity of consumer 0 has shape \(8,\), expected \(4,\)",
    ),
    "a sensitivity of no data": (
        lambda: Taylor().select(Statistics(4, (Reading(A, Sensitivity(S4, 0)),)), 1),
        r"holds no data \(examples=0\)",
    ),
    "nan in a sensitivity": (
        lambda: Taylor().select(Statistics(4, (Reading(A, Sensitivity(S4 * torch.nan, 1)),)), 1),
        "sensitivity of consumer 0 has 4 NaN",
    ),
    "producers as a module": (
        lambda: select_units(A, S4[None], 1, "l1", producers=torch.nn.Linear(4, 4)),
        "producers is a Linear: pass a weight, a Producer, or a list",
    ),
    "producers as a list of weights": (
        lambda: select_units(A, S4[None], 1, "l1", producers=[W4]),
        "producers is a list: pass a weight, a Producer, or a list of Producers",
    ),
    "a bias for a producer": (lambda: select_units(A, S4[None], 1, "l1", producers=S4), r"\(channels, fan-in\)"),
    "a need nobody knows": (lambda: select_units(A, S4[None], 1, Misspelt()), r"'grams'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_with_a_remedy(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InputError, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize("cls", ON_WEIGHTS)
def test_no_data_are_needed(cls: type[Selector]) -> None:
    selection = cls().select(statistics(Producer(torch.diag(torch.arange(4.0)), scale=torch.arange(4.0))), 2)
    assert selection.kept == (2, 3)
    assert selection.residuals == (None,)
