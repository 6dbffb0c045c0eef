"""Allocation: never above the limit, close below it, and hardly worse than trying everything."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import ispasp
from ispasp.budget import Budget, Curve, Macs, Params, allocate
from ispasp.budget.allocate import Problem, choices, descend, exchange, fill
from ispasp.errors import InputError

Widths = Mapping[str, int]


@dataclass(frozen=True)
class Net:
    """Curves and a count; `a`, `b`, ... are its hidden dimensions."""

    curves: dict[str, Curve]
    count: Callable[[Widths], int]

    @property
    def dense(self) -> int:
        return self.count({name: curve.units for name, curve in self.curves.items()})

    def is_fine(self, limit: int) -> bool:
        """Whether no unit costs more than 1 % of the limit."""
        whole = {name: curve.units for name, curve in self.curves.items()}
        steps = [self.dense - self.count({**whole, name: units - 1}) for name, units in whole.items()]
        return max(steps) <= 0.01 * limit

    def error(self, widths: Widths) -> float:
        return float(sum(self.curves[name].at(width) for name, width in widths.items()))

    def best(self, limit: int) -> tuple[float, float]:
        """Least error of all widths that meet the limit, and of those within 1 % of it, by trying everything."""
        found, near = np.inf, np.inf
        table = {name: curve.at(np.arange(curve.units + 1)) for name, curve in self.curves.items()}
        for widths in itertools.product(*(range(1, c.units + 1) for c in self.curves.values())):
            chosen = dict(zip(self.curves, widths, strict=True))
            count = self.count(chosen)
            if count <= limit:
                error = float(sum(table[name][width] for name, width in chosen.items()))
                found = min(found, error)
                near = min(near, error) if count >= 0.99 * limit else near
        return found, near


def network(seed: int, sizes: list[int], *, coupled: bool, convex: bool, points: int = 12) -> Net:
    """A chain of layers (products of neighbours' widths), or layers that cost something each."""
    rng = np.random.default_rng(seed)
    names = "abcdefghij"[: len(sizes)]
    curves = {}
    for name, units in zip(names, sizes, strict=True):
        kept = np.unique(np.linspace(1, units, min(points, units)).round().astype(int))
        rates = rng.exponential(1.0, len(kept) - 1)
        rates = np.sort(rates)[::-1] if convex else rates  # error per unit, from few units to all
        steps = rates * np.diff(kept)
        error = np.append(np.cumsum(steps[::-1])[::-1], 0.0)
        curves[name] = Curve(tuple(kept.tolist()), tuple((error / max(error[0], 1e-9) * rng.uniform(0.1, 1)).tolist()))
    factors = rng.integers(1, 60, len(sizes) + 1).tolist()

    def chain(widths: Widths) -> int:
        w = [3, *(widths[name] for name in names), 2]
        return 7 + sum(f * x * y for f, x, y in zip(factors, w, w[1:], strict=False))

    def separate(widths: Widths) -> int:
        return 7 + sum(f * widths[name] for f, name in zip(factors, names, strict=False))

    return Net(curves, chain if coupled else separate)


def reachable(net: Net, fraction: float) -> int:
    """A limit between the narrowest network and the dense one."""
    smallest = net.count(dict.fromkeys(net.curves, 1))
    return smallest + int(fraction * (net.dense - smallest))


SEEDS, SHARES = st.integers(0, 10**6), st.floats(0.0, 1.0)
LARGE = st.lists(st.integers(200, 2000), min_size=2, max_size=6)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.lists(st.integers(1, 40), min_size=1, max_size=6), SHARES, st.booleans(), st.booleans())
def test_the_limit_is_never_exceeded(seed: int, sizes: list[int], share: float, coupled: bool, convex: bool) -> None:
    net = network(seed, sizes, coupled=coupled, convex=convex)
    limit = reachable(net, share)
    widths = allocate(net.curves, net.count, limit)
    assert list(widths) == list(net.curves)
    assert all(1 <= width <= net.curves[name].units for name, width in widths.items())
    assert net.count(widths) <= limit
    for name, width in widths.items():  # and nothing more fits
        if width < net.curves[name].units:
            assert net.count({**widths, name: width + 1}) > limit


