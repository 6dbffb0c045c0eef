"""Methods and statistics that come from outside the package: one class each, nothing else to edit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.engine.wire import Key, added, outline, sums
from ispasp.errors import InputError
from ispasp.select import (
    Consumer,
    ConvConsumer,
    Evidence,
    Found,
    LinearConsumer,
    Magnitude,
    Moment,
    Reading,
    Scored,
    Search,
    Statistics,
    Total,
    by_channel,
    measure,
    option,
    register,
    register_statistic,
    sum_by_unit,
)
from ispasp.select.base import METHODS
from ispasp.types.statistics import STATISTICS

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Take back what a test registers."""
    known = [(table, dict(table)) for table in (METHODS, STATISTICS)]
    yield
    for table, before in known:
        table.clear()
        table.update(before)  # type: ignore[arg-type]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).eval()


def energy() -> type[Total]:
    """A new statistic."""

    @register_statistic
    class Energy(Total):
        name = "energy"

        @classmethod
        def measure(cls, consumer: Consumer, H: Tensor) -> Energy:
            return cls(by_channel(consumer, H).double().square().sum(1), examples=len(H))

    return Energy


def loudest() -> type[Scored]:
    """A new method that reads it."""

    @register
    class Loudest(Scored):
        name = "loudest"
        needs = ("energy",)

        def score(self, statistics: Statistics) -> Tensor:
            rows = [(r.statistics["energy"].tensors()[()], r.consumer.unit_of()) for r in statistics.readings]
            return torch.stack([sum_by_unit(total, units, statistics.units) for total, units in rows]).sum(0)

    return Loudest


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
def test_a_method_and_a_statistic_of_ones_own(order: Any) -> None:
    energy(), loudest()
    model = network()
    result = ispasp.prune(model, [X[:8], X[8:]], 0.5, method="loudest", order=order, compensate=None, progress=False)
    H = model[:2](X).square().sum(0)
    assert result.plan.kept["0"] == tuple(sorted(H.argsort(descending=True)[:4].tolist()))
    assert "loudest" in ispasp.methods()
    assert ispasp.select.Loudest is METHODS["loudest"]  # type: ignore[attr-defined]


def test_a_new_statistic_adds_over_batches_and_machines() -> None:
    Energy = energy()
    conv = ConvConsumer(torch.ones(1, 3, 1, 1))
    H = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    whole, first, second = (Statistics(3, (measure(conv, part, ["energy", "moment"]),)) for part in (H, H[:1], H[1:]))
    expected = H.square().sum((0, 2, 3))
    assert (whole.readings[0].get(Energy) or pytest.fail()).total.tolist() == pytest.approx(expected.tolist())
    assert sums(first + second)[0, "energy", ()].tolist() == pytest.approx(expected.tolist())
    for ranks in ((first, second), (whole, Statistics(3, (Reading(conv),)))):  # the second machine may have no data
        outlines = [outline(rank) for rank in ranks]

        def add_up(key: Key, own: Tensor, ranks: tuple[Statistics, ...] = ranks) -> Tensor:
            return torch.stack([sums(rank).get(key, torch.zeros_like(own)) for rank in ranks]).sum(0)

        both = added(ranks[1], outlines, add_up).readings[0]
        assert both.statistics.keys() == {"energy", "moment"}
        assert both.statistics["energy"].examples == 4
        assert both.statistics["energy"].tensors()[()].tolist() == pytest.approx(expected.tolist())


def test_a_file_in_the_folder_is_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first_units.py").write_text(
        "import torch\n"
        "from ispasp.select.base import Scored, register\n\n"
        "@register\n"
        "class FirstUnits(Scored):\n"
        "    name, needs = 'first-units', ()\n\n"
        "    def score(self, statistics):\n"
        "        return -torch.arange(statistics.units).double()\n"
    )
    monkeypatch.setattr(ispasp.select, "__path__", [*ispasp.select.__path__, str(tmp_path)])
    try:
        ispasp.select._import_all()
        assert "first-units" in ispasp.methods()
        assert ispasp.select.FirstUnits.name == "first-units"  # type: ignore[attr-defined]
        result = ispasp.prune(network(), [X], 3, method="first-units", progress=False)
        assert result.plan.kept == {"0": (0, 1, 2), "2": (0, 1, 2)}
    finally:
        sys.modules.pop("ispasp.select.first_units", None)
        vars(ispasp.select).pop("first_units", None)


def test_every_method_stands_in_a_file_of_the_folder() -> None:
    assert ispasp.methods()[0] == "ispasp"
    assert len(ispasp.methods()) == len(set(ispasp.methods())) >= 14
    assert all(getattr(ispasp.select, kind.__name__) is kind for kind in METHODS.values())
    with pytest.raises(AttributeError, match="'ispasp.select' has no attribute 'TopKK'"):
        ispasp.select.TopKK  # type: ignore[attr-defined]  # noqa: B018


@dataclass(frozen=True)
class Every(Search):
    """Every so-many-th unit first."""

    name, needs = "every", ()

    step: int = option(2, (2, 3).__contains__, "2 or 3")

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        units = range(evidence.statistics.units)
        order = sorted(units, key=lambda unit: (unit % self.step, unit))
        return [Found([sorted(order[:width])], converged=False) for width in widths]


def test_a_search_from_outside_serves_select_and_path_and_checks_its_options() -> None:
    statistics = Statistics(4, (measure(LinearConsumer(torch.eye(4)), X),))
    selection = Every().select(statistics, 0.75)
    assert (selection.kept, selection.converged, selection.steps[-1].kept) == ((0, 1, 2), False, (0, 1, 2))
    assert Every(step=3).path(statistics, [1, 2]) == [(0,), (0, 3)]
    with pytest.raises(InputError, match="step=4: pass 2 or 3"):
        Every(step=4)


class Named(Scored):
    name = "l1"
    needs = ()


class Nameless(Scored):
    needs = ()


class Doubled(Magnitude):
    pass


class Reserved(Magnitude):
    name = "task"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: register(Named), r"Named: there is a method 'l1' already \(L1\): rename it"),
        (lambda: register(Nameless), "Nameless has no `name`: give the class name = 'nameless'"),
        (lambda: register(Magnitude), "pass a class that extends ispasp.select.Selector"),  # type: ignore[type-var]
        (lambda: register(lambda s: s), "pass a class that extends ispasp.select.Selector"),  # type: ignore[type-var]
        (lambda: register_statistic(Doubled), r"there is a statistic 'magnitude' already \(Magnitude\): rename it"),
        (lambda: register_statistic(Reserved), "Reserved.name is 'task': give the class a name of its own"),
        (lambda: register_statistic(Named), "pass a class that extends ispasp.select.Statistic"),  # type: ignore
        (lambda: measure(LinearConsumer(torch.eye(4)), X, ["sensitivity"]), r"unknown statistic \['sensitivity'\]"),
        (lambda: Reading(LinearConsumer(torch.eye(4)), X), "a Reading got a Tensor: pass statistics such as Moment"),  # type: ignore
        (lambda: Reading(LinearConsumer(torch.eye(4)), Moment({}, 0), Moment({}, 0)), "two statistics of one name"),
    ],
)
def test_what_cannot_be_registered(act: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        act()


def test_a_notebook_may_run_its_cell_again() -> None:
    energy(), loudest()
    assert (energy(), loudest()) == (STATISTICS["energy"], METHODS["loudest"])
