"""Training that is killed, interrupted or fails, and goes on: it ends in the same parameters, to the bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ispasp
from ispasp._finetune import FinetuneResult
from soak.case import Case, check
from soak.state import check_same, process_unchanged, weights

EXAMPLES = 40


class Stopped(Exception):  # noqa: N818
    """What ends a training half-way."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments with the generators of torch, NumPy and Python."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.x, self.y = data

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(6) + float(np.random.rand()) + random.gauss(0, 1)
        return self.x[index] + 0.1 * noise, self.y[index]


def data(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(EXAMPLES, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def loader(kind: str, seed: int) -> Any:
    x, y = data(seed)
    own = torch.Generator().manual_seed(seed)
    made: dict[str, Callable[[], Any]] = {
        "list": lambda: list(zip(x.split(8), y.split(8), strict=True)),
        "in order": lambda: DataLoader(TensorDataset(x, y), batch_size=8),
        "shuffled": lambda: DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True),
        "own generator": lambda: DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=own),
        "augmented": lambda: DataLoader(Noisy((x, y)), batch_size=8, shuffle=True),
    }
    return made[kind]()


def network(seed: int) -> nn.Sequential:
    """A pruned network with a BatchNorm and a dropout."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))
    return ispasp.prune(model, [torch.randn(8, 6)], 0.5, progress=False).model  # type: ignore[return-value]


def run(case: Case) -> None:
    seed = case.rng.randrange(10**6)
    kind = case.chosen("loader", "list", "in order", "shuffled", "own generator", "augmented")
    options: dict[str, Any] = {
        "epochs": case.pick(1.0, 1.4, 2.0, 3),
        "checkpoint_every": case.pick(1, 2, 3, 5),
        "accumulate": case.pick(1, 1, 2, 3),
        "seed": case.rng.randrange(100),
        "progress": False,
        "recipe": case.pick(ispasp.train.Sgd(lr=0.1), ispasp.train.AdamW(lr=0.01)),
    }
    case.options |= options
    teacher = case.chosen("teacher", False, True)
    fault = case.chosen("fault", "loss", "evaluate", "batch", "kill", "kill", "ctrl-c")

    def train(folder: Path | None, tick: Callable[[str], None]) -> tuple[nn.Module, FinetuneResult]:
        model = network(seed)

        def loss(output: Tensor, batch: Any) -> Tensor:
            tick("loss")
            return functional.cross_entropy(output, batch[1])

        def evaluate(model: nn.Module) -> float:
            tick("evaluate")
            with torch.no_grad():
                return float(model(data(seed)[0]).sum())

        batches = loader(kind, seed)
        if fault == "batch" and kind == "list":
            batches = Ticking(batches, tick)
        more: dict[str, Any] = {"teacher": ispasp.train.Teacher(network(seed + 1))} if teacher else {}
        with process_unchanged("finetune"):
            result = ispasp.finetune(model, batches, checkpoint=folder, loss=loss, evaluate=evaluate, **more, **options)
        return model, result

    ticks: list[str] = []
    began = time.monotonic()
    expected, told = train(None, ticks.append)
    took = time.monotonic() - began
    folder = case.folder / "run"
    for _ in range(case.rng.randint(1, 3)):  # it may be stopped again while it goes on
        stop(case, fault, ticks, took, lambda tick: train(folder, tick))
    model, result = train(folder, lambda _: None)
    case.facts[f"resumed after {fault}"] = result.resumed > 0
    check_same(weights(expected), weights(model), "weights of a resumed training")
    check(result.losses == told.losses, f"other losses: {result.losses} instead of {told.losses}")
    check(dict(result.scores) == dict(told.scores), "other scores")
    check([p.name for p in folder.iterdir() if ".new" in p.name] == [], "a half-written checkpoint is left behind")


class Ticking:
    """A list of batches that ticks."""

    def __init__(self, batches: list[Any], tick: Callable[[str], None]) -> None:
        self.batches, self.tick = batches, tick

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.tick("batch")
            yield batch


def stop(case: Case, fault: str, ticks: list[str], took: float, train: Callable[[Callable[[str], None]], Any]) -> None:
    """Train until something happens at a random place."""
    kind = fault if fault in ticks else "loss"
    left = case.rng.randint(1, max(1, ticks.count(kind)))
    delay = case.rng.uniform(0, took)
    if fault in ("kill", "ctrl-c"):
        in_a_process(fault, delay, lambda: train(lambda _: None))
        return

    def tick(what: str) -> None:
        nonlocal left
        left -= what == kind
        if left == 0 and what == kind:
            raise Stopped

    try:
        train(tick)
    except Stopped:
        return


def in_a_process(fault: str, delay: float, train: Callable[[], Any]) -> None:
    """Train in another process, and kill or interrupt it after a while."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            train()
        finally:
            os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL if fault == "kill" else signal.SIGINT)
    os.waitpid(child, 0)
