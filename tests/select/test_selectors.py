"""Properties of every selector: one suite over all names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

import ispasp
from ispasp.engine import measure
from ispasp.select import Selector, select_units, selector
from ispasp.select.evidence import total_energy
from ispasp.types import Consumer, ConvConsumer, Fisher, LinearConsumer, Producer, Reading, Sensitivity, Statistics
from ispasp.types.statistics import measurable
from support.problems import Problem, problems

MEASURED = tuple(measurable())
VARIANTS: dict[str, Selector] = {
    **{name: selector(name) for name in ispasp.methods()},
    "ispasp by magnitude": ispasp.select.ISpaSP(rank="magnitude"),
    "ispasp by mini-batch": ispasp.select.ISpaSP(minibatches=True),
    "gfs of some": ispasp.select.GFS(candidates=3),
    "obs with swaps": ispasp.select.OBS(swaps=5),
    "coreset drawn": ispasp.select.Coreset(sample=True),
    "pfp drawn": ispasp.select.PFP(sample=True),
}
DRAWING = (
    "random",
    "gfs of some",
    "coreset drawn",
    "pfp drawn",
)  # they draw indices, which other names for the units do not follow
CHOOSING = [name for name in ispasp.methods() if name not in DRAWING]
FEW = settings(max_examples=max(1, settings.default.max_examples // 3))  # there are many methods


def needing(*statistics: str) -> list[str]:
    return [name for name in CHOOSING if set(selector(name).needs) & set(statistics)]


def producers(problem: Problem) -> tuple[Producer, ...]:
    """Two layers that make the units together, each with a BatchNorm."""
    g = torch.Generator().manual_seed(problem.seed)
    unit_of = torch.arange(problem.units).repeat_interleave(problem.channels_per_unit)
    return tuple(
        Producer(torch.randn(len(unit_of), fan_in, generator=g), unit_of, torch.randn(len(unit_of), generator=g))
        for fan_in in (5, 3)
    )


def sensitivity(problem: Problem, layer: torch.nn.Module, H: Tensor) -> Sensitivity:
    """Of half the squared output, from the definition."""
    H = H.clone().requires_grad_()
    (0.5 * layer(H).square().sum()).backward()
    effect = (H.detach() * H.grad).reshape(len(H), problem.units, -1).sum(2).abs()  # (examples, units)
    return Sensitivity(effect.sum(0), len(H))


def alike(consumer: Consumer, examples: int) -> Fisher:
    """All outputs matter, some twice as much as others."""
    return Fisher(examples * (1.0 + torch.arange(consumer.outputs) % 2), examples)


def complete(problem: Problem, H: Tensor) -> Statistics:
    """Everything that any selector asks for; every example is a mini-batch."""
    measured = problem.statistics(H, MEASURED)
    readings = tuple(
        Reading(
            reading.consumer,
            *reading.statistics.values(),
            sensitivity(problem, layer, H),
            alike(reading.consumer, len(H)),
        )
        for reading, layer in zip(measured.readings, problem.layers, strict=True)
    )
    parts = tuple(problem.statistics(h) for h in H.split(1))
    return with_task(Statistics(problem.units, readings, producers(problem), parts=parts))


def with_task(statistics: Statistics) -> Statistics:
    """With a task whose loss is the squared error of the layer's own output."""
    E = total_energy(statistics)
    assert E is not None
    return replace(statistics, task=lambda masks, step: (((1 - masks.double()) @ E) * (1 - masks.double())).sum(1))


def relabelled(statistics: Statistics, to: list[int]) -> Statistics:
    """Unit i becomes unit to[i]; the channels stay where they are."""
    new = torch.tensor(to)
    old = torch.argsort(new)

    def rename(reading: Reading) -> Reading:
        felt = [
            replace(taken, total=taken.total[old]) if isinstance(taken, Sensitivity) else taken
            for taken in reading.statistics.values()
        ]
        return Reading(replace(reading.consumer, units=new[reading.consumer.unit_of()]), *felt)

    made = tuple(replace(producer, units=new[producer.unit_of()]) for producer in statistics.producers)
    parts = tuple(replace(part, readings=tuple(map(rename, part.readings))) for part in statistics.parts)
    return with_task(Statistics(statistics.units, tuple(map(rename, statistics.readings)), made, parts=parts))


