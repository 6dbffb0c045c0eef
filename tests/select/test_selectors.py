"""Properties of every selector: one suite over all names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ispasp
from ispasp.select import selector
from ispasp.types import LinearConsumer, Statistics
from support.problems import Problem, problems

NEEDS = ("moment", "magnitude", "gram")
DATA_DRIVEN = [name for name in ispasp.methods() if name != "random"]


@pytest.mark.parametrize("name", ispasp.methods())
@given(problem=problems(), keep=st.one_of(st.floats(0.01, 1.0), st.integers(1, 12)))
def test_right_count_sorted_and_repeatable(name: str, problem: Problem, keep: float | int) -> None:
    if isinstance(keep, int):
        keep = min(keep, problem.units)
    statistics = problem.statistics(problem.data(3), NEEDS)
    selection = selector(name).select(statistics, keep)
    assert len(selection.kept) == ispasp.units_to_keep(keep, problem.units)
    assert list(selection.kept) == sorted(set(selection.kept))
    assert selection == selector(name).select(statistics, keep)
    assert selection.steps[-1].kept == selection.kept
    assert all(step.residual is not None for step in (selection.start, *selection.steps))


@pytest.mark.parametrize("name", DATA_DRIVEN)
@given(problem=problems(("linear", "tokens")), s=st.integers(1, 12), data=st.data())
def test_permuting_units_permutes_the_choice(name: str, problem: Problem, s: int, data: st.DataObject) -> None:
    s = min(s, problem.units)
    order = data.draw(st.permutations(range(problem.units)))
    A, H = problem.consumers[0], problem.as_consumer_gets(problem.consumers[0], problem.data(4))
    H = H + 0.01  # no dead units: ties go by index, which a permutation changes
    here = ispasp.select_units(A.weight, H, s, name).kept
    there = ispasp.select_units(LinearConsumer(A.weight[:, order]), H[..., order], s, name).kept
    assert sorted(order[i] for i in there) == list(here)


@pytest.mark.parametrize("name", DATA_DRIVEN)
def test_dead_units_go_first(name: str) -> None:
    torch.manual_seed(0)
    H = torch.rand(50, 12) * (torch.arange(12) % 3 == 0)
    assert ispasp.select_units(torch.rand(5, 12), H, 4, name).kept == (0, 3, 6, 9)


@pytest.mark.parametrize("name", ispasp.methods())
@given(problem=problems())
def test_parts_of_the_data_add_up(name: str, problem: Problem) -> None:
    a, b = problem.data(2, 0), problem.data(3, 1)
    merged = problem.statistics(a, NEEDS) + problem.statistics(b, NEEDS)
    whole = problem.statistics(torch.cat([a, b]), NEEDS)
    assert selector(name).select(merged, 0.4).kept == selector(name).select(whole, 0.4).kept


def test_random_depends_on_its_seed_only() -> None:
    statistics = Statistics(20, (ispasp.Reading(LinearConsumer(torch.eye(20))),))
    draws = {ispasp.Random(seed=seed).select(statistics, 5).kept for seed in range(20)}
    state = torch.get_rng_state()
    assert len(draws) > 10
    assert ispasp.Random(seed=3).select(statistics, 5).kept in draws
    assert torch.equal(state, torch.get_rng_state())
