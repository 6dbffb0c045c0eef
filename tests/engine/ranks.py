"""Real processes for test_team.py: `python ranks.py FOLDER` runs every scenario and writes what each rank saw.

One program imports torch once and forks the ranks of all scenarios, so the whole costs a few seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ispasp.engine import measure
from ispasp.engine.team import Team, team
from ispasp.engine.wire import sums
from ispasp.select.ispasp import ISpaSP
from ispasp.types import ConvConsumer, LinearConsumer, Reading, Statistics
from ispasp.types.consumer import Geometry
from ispasp.types.statistics import Sensitivity

UNITS, SIZE = 12, 3
SIZES = ((5, 5), (7, 6), (5, 5))  # of the maps that each rank sees


def readers() -> tuple[ConvConsumer, LinearConsumer]:
    """Two consumers of one hidden dimension."""
    g = torch.Generator().manual_seed(0)
    conv = torch.randn(4, UNITS, 3, 3, generator=g, dtype=torch.float64)
    linear = torch.randn(6, UNITS, generator=g, dtype=torch.float64)
    return ConvConsumer(conv, geometry=Geometry(padding=(1, 1))), LinearConsumer(linear)


def shard(rank: int) -> Statistics:
    """Statistics of the data of one rank."""
    g = torch.Generator().manual_seed(100 + rank)
    H = torch.randn(3 + rank, UNITS, *SIZES[rank], generator=g, dtype=torch.float64).relu()
    conv, linear = readers()
    first = measure(conv, H, ("moment", "magnitude", "gram"))
    felt = Sensitivity(H.sum((0, 2, 3)), examples=len(H))
    return Statistics(
        UNITS,
        (
            Reading(conv, *first.statistics.values(), felt),
            measure(linear, H.mean((2, 3)), ("moment", "gram")),
        ),
    )


def without_data() -> Statistics:
    """What a rank has whose shard is empty."""
    return Statistics(UNITS, tuple(Reading(reader) for reader in readers()))


def described(statistics: Statistics) -> dict[str, Any]:
    """Every sum to the last bit, examples, and the units that i-SpaSP keeps."""
    return {
        "sums": {str(key): total.tolist() for key, total in sums(statistics).items()},
        "examples": [[r.moment.examples, r.gram.examples] for r in statistics.readings],
        "kept": ISpaSP(iterations=5).select(statistics, keep=4).kept,
    }


def outcome(act: Callable[[], Any]) -> dict[str, Any]:
    """What a call returned, or the error it raised."""
    try:
        return {"value": act()}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


def in_block(ranks: Team, act: Callable[[], Any], *places: str) -> dict[str, Any]:
    """The outcome of a call inside nested blocks."""

    def run() -> Any:
        with ExitStack() as blocks:
            for place in places:
                blocks.enter_context(ranks.together(place))
            return act()

    return outcome(run)


def healthy(rank: int) -> dict[str, Any]:
    """Everything that goes well, and failures that all ranks hear of and survive."""
    ranks = team(timeout_seconds=30)
    assert ranks.size > 1
    seen: dict[str, Any] = {"sum": described(ranks.sum(shard(rank)))}
    seen["empty"] = described(ranks.sum(shard(rank) if rank == 0 else without_data()))

    def fail_on(guilty: int) -> Callable[[], Any]:
        def act() -> Any:
            if rank == guilty:
                raise ValueError(f"bad data in the shard of {rank}")
            return ranks.total(1)

        return act

    empty: dict[str, str] = {}
    seen["fails early"] = in_block(ranks, fail_on(1), "the block")
    seen["fails nested"] = in_block(ranks, fail_on(2), "the outer block", "the inner block")
    seen["fails late"] = in_block(ranks, lambda: empty["weight"] if rank == 1 else "done", "the block")
    seen["all fail"] = in_block(ranks, lambda: empty["weight"], "the block")
    seen["well"] = in_block(ranks, lambda: "done", "the outer block", "the inner block")
    seen["gather"] = outcome(lambda: ranks.gather("the names", [rank, "a"]))
    seen["out of step"] = outcome(lambda: ranks.total(1) if rank else ranks.gather("the names", None))
    seen["other shapes"] = outcome(lambda: ranks.sum_tensors({"x": torch.ones(2 + rank)}))

    given = {"x": torch.tensor([[0.1 * (rank + 1)]], dtype=torch.float64), "nothing": torch.empty(0, 3)}
    seen["sum of tensors"] = {name: [x.tolist(), str(x.dtype)] for name, x in ranks.sum_tensors(given).items()}
    seen["unchanged"] = given["x"].item()
    seen["same"] = {name: [x.tolist(), str(x.dtype)] for name, x in ranks.same(own_choice(rank)).items()}
    seen["total"] = [ranks.total(rank + 2**60), ranks.total(0.5 * rank)]
    ranks.close()
    seen["closed"] = outcome(lambda: ranks.total(1))
    with team(timeout_seconds=30) as again:
        seen["again"] = again.total(1)
    return seen


def own_choice(rank: int) -> dict[str, Tensor]:
    """Decisions that differ in everything."""
    kept = torch.tensor([1, 4, 2**40]) if rank == 0 else torch.tensor([0])
    other = {"only rank 0": torch.tensor(True)} if rank == 0 else {"only others": torch.ones(2)}
    return {"kept": kept, "weight": torch.full((2, 1), 1 / (rank + 3), dtype=torch.float64), **other}


def dies(rank: int) -> dict[str, Any]:
    """Rank 1 is gone in the middle of a block."""
    ranks = team(timeout_seconds=20)
    ranks.total(1)
    if rank == 1:
        os._exit(1)
    seen = {"first": in_block(ranks, lambda: ranks.sum(shard(rank)), "the block")}
    seen["then"] = outcome(lambda: ranks.total(1))
    ranks.close()
    return seen


def hangs(rank: int) -> dict[str, Any]:
    """Rank 1 does not come."""
    ranks = team(timeout_seconds=2)
    ranks.total(1)
    if rank == 1:
        time.sleep(600)
    return {"first": in_block(ranks, lambda: ranks.sum(shard(rank)), "the block")}


def absent(rank: int) -> dict[str, Any]:
    """Rank 1 does not even join."""
    if rank == 1:
        time.sleep(600)
    return {"first": outcome(lambda: team(timeout_seconds=2))}


def interrupted(rank: int) -> dict[str, Any]:
    """Rank 0 is stopped by Ctrl-C while it waits; rank 1 comes later."""
    ranks = team(timeout_seconds=60)
    ranks.total(1)
    if rank == 1:
        time.sleep(1)
        return {"first": in_block(ranks, lambda: ranks.total(1), "the block")}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have been told to ignore it
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with ranks.together("the block"):
            ranks.total(1)
    except KeyboardInterrupt:
        return {"first": "stopped"}
    return {"first": "went on"}


SCENARIOS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "healthy": (healthy, SIZE),
    "dies": (dies, 2),
    "hangs": (hangs, 2),
    "absent": (absent, 2),
    "interrupted": (interrupted, 2),
}


def run(name: str, rank: int, folder: Path) -> None:
    """One rank of a scenario."""
    act, size = SCENARIOS[name]
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.store", rank=rank, world_size=size)
        seen = act(rank)
    except BaseException:
        seen = {"crash": traceback.format_exc()}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # at once: a group with a dead member may take its time to go


def main(folder: Path) -> None:
    """All scenarios at the same time; ranks that sleep are ended when the others are done."""
    fork = multiprocessing.get_context("fork")
    started = {
        (name, rank): fork.Process(target=run, args=(name, rank, folder))
        for name, (_, size) in SCENARIOS.items()
        for rank in range(size)
    }
    for process in started.values():
        process.start()
    asleep = [started.pop(("hangs", 1)), started.pop(("absent", 1))]
    for process in started.values():
        process.join()
    for process in asleep:
        process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