@pytest.mark.parametrize("name", VARIANTS)
@FEW
@given(problem=problems(), keep=st.one_of(st.floats(0.01, 1.0), st.integers(1, 12)))
def test_right_count_sorted_and_repeatable(name: str, problem: Problem, keep: float | int) -> None:
    if isinstance(keep, int):
        keep = min(keep, problem.units)
    statistics = complete(problem, problem.data(3))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    selection = VARIANTS[name].select(statistics, keep)
    assert torch.equal(state, torch.get_rng_state())
    assert len(selection.kept) == ispasp.select.units_to_keep(keep, problem.units)
    assert list(selection.kept) == sorted(set(selection.kept))
    torch.manual_seed(1)  # the seed of a method is its own
    assert selection == VARIANTS[name].select(statistics, keep)
    assert selection.steps[-1].kept == selection.kept
    # mini-batches have first moments only
    claimed = selection.moment_residuals if VARIANTS[name].parts else selection.residuals
    assert None not in claimed


@pytest.mark.parametrize("name", VARIANTS)
@FEW
@given(problem=problems(), data=st.data())
def test_the_path_is_what_select_keeps_at_each_width(name: str, problem: Problem, data: st.DataObject) -> None:
    widths = data.draw(st.lists(st.integers(1, problem.units), min_size=1, max_size=4, unique=True))
    statistics, method = complete(problem, problem.data(3)), VARIANTS[name]
    assert method.path(statistics, widths) == [method.select(statistics, width).kept for width in widths]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in DRAWING])
@FEW
@given(problem=problems(), s=st.integers(1, 12), data=st.data())
def test_permuting_units_permutes_the_choice(name: str, problem: Problem, s: int, data: st.DataObject) -> None:
    assume(name != "fpgm" or problem.units != 2)  # two filters are always as far from each other
    s = min(s, problem.units)
    to = data.draw(st.permutations(range(problem.units)))
    statistics = complete(problem, problem.data(40) + 0.01)  # no dead units: ties go by index, which this changes
    scores = VARIANTS[name].select(statistics, s).scores
    assume(name != "pfp" or len(set(scores)) == len(scores))  # it has a largest value, which several units may reach
    here = VARIANTS[name].select(statistics, s).kept
    there = VARIANTS[name].select(relabelled(statistics, to), s).kept
    assert sorted(to[i] for i in here) == list(there)


@pytest.mark.parametrize("name", ispasp.methods())
@FEW
@given(problem=problems())
def test_parts_of_the_data_add_up(name: str, problem: Problem) -> None:
    a, b = problem.data(2, 0), problem.data(3, 1)
    merged = with_task(complete(problem, a) + complete(problem, b))
    whole = complete(problem, torch.cat([a, b]))
    assert selector(name).select(merged, 0.4).kept == selector(name).select(whole, 0.4).kept


@pytest.mark.parametrize("name", [name for name in ispasp.methods() if name not in ("taylor", "gfs", "obs-fisher")])
@FEW  # the others take a loss
@given(problem=problems(), s=st.integers(1, 12))
def test_data_path_equals_statistics_path(name: str, problem: Problem, s: int) -> None:
    s, H = min(s, problem.units), problem.data(3)
    Hs = [problem.as_consumer_gets(A, H) for A in problem.consumers]
    by_data = select_units(problem.consumers, Hs, s, name, producers=producers(problem))
    by_statistics = selector(name).select(complete(problem, H), s)
    assert by_data.kept == by_statistics.kept
    assert_close(by_data.residuals, by_statistics.residuals, rtol=1e-6, atol=1e-6)


