"""Ranks that calibrate together: real processes over gloo, each with its own shard (the ranks are in ranks.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.testing import assert_close

from engine.ranks import SCENARIOS, SIZE, described, own_choice, shard
from ispasp.engine import measure
from ispasp.engine.team import team
from ispasp.engine.wire import Key, added, outline, sums
from ispasp.errors import InputError
from ispasp.types import Moment, Reading, Statistics
from support.problems import Problem, problems

Seen = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What every rank of a scenario saw; nothing hangs, or this does not return."""
    if not hasattr(os, "fork"):
        pytest.skip("the ranks are forked, which this system cannot do")
    folder = tmp_path_factory.mktemp("ranks")
    program = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(folder)]
    subprocess.run(program, check=True, timeout=120)  # noqa: S603

    def of(name: str) -> list[dict[str, Any]]:
        files = [folder / f"{name}-{rank}.json" for rank in range(SCENARIOS[name][1])]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        assert found
        for what in found:
            assert "crash" not in what, what["crash"]
        return found

    return of


def check_equal(found: dict[str, Any], whole: Statistics) -> None:
    expected = described(whole)
    assert found["examples"] == expected["examples"]
    assert found["kept"] == list(expected["kept"])
    assert found["sums"].keys() == expected["sums"].keys()
    for key, total in found["sums"].items():
        whole_sum = torch.tensor(expected["sums"][key], dtype=torch.float64)
        assert_close(torch.tensor(total, dtype=torch.float64), whole_sum, rtol=1e-13, atol=1e-13)


def test_the_sum_over_ranks_is_that_of_one_process_with_all_data(seen: Seen) -> None:
    ranks = seen("healthy")
    assert len(ranks) == SIZE
    assert len([key for key in ranks[0]["sum"]["sums"] if key.startswith("(0, 'moment'")]) == 2  # sizes differ by rank
    check_equal(ranks[0]["sum"], reduce(add, map(shard, range(SIZE))))
    for other in ranks[1:]:
        assert other["sum"] == ranks[0]["sum"]  # to the last bit


def test_a_rank_without_data_adds_nothing(seen: Seen) -> None:
    for rank in seen("healthy"):
        check_equal(rank["empty"], shard(0))


def test_plain_tensors_are_added_and_the_given_ones_left_alone(seen: Seen) -> None:
    for number, rank in enumerate(seen("healthy")):
        assert rank["sum of tensors"]["x"] == [[[pytest.approx(0.6, rel=1e-15)]], "torch.float64"]
        assert rank["sum of tensors"]["nothing"][0] == []
        assert rank["unchanged"] == 0.1 * (number + 1)
        assert rank["total"] == [3 * 2**60 + 3, 1.5]  # whole numbers stay exact


def test_every_rank_takes_over_what_rank_0_decided(seen: Seen) -> None:
    expected = {name: [x.tolist(), str(x.dtype)] for name, x in own_choice(0).items()}
    for rank in seen("healthy"):
        assert rank["same"] == expected


@pytest.mark.parametrize(
    ("what", "guilty", "own", "told"),
    [
        ("fails early", 1, "ValueError", "rank 1 failed: ValueError: bad data in the shard of 1"),
        ("fails nested", 2, "ValueError", "rank 2 failed: ValueError: bad data in the shard of 2"),
        ("fails late", 1, "KeyError", "rank 1 failed: KeyError: 'weight'"),
    ],
)
def test_a_failure_reaches_every_rank(seen: Seen, what: str, guilty: int, own: str, told: str) -> None:
    for number, rank in enumerate(seen("healthy")):
        if number == guilty:
            assert rank[what]["error"] == own
        else:
            assert rank[what]["error"] == "DistributedError"
            assert told in rank[what]["text"]
            assert "block" in rank[what]["text"]


def test_blocks_and_messages(seen: Seen) -> None:
    for rank in seen("healthy"):
        assert rank["gather"] == {"value": [[0, "a"], [1, "a"], [2, "a"]]}
        assert rank["well"] == {"value": "done"}
        assert rank["all fail"]["error"] == "KeyError"