@settings(max_examples=40, deadline=None)
@given(SEEDS, LARGE, st.floats(0.05, 1.0), st.booleans(), st.booleans())
def test_fine_grained_networks_come_within_one_percent(
    seed: int, sizes: list[int], share: float, coupled: bool, convex: bool
) -> None:
    net = network(seed, sizes, coupled=coupled, convex=convex)
    limit = reachable(net, share)
    assume(net.is_fine(limit))
    assert 0.99 * limit <= net.count(allocate(net.curves, net.count, limit)) <= limit


@settings(max_examples=40, deadline=None)
@given(SEEDS, LARGE, st.floats(0.05, 0.9), st.floats(1.01, 1.5), st.booleans())
def test_a_larger_limit_loses_less(seed: int, sizes: list[int], share: float, more: float, coupled: bool) -> None:
    net = network(seed, sizes, coupled=coupled, convex=True)
    limit = reachable(net, share)
    assume(net.is_fine(limit))
    small = net.error(allocate(net.curves, net.count, limit))
    large = net.error(allocate(net.curves, net.count, int(more * limit)))
    assert (
        large <= (1.05 if coupled else 1.0) * small + 1e-9
    )  # with products of widths a search can end beside the best


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.lists(st.integers(1, 120), min_size=1, max_size=5), st.integers(1, 32), SHARES, st.booleans())
def test_round_to_is_honoured(seed: int, sizes: list[int], round_to: int, share: float, coupled: bool) -> None:
    net = network(seed, sizes, coupled=coupled, convex=False)
    smallest = net.count({name: min(round_to, curve.units) for name, curve in net.curves.items()})
    limit = smallest + int(share * (net.dense - smallest))
    widths = allocate(net.curves, net.count, limit, round_to=round_to)
    assert net.count(widths) <= limit
    for name, width in widths.items():
        units = net.curves[name].units
        assert width == units or (width % round_to == 0 and width > 0)
        if width < units:
            assert net.count({**widths, name: min(width + round_to, units)}) > limit


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.lists(st.integers(2, 9), min_size=2, max_size=4), SHARES)
def test_equal_costs_and_convex_curves_are_solved_exactly(seed: int, sizes: list[int], share: float) -> None:
    net = network(seed, sizes, coupled=False, convex=True)
    net = Net(net.curves, lambda widths: sum(widths.values()))
    limit = reachable(net, share)
    assert net.error(allocate(net.curves, net.count, limit)) == pytest.approx(net.best(limit)[0], abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.lists(st.integers(2, 9), min_size=2, max_size=4), SHARES)
def test_the_descent_is_at_most_one_unit_from_the_best(seed: int, sizes: list[int], share: float) -> None:
    """With convex curves and linear costs the descent passes through optima; the last step is one unit of one curve."""
    net = network(seed, sizes, coupled=False, convex=True)
    limit = reachable(net, share)
    problem = Problem({name: choices(curve) for name, curve in net.curves.items()}, net.count, limit)
    widths = problem.widths(descend(problem))
    one = max(float(-np.diff(curve.at(np.arange(1, curve.units + 1))).min()) for curve in net.curves.values())
    assert net.error(widths) <= net.best(limit)[0] + one + 1e-9


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("convex", [False, True])
def test_close_to_trying_everything(coupled: bool, convex: bool) -> None:
    """Small networks: the result is within 1 % of the limit whenever that can be, and hardly ever not the best."""
    ratios = []
    for seed in range(80):
        rng = np.random.default_rng(seed)
        net = network(seed, rng.integers(3, 11, 3).tolist(), coupled=coupled, convex=convex)
        limit = reachable(net, rng.uniform(0.02, 0.98))
        widths = allocate(net.curves, net.count, limit)
        best, near = net.best(limit)
        if np.isfinite(near):
            assert 0.99 * limit <= net.count(widths) <= limit
            best = near
        assert best > 0.0
        ratios.append(net.error(widths) / best)
    assert min(ratios) > 1 - 1e-9
    assert float(np.mean(np.array(ratios) < 1 + 1e-9)) >= 0.9
    assert float(np.quantile(ratios, 0.95)) <= 1.1
    assert max(ratios) <= 2.0


