"""Two and three processes that prune together, one of which dies, fails or disagrees.

Those that are left end in bounded time: with the same plan and the same weights, or with an IspaspError and the model
as it was.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ispasp
from soak.case import Case, Wrong, check
from soak.options import random_options
from soak.state import check_same, fingerprint, process_unchanged, weights
from support.nets import Encoder, ResNet, alive

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (lambda: alive(ResNet(small=True)).float(), (3, 9, 9)),
    "encoder": (lambda: alive(Encoder(layers=1)).float(), (6, 12)),
}
TIMEOUT = 15.0  # seconds that a rank waits for the others
LIMIT = 150.0  # seconds that all may take, on a busy machine


def run(case: Case) -> None:
    size = case.chosen("ranks", 2, 3)
    name = case.chosen("network", *NETWORKS)
    options = random_options(case)
    options |= {"timeout": TIMEOUT}
    keep = case.chosen("keep", 0.5, 0.3, ispasp.Params(0.6)) if options["order"] != "global" else 0.5
    fault = case.chosen("fault", "none", "kill", "kill", "kill", "batch", "weights", "options", "empty", "nan")
    guilty = case.chosen("guilty", *range(size))
    delay = case.rng.uniform(0, 3.0)
    children = []
    for rank in range(size):
        seed = case.rng.randrange(10**6)
        child = os.fork()
        if child == 0:
            one_rank(case, rank, size, name, keep, options, fault if rank == guilty else "none", seed)
        children.append(child)
    if fault == "kill":
        wait_for((case.folder / f"ready-{guilty}").exists, children)
        time.sleep(delay)
        os.kill(children[guilty], signal.SIGKILL)
    ended = wait_for(lambda: False, children)
    check(ended, f"a rank has not ended after {LIMIT:.0f} s")
    told = {rank: read(case.folder / f"told-{rank}") for rank in range(size)}
    judge(case, told, fault, guilty)


def one_rank(
    case: Case, rank: int, size: int, name: str, keep: Any, options: dict[str, Any], fault: str, seed: int
) -> NoReturn:
    """Prune as one rank, and write down how it ended."""
    told: dict[str, Any] = {}
    try:
        told = pruned(case, rank, size, name, keep, options, fault, seed)
    except BaseException as error:
        told = {"crash": traceback.format_exc(), "error": type(error).__name__}
    finally:
        fresh = case.folder / f"told-{rank}.new"
        fresh.write_text(json.dumps(told))
        fresh.replace(case.folder / f"told-{rank}")
        time.sleep(0.2)
        os._exit(0)


def pruned(
    case: Case, rank: int, size: int, name: str, keep: Any, options: dict[str, Any], fault: str, seed: int
) -> dict[str, Any]:
    make, shape = NETWORKS[name]
    model = make()
    if fault == "weights":
        with torch.no_grad():
            next(iter(model.parameters())).add_(0.1)
    if fault == "options":
        keep, options = (0.7, options) if case.chance(0.5) else (keep, {**options, "compensate": _other(options)})
    dist.init_process_group("gloo", init_method=f"file://{case.folder}/store", rank=rank, world_size=size)
    (case.folder / f"ready-{rank}").touch()
    before = fingerprint(model)
    try:
        with process_unchanged("prune_"):
            result = ispasp.prune_(model, batches(shape, rank, fault, seed), keep, **options)
    except ispasp.IspaspError as error:
        check_same(before, fingerprint(model), "the model of a rank that failed")
        return {"refused": type(error).__name__, "message": str(error)}
    kept = {key: list(units) for key, units in result.plan.kept.items()}
    return {"kept": kept, "weights": {key: value[2] for key, value in weights(result.model).items()}}


def _other(options: dict[str, Any]) -> str | None:
    return "local" if options["compensate"] is None else None


def batches(shape: tuple[int, ...], rank: int, fault: str, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if fault == "empty":
        return
    for number in range(1 + rank % 2 + 1):
        batch = torch.randn(4 + rank, *shape, generator=generator)
        if fault == "nan":
            batch[0] = torch.nan
        if fault == "batch" and number == seed % 2:
            raise ValueError("planted")
        yield batch


def wait_for(done: Callable[[], bool], children: list[int]) -> bool:
    """Wait until `done`, or until all processes have ended."""
    end = time.monotonic() + LIMIT
    running = set(children)
    while running and not done():
        if time.monotonic() > end:
            return False
        for child in list(running):
            try:
                if os.waitpid(child, os.WNOHANG)[0]:
                    running.discard(child)
            except ChildProcessError:
                running.discard(child)
        time.sleep(0.02)
    return True


def read(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text())) if path.exists() else None


def judge(case: Case, told: dict[int, dict[str, Any] | None], fault: str, guilty: int) -> None:
    """Who is left agrees, or was told why not."""
    case.facts["ended"] = f"{fault}: {', '.join(sorted({_how(said) for said in told.values()}))}"
    for rank, said in told.items():
        if said is None:
            check(fault == "kill" and rank == guilty, f"rank {rank} ended without a word")
        elif "crash" in said and not ("planted" in said["crash"] and rank == guilty):
            raise Wrong(f"rank {rank}: {said['crash']}")
    well = {rank: said for rank, said in told.items() if said and "kept" in said}
    refused = {rank: said for rank, said in told.items() if said and "refused" in said}
    check(
        len({json.dumps(said, sort_keys=True) for said in well.values()}) <= 1, f"ranks {list(well)} have other models"
    )
    if fault in ("weights", "options", "empty", "batch"):  # with NaN a method that looks at weights only ends well
        check(not well, f"ranks {list(well)} ended well, though rank {guilty} has {fault}")
    if fault == "none" and refused:
        classes = {said["refused"] for said in refused.values()}
        check(len(refused) == len(told), f"only ranks {list(refused)} refuse: {refused}")
        check(classes != {"DistributedError"}, f"all say that another rank failed: {refused}")


def _how(said: dict[str, Any] | None) -> str:
    if said is None:
        return "killed"
    return str(said.get("refused", said.get("error", "well")))