def test_ranks_that_do_different_things_are_told_so(seen: Seen) -> None:
    for rank in seen("healthy"):
        assert rank["out of step"]["error"] == "DistributedError"
        assert "rank 0 is at the names; rank 1 is at the total" in rank["out of step"]["text"]
        assert rank["other shapes"]["error"] == "InputError"
        assert "rank 1 gives {'x': [3]}" in rank["other shapes"]["text"]


def test_a_closed_team_says_so_and_another_can_be_made(seen: Seen) -> None:
    for rank in seen("healthy"):
        assert "the team was closed" in rank["closed"]["text"]
        assert rank["again"] == SIZE


def test_a_rank_that_dies_is_an_error_on_the_others(seen: Seen) -> None:
    (rank,) = seen("dies")
    assert rank["first"]["error"] == "DistributedError"
    assert "the sum of statistics in the block failed on rank 0 of 2" in rank["first"]["text"]
    assert "Look at the output of the other ranks" in rank["first"]["text"]
    assert rank["then"]["error"] == "DistributedError"  # at once: nothing is sent over a broken team
    assert "failed before" in rank["then"]["text"]


@pytest.mark.parametrize("scenario", ["hangs", "absent"])
def test_a_rank_that_does_not_come_is_an_error_on_the_others(seen: Seen, scenario: str) -> None:
    (rank,) = seen(scenario)
    assert rank["first"]["error"] == "DistributedError"
    assert "raise the timeout (2 s)" in rank["first"]["text"]


def test_ctrl_c_ends_the_waiting(seen: Seen) -> None:
    stopped, other = seen("interrupted")
    assert stopped["first"] == "stopped"
    assert other["first"]["error"] == "DistributedError"


@given(problems(), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_agreeing_on_what_to_add_equals_adding(problem: Problem, examples: list[int]) -> None:
    needs = ("moment", "magnitude", "gram")
    parts = [problem.statistics(problem.data(n, part=k), needs) for k, n in enumerate(examples) if n]
    bare = Statistics(problem.units, tuple(Reading(A) for A in problem.consumers))
    ranks = [problem.statistics(problem.data(n, part=k), needs) if n else bare for k, n in enumerate(examples)]
    outlines = [json.loads(json.dumps(outline(rank))) for rank in ranks]

    def add_up(key: Key, own: Tensor) -> Tensor:
        return torch.stack([sums(rank).get(key, torch.zeros_like(own)) for rank in ranks]).sum(0)

    found = added(ranks[0], outlines, add_up)
    expected = reduce(add, parts) if parts else bare
    assert outline(found) == outline(expected)
    for key, total in sums(expected).items():
        assert_close(sums(found)[key], total)


def test_one_process_alone_gets_back_what_it_gave() -> None:
    with team() as alone:
        assert (alone.rank, alone.size) == (0, 1)
        given_statistics, tensors = shard(0), {"x": torch.ones(2)}
        assert alone.sum(given_statistics) is given_statistics
        assert alone.sum_tensors(tensors)["x"] is alone.same(tensors)["x"] is tensors["x"]
        assert alone.total(2.5) == 2.5
        assert alone.gather("the names", "a") == ["a"]
        with pytest.raises(KeyError), alone.together("the block"):
            raise KeyError


def test_a_launched_process_without_a_group_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="2 processes were started.*init_process_group"):
        assert team().size == 1


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(InputError, match="timeout_seconds=0"):
        team(timeout_seconds=0)


def test_moments_without_data_count_as_none() -> None:
    reading = measure(shard(0).readings[1].consumer, torch.ones(1, 12))
    nothing = Reading(reading.consumer, Moment({}, examples=0))
    assert outline(Statistics(12, (nothing,))) == []
    assert [row[-1] for row in outline(Statistics(12, (reading,)))] == [1]
