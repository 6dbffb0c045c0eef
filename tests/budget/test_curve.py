"""Curves: what they say is the error that masking has."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from ispasp.budget import Curve, curve, error_curve
from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.select import ISpaSP, Random, Selector, TopK
from ispasp.select.evidence import total_energy
from ispasp.types import ConvConsumer, LinearConsumer, Selection, Statistics, Step
from ispasp.types.consumer import Geometry
from support.problems import Problem, problems

NEEDS = ("moment", "magnitude", "gram")


@settings(max_examples=40, deadline=None)
@given(problem=problems(), selector=st.sampled_from((ISpaSP(), TopK(), Random())), points=st.integers(2, 14))
def test_errors_are_those_of_masking_the_removed_units(problem: Problem, selector: Selector, points: int) -> None:
    H = problem.data(5)
    statistics = problem.statistics(H, NEEDS)
    curve, _ = error_curve(selector, statistics, points)
    assert curve.kept[0] == 1 and curve.units == problem.units
    dense = _energy(problem, H, range(problem.units))
    lowest = np.inf
    for kept, error in zip(curve.kept[:-1], curve.error, strict=False):
        chosen = set(selector.select(statistics, kept).kept)
        lost = _energy(problem, H, [u for u in range(problem.units) if u not in chosen])
        lowest = min(lowest, lost / dense if dense > 0 else 0.0)  # the curve is the running minimum
        assert error == pytest.approx(lowest, rel=1e-6, abs=1e-9)


def _energy(problem: Problem, H: torch.Tensor, units: range | list[int]) -> float:
    """||A H_R||^2 straight from the data."""
    total = 0.0
    for A in problem.consumers:
        X = problem.as_consumer_gets(A, H)
        mask = torch.isin(A.unit_of(), torch.tensor(list(units), dtype=A.unit_of().dtype)).double()
        axes = (1,) * len(A.kernel) if isinstance(A, ConvConsumer) else ()
        total += float(A(X * mask.reshape(-1, *axes)).square().sum())
    return total


@pytest.mark.parametrize("units", [1, 2, 11, 12, 13, 64, 500])
def test_about_twelve_widths_from_one_unit_to_all(units: int) -> None:
    statistics = Statistics(units, (measure(LinearConsumer(torch.ones(1, units)), torch.ones(1, units), ["moment"]),))
    curve, _ = error_curve(Random(), statistics, energy=torch.eye(units))
    assert (curve.kept[0], curve.units) == (1, units)
    assert min(units, 11) <= len(curve.kept) <= 13
    expected = [1 - k / units for k in curve.kept]  # energies of 1 each
    assert curve.error == pytest.approx(expected)


def test_a_worse_choice_of_more_units_does_not_raise_the_curve() -> None:
    class Stubborn(Selector):
        name: ClassVar[str] = "stubborn"
        needs: ClassVar[tuple[str, ...]] = ()

        def select(self, statistics: Statistics, keep: float | int) -> Selection:
            assert all(reading.gram is None for reading in statistics.readings)  # evidence would cost a Gram each time
            return Selection({1: (3,), 2: (0, 1), 3: (0, 1, 3)}[int(keep)], Step(()))

    H = torch.tensor([[1.0, 1.0, 1.0, 5.0]])
    statistics = Statistics(4, (measure(LinearConsumer(torch.eye(4)), H, ["gram"]),))
    assert error_curve(Stubborn(), statistics)[0].error == pytest.approx((3 / 28, 3 / 28, 1 / 28, 0.0))


def test_gram_matrices_stay_for_selectors_that_need_them() -> None:
    class Greedy(Selector):
        name: ClassVar[str] = "greedy"
        needs: ClassVar[tuple[str, ...]] = ("gram",)

        def select(self, statistics: Statistics, keep: float | int) -> Selection:
            E = total_energy(statistics)
            assert E is not None
            return Selection(tuple(sorted(E.diagonal().topk(int(keep)).indices.tolist())), Step(()))

    H = torch.tensor([[1.0, 2.0, 2.0]])
    statistics = Statistics(3, (measure(LinearConsumer(torch.eye(3)), H, ["gram"]),))
    assert error_curve(Greedy(), statistics)[0].error == pytest.approx((5 / 9, 1 / 9, 0.0))


def test_a_dimension_without_output_loses_nothing() -> None:
    statistics = Statistics(3, (measure(LinearConsumer(torch.zeros(2, 3)), torch.ones(4, 3), ["moment", "gram"]),))
    assert error_curve(ISpaSP(), statistics)[0].error == (0.0, 0.0, 0.0)


def test_between_points_the_error_is_linear() -> None:
    curve = Curve((1, 3, 7), (0.9, 0.4, 0.0))
    assert curve.at([1, 2, 3, 4, 7]) == pytest.approx([0.9, 0.65, 0.4, 0.3, 0.0])
    assert curve.at(np.array([[5]])).shape == (1, 1)


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        ((), (), "0 widths and 0 errors"),
        ((1, 2), (0.0,), "2 widths and 1 errors"),
        ((2, 1), (0.1, 0.0), "ascending"),
        ((1, 1), (0.1, 0.0), "ascending"),
        ((-1, 1), (0.1, 0.0), "whole numbers >= 0"),
        ((0.5, 1), (0.1, 0.0), "whole numbers >= 0"),
        ((1, 2), (float("nan"), 0.0), "finite numbers"),
        ((1, 2), (-0.1, 0.0), "finite numbers"),
        ((1, 2), (0.2, 0.1), "end with 0.0"),
        ((1, 2, 3), (0.1, 0.2, 0.0), "running minimum"),
    ],
)
def test_points_that_make_no_curve_are_refused(kept: tuple[int, ...], error: tuple[float, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Curve(kept, error)


def test_bad_input_is_refused_with_a_remedy() -> None:
    without = Statistics(2, (measure(LinearConsumer(torch.eye(2)), torch.ones(1, 2), ["moment"]),))
    with pytest.raises(InputError, match="no Gram matrix: take it with measure"):
        error_curve(ISpaSP(), without)
    with pytest.raises(InputError, match=r"energy has shape \(3, 3\), the dimension 2 units"):
        error_curve(ISpaSP(), without, energy=torch.eye(3))
    with pytest.raises(InputError, match="1 NaN or Inf of 4 values"):
        error_curve(ISpaSP(), without, energy=torch.tensor([[1.0, 0.0], [0.0, torch.nan]]))
    with pytest.raises(InputError, match="points=1"):
        error_curve(ISpaSP(), without, 1, energy=torch.eye(2))


def test_compensated_errors_are_those_of_units_rescaled_by_least_squares() -> None:
    g = torch.Generator().manual_seed(5)
    W, H = (torch.randn(n, 6, generator=g, dtype=torch.float64) for n in (3, 40))
    statistics = Statistics(6, (measure(LinearConsumer(W), H, ["magnitude", "gram"]),))
    curve, _ = error_curve(TopK(), statistics, compensated=True)
    parts = (H[:, None, :] * W).reshape(-1, 6)  # what each unit adds to the outputs
    for width, error in zip(curve.kept, curve.error, strict=True):
        kept = parts[:, list(TopK().select(statistics, width).kept)]
        whole = parts.sum(1, keepdim=True)
        left = whole - kept @ torch.linalg.lstsq(kept, whole).solution
        assert error == pytest.approx(float(left.square().sum() / whole.square().sum()), rel=1e-4, abs=1e-5)


def test_a_wide_consumer_has_the_diagonal_of_the_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, H = torch.randn(6, 2, 1, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    units = torch.tensor([0, 1, 1, 0])  # both are in both groups
    consumer = ConvConsumer(weight, units=units, geometry=Geometry(groups=2))
    whole = curve.sampled_energy(consumer, H, 2)
    monkeypatch.setattr(curve, "_WIDEST", 0)
    torch.testing.assert_close(curve.sampled_energy(consumer, H, 2), torch.diag(whole.diagonal()))