def test_exchanges_repair_a_bad_start() -> None:
    """From the limit's worst corner, exchanges alone come to what the descent finds."""
    net = network(3, [300, 400, 500], coupled=True, convex=True)
    limit = reachable(net, 0.4)
    problem = Problem({name: choices(curve) for name, curve in net.curves.items()}, net.count, limit)
    place = fill(problem, (0, 0, 150))
    start = problem.error(place)
    while (better := exchange(problem, place)) is not None:
        assert problem.error(better) < problem.error(place)
        assert problem.slack(better) >= 0
        place = fill(problem, better)
    expected = net.error(allocate(net.curves, net.count, limit))
    assert expected < 0.9 * start
    assert problem.error(place) <= 1.02 * expected


def test_the_descent_ends_at_the_limit() -> None:
    problem = Problem({"a": choices(Curve((1, 50), (1.0, 0.0)))}, lambda w: w["a"], limit=25)
    assert problem.widths(descend(problem)) == {"a": 25}


def test_what_is_left_goes_where_it_lowers_the_error_most() -> None:
    curves = {"a": Curve((1, 2), (0.1, 0.0)), "b": Curve((1, 2), (1.0, 0.0)), "c": Curve((1, 2), (0.2, 0.0))}
    problem = Problem({name: choices(curve) for name, curve in curves.items()}, lambda w: sum(w.values()), limit=4)
    assert fill(problem, (0, 0, 0)) == (0, 1, 0)


def test_the_cost_of_a_unit_is_that_at_the_present_width() -> None:
    problem = Problem({"a": choices(Curve((1, 20), (1.0, 0.0)))}, lambda w: w["a"] ** 2, limit=50)
    assert [problem.slopes((k,)).tolist() for k in (0, 1, 9)] == [[3.0], [3.0], [19.0]]


def test_a_dimension_without_error_goes_first() -> None:
    curves = {"free": Curve((1, 50), (0.0, 0.0)), "dear": Curve((1, 50), (1.0, 0.0))}
    assert allocate(curves, lambda w: 3 * w["free"] + w["dear"], 53) == {"free": 1, "dear": 50}
    widths = allocate(curves, lambda w: w["free"] * w["dear"], 1000)
    assert widths == {"free": 20, "dear": 50}


def test_a_dimension_that_costs_nothing_stays_whole() -> None:
    curves = {"idle": Curve((1, 9), (0.1, 0.0)), "dear": Curve((1, 9), (1.0, 0.0))}
    assert allocate(curves, lambda w: w["dear"], 4) == {"idle": 9, "dear": 4}


def test_costs_of_neighbours_are_counted_as_they_are_now() -> None:
    """Alone, each dimension saves most where its neighbours are wide: b must not be priced with a dense."""
    curves = {"a": Curve((1, 100), (0.001, 0.0)), "b": Curve((1, 100), (0.5, 0.0)), "c": Curve((1, 100), (0.6, 0.0))}
    widths = allocate(curves, lambda w: w["a"] * w["b"] + 20 * w["c"], 1500)
    assert widths["a"] == 1  # once a is narrow, b costs next to nothing
    assert widths["b"] == 100
    assert widths["c"] == 70


def test_nothing_is_removed_within_the_dense_count() -> None:
    net = network(0, [5, 6], coupled=True, convex=True)
    assert allocate(net.curves, net.count, net.dense) == {"a": 5, "b": 6}
    assert allocate(net.curves, net.count, 10 * net.dense, round_to=4) == {"a": 5, "b": 6}


