"""Real processes for test_prune_ranks.py, each with its own shard of the batches.

`python prune_ranks.py FOLDER` forks two ranks over gloo; under torchrun the process is one rank itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import ispasp
from ispasp.select import ISpaSP
from ispasp.select.base import selector
from support.leave import leave
from support.nets import Encoder, ResNet, alive

SIZE = 2
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (lambda: alive(ResNet(small=True)).float(), (3, 9, 9)),
    "encoder": (lambda: alive(Encoder(layers=1)).float(), (6, 12)),
}


def squares(output: Tensor, batch: Any) -> Tensor:  # a loss that needs no labels
    return output.square().sum()


# One method of all that need the same statistics: ranks share these, and each chooses by them.
METHODS = {selector(name).needs: name for name in ispasp.methods()}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("encoder" if number % 2 else "resnet", {"method": name, "compensate": None, "keep": 0.34})
        for number, name in enumerate(METHODS.values())
    },
    "slimming": ("resnet", {"method": "slimming", "compensate": None, "keep": 0.34}),  # it needs BatchNorms
    "taylor": ("resnet", {"method": "taylor", "compensate": None, "loss": squares}),
    "minibatches": ("resnet", {"method": ISpaSP(minibatches=True), "compensate": None, "keep": 0.2, "scope": "all"}),
    "ispasp dense": ("resnet", {"method": "ispasp", "compensate": "dense", "keep": 0.34, "scope": "all"}),
    "l1 dense": ("resnet", {"method": "l1", "compensate": "dense", "memory": 1}),
    "obs dense": ("encoder", {"method": "obs", "compensate": "dense"}),
    "topk local": ("encoder", {"method": "topk", "compensate": "local", "order": "oneshot"}),
    "budget": ("resnet", {"method": "ispasp", "compensate": None, "keep": ispasp.Params(0.6)}),
    "recalibrated": ("resnet", {"method": "l1", "compensate": None, "recalibrate": True}),
}


def batches(network: str, sizes: Sequence[int] = (4, 4, 3)) -> list[Tensor]:
    """All the data; sizes differ, and the ranks have different numbers of batches."""
    g = torch.Generator().manual_seed(11)
    shape = NETWORKS[network][1]
    return [torch.randn(n, *shape, generator=g) for n in sizes]


def of_one_process(case: str) -> list[Tensor]:
    """All the data of a case. `gfs` takes a batch at every step, which is that of both ranks together."""
    if case != "gfs":
        return batches(CASES[case][0])
    return [torch.cat(two) for two in zip(*(of_rank(case, rank) for rank in range(SIZE)), strict=True)]


def of_rank(case: str, rank: int) -> list[Tensor]:
    network = CASES[case][0]
    return batches(network, (4, 4, 3, 3))[rank::SIZE] if case == "gfs" else shard(network, rank)


def shard(network: str, rank: int) -> list[Tensor]:
    return batches(network)[rank::SIZE]


def pruned(case: str, data: list[Tensor]) -> ispasp.Result:
    network, options = CASES[case]
    return ispasp.prune(NETWORKS[network][0](), data, timeout=60, progress=False, **options)


def told(result: ispasp.Result) -> dict[str, Any]:
    return {
        "kept": {name: list(kept) for name, kept in result.plan.kept.items()},
        "errors": {layer.name: [layer.relative_error, layer.uncompensated_error] for layer in result.layers},
    }


def failing(rank: int, data: Callable[[], list[Tensor]]) -> dict[str, Any]:
    model = NETWORKS["resnet"][0]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        ispasp.prune_(model, data(), timeout=60, progress=False)
    except Exception as error:
        same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        return {"error": type(error).__name__, "text": str(error), "as before": same, "rank": rank}
    return {"error": None}


def not_a_number(rank: int) -> list[Tensor]:
    data = [batch.clone() for batch in shard("resnet", rank)]
    if rank == 1:
        data[0][1, 2, 3] = torch.nan
    return data


def broken(rank: int) -> dict[str, Any]:
    """Rank 0 finds that its surgery went wrong."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("ispasp.result.Evidence.holds", False)
        return failing(rank, lambda: shard("resnet", rank))


def work(rank: int, folder: Path, cases: list[str]) -> None:
    seen: dict[str, Any] = {}
    for case in cases:
        result = pruned(case, of_rank(case, rank))
        seen[case] = told(result)
        save_file(dict(result.model.state_dict()), folder / f"{case}-{rank}.safetensors")
    if len(cases) > 1:
        seen["nan"] = failing(rank, lambda: not_a_number(rank))
        seen["empty"] = failing(rank, lambda: shard("resnet", rank) if rank == 0 else [])
        seen["other shape"] = failing(rank, lambda: [torch.randn(3, 4, 9, 9)] if rank else shard("resnet", 0))
        seen["broken"] = broken(rank)
        seen["well again"] = told(pruned("ispasp", shard("resnet", rank)))
    (folder / f"{rank}.json").write_text(json.dumps(seen))


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
        work(rank, folder, list(CASES))
    except BaseException:
        (folder / f"{rank}.json").write_text(json.dumps({"crash": traceback.format_exc()}))
    os._exit(0)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        work(dist.get_rank(), folder, ["ispasp dense"])
        leave(folder, dist.get_rank(), SIZE)
    pruned("ispasp", shard("resnet", 0))  # what the first export imports is imported once
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, folder)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