@FEW
@given(problem=problems(), s=st.integers(1, 12))
def test_gfs_that_follows_the_layer_is_gfs_local(problem: Problem, s: int) -> None:
    statistics = complete(problem, problem.data(40) + 0.01)  # no dead units: their losses are equal but for rounding
    found = VARIANTS["gfs"].select(statistics, min(s, problem.units))
    assert found.kept == VARIANTS["gfs-local"].select(statistics, min(s, problem.units)).kept


def shapes() -> dict[str, tuple[list[Consumer], Tensor, int]]:
    """Consumers of 12 units with positive weights, activations with channels first, and channels per unit."""
    g = torch.Generator().manual_seed(0)

    def rand(*size: int) -> Tensor:
        return torch.rand(size, generator=g, dtype=torch.float64)

    heads = LinearConsumer(rand(5, 36), units=torch.arange(12).repeat_interleave(3))
    conv, linear = ConvConsumer(rand(4, 12, 3, 3)), LinearConsumer(rand(5, 12))
    return {
        "linear": ([linear], rand(60, 12), 1),
        "heads": ([heads], rand(60, 36), 3),
        "conv": ([conv], rand(6, 12, 6, 6), 1),
        "two": ([conv, linear], rand(6, 12, 6, 6), 1),
    }


def measured(shape: str, factor: Tensor, made: Producer | None = None) -> Statistics:
    """Statistics of a shape whose unit i is scaled by factor[i]; the sensitivity is that of the summed output."""
    consumers, H, per_unit = shapes()[shape]
    H = H * factor.repeat_interleave(per_unit).reshape(-1, *(1,) * (H.ndim - 2))
    readings = []
    for A in consumers:
        X = (H if isinstance(A, ConvConsumer) else H.movedim(1, -1)).clone().requires_grad_()
        A(X).sum().backward()
        effect = (X.detach() * X.grad).movedim(1 if isinstance(A, ConvConsumer) else -1, 1)
        effect = effect.reshape(len(H), 12, -1).sum(2).abs().sum(0)
        taken = measure(A, X, MEASURED).statistics.values()
        readings.append(Reading(A, *taken, Sensitivity(effect, len(H)), alike(A, len(H))))
    return with_task(Statistics(12, tuple(readings), () if made is None else (made,)))


ALIVE = torch.arange(12) % 3 == 0


@pytest.mark.parametrize("shape", shapes())
@pytest.mark.parametrize("name", needing(*MEASURED, "sensitivity", "task"))
def test_units_that_are_never_active_go_first(name: str, shape: str) -> None:
    assert selector(name).select(measured(shape, ALIVE.double()), 4).kept == (0, 3, 6, 9)
    kept = set(selector(name).select(measured(shape, ALIVE.double()), 6).kept)
    assert kept > {0, 3, 6, 9}  # and where too few are alive, all of those stay


@pytest.mark.parametrize("shape", shapes())
@pytest.mark.parametrize("name", needing("producers"))
def test_units_with_zero_weights_go_first(name: str, shape: str) -> None:
    g = torch.Generator().manual_seed(1)
    alive = ALIVE.repeat_interleave(2)  # two rows per unit
    made = Producer(
        torch.randn(24, 20, generator=g) * alive[:, None],
        torch.arange(12).repeat_interleave(2),
        (torch.rand(24, generator=g) + 0.5) * alive,
    )
    assert selector(name).select(measured(shape, torch.ones(12), made), 4).kept == (0, 3, 6, 9)


def test_every_method_but_random_is_asked_for_dead_and_for_planted_units() -> None:
    assert {*needing(*MEASURED, "sensitivity", "task"), *needing("producers"), "random"} == set(ispasp.methods())