def test_least_widths_and_first_points_are_kept() -> None:
    curves = {"a": Curve((1, 64), (0.0, 0.0)), "b": Curve((10, 64), (0.0, 0.0))}
    widths = allocate(curves, lambda w: w["a"] + w["b"], 30, least={"a": 20})
    assert widths == {"a": 20, "b": 10}
    assert allocate(curves, lambda w: w["a"] + w["b"], 45, least={"a": 20}, round_to=8) == {"a": 24, "b": 16}


def test_a_limit_below_everything_names_the_least() -> None:
    curves = {"a": Curve((1, 8), (1.0, 0.0)), "b": Curve((1, 8), (1.0, 0.0))}

    def count(widths: Widths) -> int:
        return 1000 + 100 * widths["a"] * widths["b"]

    assert allocate(curves, count, 1100) == {"a": 1, "b": 1}
    with pytest.raises(InputError, match="1,099 cannot be met: .* still counts 1,100; raise the limit"):
        allocate(curves, count, 1099)
    with pytest.raises(InputError, match="still counts 2,600"):
        allocate(curves, count, 1100, round_to=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curves": {}}, "no curves given"),
        ({"limit": 0.5}, "limit=0.5 is a float"),
        ({"round_to": 0}, "round_to=0"),
        ({"round_to": 2.0}, "round_to=2.0"),
        ({"least": {"z": 1}}, "least names 'z', which has no curve: choose from a"),
        ({"least": {"a": 9}}, r"least\['a'\]=9: the hidden dimension has 8 units"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, object], message: str) -> None:
    good = {"curves": {"a": Curve((1, 8), (1.0, 0.0))}, "count": lambda w: w["a"], "limit": 5}
    with pytest.raises(InputError, match=message):
        allocate(**{**good, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def resnet18() -> ispasp.Survey:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision: pip install 'ispasp[vision]'")
    from ispasp.integrations.torchvision import import_torchvision

    model = import_torchvision().models.resnet18()
    return ispasp.survey(model, torch.zeros(1, 3, 64, 64), scope="all", check=False)


@pytest.mark.parametrize("kind", [Macs, Params])
@pytest.mark.parametrize("amount", [0.8, 0.5, 0.2])
@pytest.mark.parametrize("round_to", [None, 8])
def test_real_counts_of_resnet18(
    resnet18: ispasp.Survey, kind: type[Budget], amount: float, round_to: int | None
) -> None:
    rng = np.random.default_rng(0)
    curves = {}
    for d in resnet18.dimensions:
        kept = np.unique(np.linspace(1, d.units, 12).round().astype(int))
        error = rng.uniform(0.1, 1.0) * (1 - kept / d.units) ** rng.uniform(1, 4)
        curves[d.name] = Curve(tuple(kept.tolist()), tuple(error.tolist()))
    budget, calls = kind(amount), 0

    def count(widths: Widths) -> int:
        nonlocal calls
        calls += 1
        return budget.count(resnet18.costs, widths)

    limit = budget.limit(resnet18.cost())
    widths = allocate(curves, count, limit, round_to=round_to)
    cost = resnet18.cost(resnet18.plan({name: range(width) for name, width in widths.items()}))
    used = cost.macs if kind is Macs else cost.params
    assert 0.99 * limit <= used <= limit
    assert calls < 2000
    total = sum(float(curves[name].at(width)) for name, width in widths.items())
    assert total < 0.8 * _uniform_error(curves, count, limit)


def _uniform_error(curves: Mapping[str, Curve], count: Callable[[Widths], int], limit: int) -> float:
    """The same fraction of every dimension, the largest that meets the limit."""
    for share in np.linspace(1.0, 0.01, 100):
        widths = {name: max(1, round(share * curve.units)) for name, curve in curves.items()}
        if count(widths) <= limit:
            return float(sum(curves[name].at(width) for name, width in widths.items()))
    raise AssertionError


def test_the_same_again_and_random_generators_left_alone() -> None:
    before = torch.get_rng_state().clone()
    net = network(1, [30, 40], coupled=True, convex=False)
    first = allocate(net.curves, net.count, reachable(net, 0.3))
    assert first == allocate(net.curves, net.count, reachable(net, 0.3))
    assert torch.equal(before, torch.get_rng_state())
