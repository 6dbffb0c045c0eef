"""Real processes for test_alike_ranks.py: `python alike_ranks.py FOLDER` forks three ranks, of which rank 1 differs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import ispasp
from ispasp.engine.team import tensor_facts

SIZE, ODD = 3, 1


class Net(nn.Module):
    """Small, with a buffer, a BatchNorm and a function that is no module."""

    def __init__(self, seed: int = 0, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.norm, self.b, self.c = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(6))
        self.act = act
        self.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.act(self.norm(self.a(x)))) * self.scale))


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 2)
        self.b.weight = self.a.weight if tied else nn.Parameter(self.a.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))


def data(rank: int, count: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 4, generator=g) for _ in range(count)]


def loader() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(12, 4, generator=g), torch.arange(12) % 2), batch_size=6)


def breaks_off(rank: int) -> Iterator[Tensor]:
    yield data(rank)[0]
    if rank == ODD:
        raise OSError("the disk is gone")
    yield data(rank)[1]


def changed(act: Callable[[nn.Module], Any], odd: bool) -> nn.Module:
    model = Net()
    if odd:
        with torch.no_grad():
            act(model)
    return model


def trained_apart(rank: int) -> Callable[[nn.Module], None]:
    def train(model: nn.Module) -> None:
        with torch.no_grad():
            model.c.bias += rank == ODD

    return train


def fails_on(rank: int) -> Callable[[nn.Module], None]:
    def train(model: nn.Module) -> None:
        if rank == ODD:
            raise ValueError("no money left for training")

    return train


class Failing(Net):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError("in the forward")
        return super().forward(x)


def prunings(rank: int) -> dict[str, Callable[[], Any]]:
    odd = rank == ODD

    def prune(model: nn.Module | None = None, batches: Any = None, keep: Any = 0.5, **options: Any) -> Any:
        given = data(rank) if batches is None else batches
        return ispasp.prune_(Net() if model is None else model, given, keep, **{"progress": False, **options})

    def bit(model: nn.Module) -> None:
        model.b.weight[3, 2] = torch.nextafter(model.b.weight[3, 2], torch.tensor(9.0))

    return {
        "seed": lambda: prune(Net(int(odd))),
        "one bit": lambda: prune(changed(bit, odd)),
        "buffer": lambda: prune(changed(lambda m: m.norm.running_mean.add_(1), odd)),
        "dtype": lambda: prune(changed(lambda m: m.norm.half(), odd)),
        "class": lambda: prune(changed(lambda m: setattr(m, "c", nn.Sequential(m.c)), odd)),
        "function": lambda: prune(Net(act=torch.tanh if odd else torch.relu)),
        "tied": lambda: prune(Tied(odd)),
        "keep": lambda: prune(keep=0.25 if odd else 0.5),
        "keep of one": lambda: prune(keep={"a": 0.5, "b": 2 + odd}),
        "units": lambda: prune(keep={"a": [0, 1 + odd]}),
        "method": lambda: prune(method="l1" if odd else "ispasp"),
        "option of the method": lambda: prune(method=ispasp.select.ISpaSP(iterations=20 - odd)),
        "compensate": lambda: prune(compensate=None if odd else "dense"),
        "order": lambda: prune(order="oneshot" if odd else "sequential"),
        "skip": lambda: prune(skip=["a"] if odd else []),
        "recalibrate": lambda: prune(recalibrate=odd),
        "loss": lambda: prune(method="gfs", loss=(lambda y, _: y.sum()) if odd else None),
        "finetune_between": lambda: prune(finetune_between=trained_apart(0) if odd else None),
        "wrong option": lambda: prune(ridge=-1.0 if odd else 0.01),
        "unknown option": lambda: prune(**({"sparsity": 0.5} if odd else {})),
        "no model": lambda: prune(3 if odd else Net()),
        "trained apart": lambda: prune(finetune_between=trained_apart(rank)),
        "failed between": lambda: prune(finetune_between=fails_on(rank)),
        "no batches": lambda: prune(batches=[] if odd else None),
        "forward raises": lambda: prune(Failing(odd)),
        "iterator raises": lambda: prune(batches=breaks_off(rank)),
        "second batch": lambda: prune(batches=[*data(rank), torch.ones(2, 5 if odd else 4)]),
        "well": lambda: prune(
            keep={"a": numpy.array([1, 3, 4]) if odd else [1, 3, 4], "b": 0.5},
            recalibrate=True,
            memory=None if odd else 10**9,
            timeout=30 + rank,
        ),
        "well between": lambda: prune(finetune_between=lambda model: model.c.bias.data.add_(1)),
        "well tied": lambda: prune(Tied(True)),
    }


def finetunings(rank: int) -> dict[str, Callable[[], Any]]:
    odd = rank == ODD

    def tune(model: nn.Module | None = None, **options: Any) -> Any:
        ispasp.finetune(Net() if model is None else model, loader(), progress=False, **options)

    return {
        "tuned seed": lambda: tune(Net(int(odd))),
        "tuned buffer": lambda: tune(changed(lambda m: m.scale.add_(1), odd)),
        "tuned epochs": lambda: tune(epochs=1 + odd),
        "tuned recipe": lambda: tune(recipe=ispasp.train.Sgd(lr=0.1 if odd else 0.01)),
        "tuned evaluate": lambda: tune(evaluate=(lambda _: 0.0) if odd else None),
        "tuned wrong": lambda: tune(epochs=-1 if odd else 1),
        "tuned frozen": lambda: tune(changed(lambda m: m.a.requires_grad_(False), odd)),
        "tuned teacher": lambda: tune(teacher=Net(1 + odd)),
        "tuned well": lambda: tune(teacher=Net(1)),
    }


def outcome(act: Callable[[], Any]) -> dict[str, Any]:
    try:
        result = act()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None, "facts": tensor_facts(result.model) if result is not None else None}


def last(rank: int) -> dict[str, Any]:
    """Rank 1 is killed in the middle of its calibration."""
    model = Net()

    def killed() -> Iterator[Tensor]:
        yield data(rank)[0]
        if rank == ODD:
            os.kill(os.getpid(), signal.SIGKILL)
        yield data(rank)[1]

    class Twice:  # no iterator, so it is read when it is needed
        def __iter__(self) -> Iterator[Tensor]:
            return killed()

    before, started = tensor_facts(model), time.monotonic()
    found = outcome(lambda: ispasp.prune_(model, Twice(), timeout=60, progress=False))
    return {**found, "as before": tensor_facts(model) == before, "seconds": time.monotonic() - started}


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # accelerate looks for them
    seen: dict[str, Any] = {}
    file = folder / f"{rank}.json"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
        for case, act in (prunings(rank) | finetunings(rank)).items():
            seen[case] = outcome(act)
        file.write_text(json.dumps(seen))
        seen["killed"] = last(rank)
    except BaseException:
        seen["crash"] = traceback.format_exc()
    file.write_text(json.dumps(seen))
    os._exit(0)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ispasp.prune(Net(), data(0), progress=False)  # what the first calls import is imported once
    import_module("accelerate")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, folder)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