@pytest.mark.parametrize("name", needing("producers"))
def test_planted_weights_are_found(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    planted = torch.full((12,), 0.02)
    planted[[1, 4, 8, 11]] = 1.0
    made = Producer(
        torch.randn(12, 20, generator=g) * planted[:, None], scale=torch.randn(12, generator=g).sign() * planted
    )
    assert selector(name).select(measured("linear", torch.ones(12), made), 4).kept == (1, 4, 8, 11)


@pytest.mark.parametrize("shape", shapes())
@pytest.mark.parametrize("name", [name for name in needing(*MEASURED, "sensitivity", "task") if name != "ispasp"])
def test_planted_units_are_found(name: str, shape: str) -> None:
    planted = torch.full((12,), 0.02, dtype=torch.float64)
    planted[[1, 4, 8, 11]] = 1.0
    assert selector(name).select(measured(shape, planted), 4).kept == (1, 4, 8, 11)


def test_i_spasp_finds_planted_units_where_the_consumer_is_an_isometry() -> None:
    # Its importance of unit i counts what all others put into the outputs that i feeds. So it needs what its theorem
    # asks for; with the positive, coherent weights of `shapes` it misses planted units that all others find.
    A = LinearConsumer(torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)))[0])
    planted = torch.full((12,), 0.02)
    planted[[1, 4, 8, 11]] = 1.0
    H = shapes()["linear"][1] * planted
    assert select_units(A, H, 4).kept == (1, 4, 8, 11)
    assert select_units(shapes()["linear"][0], H, 4).kept != (1, 4, 8, 11)


@pytest.mark.parametrize("name", needing("gram", "spread", "sensitivity", "task"))
def test_units_that_consumers_ignore_go_first(name: str) -> None:
    A, H, _ = shapes()["linear"]
    weight = A[0].weight * torch.where(ALIVE, 1.0, 0.02)
    reading = measure(LinearConsumer(weight), H, MEASURED)
    effect = (H * (weight.sum(0))).abs().sum(0)
    taken = reading.statistics.values()
    felt = Reading(reading.consumer, *taken, Sensitivity(effect, len(H)), alike(reading.consumer, len(H)))
    statistics = with_task(Statistics(12, (felt,)))
    assert selector(name).select(statistics, 4).kept == (0, 3, 6, 9)


@pytest.mark.parametrize("name", needing("gram"))
def test_keeping_everything_leaves_no_error(name: str) -> None:
    selection = selector(name).select(measured("two", torch.ones(12)), 1.0)
    assert selection.kept == tuple(range(12))
    assert selection.residuals[-1] == 0.0


@pytest.mark.parametrize("name", ispasp.methods())
def test_a_method_is_final_frozen_and_named(name: str) -> None:
    method = selector(name)
    assert isinstance(method, Selector)
    assert method.name == name
    assert method == selector(name)
    assert hash(method) == hash(selector(name))
    assert set(method.needs) <= {*MEASURED, "sensitivity", "fisher", "producers", "task"}
    assert method.factors(measured("linear", torch.ones(12)), (0, 1)) == () or name in ("thinet", "gfs-convex")


@pytest.mark.parametrize("name", ispasp.methods())
def test_a_method_names_its_paper_what_it_needs_and_what_it_costs(name: str) -> None:
    told = type(selector(name)).__doc__ or ""
    assert re.search(r"\b(19|20)\d\d\)", told)
    assert re.search(r"\bNeeds\b", told)
    assert re.search(r"\bcosts\b", told, re.IGNORECASE)


def test_random_depends_on_its_seed_only() -> None:
    statistics = Statistics(20, (ispasp.select.Reading(LinearConsumer(torch.eye(20))),))
    draws = {ispasp.select.Random(seed=seed).select(statistics, 5).kept for seed in range(20)}
    state = torch.get_rng_state()
    assert len(draws) > 10
    assert ispasp.select.Random(seed=3).select(statistics, 5).kept in draws
    assert torch.equal(state, torch.get_rng_state())
