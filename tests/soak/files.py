"""Files that are damaged, and saves that are killed: what is loaded is what was saved, or it is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ispasp
from soak.case import Case, check
from soak.state import check_same, process_unchanged, weights
from soak.training import data, network

try:
    from support.files_fuzz import one_case
except ImportError:  # pragma: no cover
    one_case = None


def run(case: Case) -> None:
    kinds: dict[str, Callable[[Case], None]] = {"damage": damaged, "kill": killed, "checkpoint": damaged_checkpoint}
    if one_case is not None:
        kinds["fuzz"] = fuzzed
    kinds[case.chosen("kind", *kinds)](case)


def fuzzed(case: Case) -> None:
    """A block of the structured fuzzer's cases."""
    for _ in range(50):
        one_case(case.rng.randrange(2**31))


def dense(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.Flatten(), nn.Linear(96, 3)
    ).eval()


def result(seed: int, keep: float) -> ispasp.Result:
    return ispasp.prune(dense(seed), [torch.randn(4, 3, 4, 4)], keep, progress=False)


def damaged(case: Case) -> None:
    """Bytes are flipped, cut, doubled or moved in any file of a save."""
    folder = case.folder / "saved"
    made = result(case.rng.randrange(1000), case.pick(0.3, 0.5, 0.8))
    ispasp.save(made, folder)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    path = folder / case.pick(*names)
    case.options["file"] = path.name
    damage(case, path)
    model = dense(0)
    with case.may_refuse("load"), process_unchanged("load"):
        try:
            loaded = ispasp.load(folder, model)
        except ispasp.IspaspError:
            check_same(weights(dense(0)), weights(model), "the model given to a load that failed")
            raise
    check_same(weights(made.model), weights(loaded), "weights loaded from a damaged file")
    case.facts["unharmed"] = True


def damage(case: Case, path: Path) -> None:
    """Change a file in one of the ways that disks, networks and people change files."""
    content = bytearray(path.read_bytes())
    kind = case.chosen("damage", "flip", "flip", "cut", "drop", "double", "zeros", "noise", "empty", "missing", "swap")
    at = case.rng.randrange(max(1, len(content)))
    end = min(len(content), at + case.rng.choice((1, 4, 64, 4096)))
    if kind == "flip":
        content[at] ^= 1 << case.rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "drop":
        del content[at:end]
    elif kind == "double":
        content[at:at] = content[at:end]
    elif kind == "zeros":
        content[at:end] = bytes(end - at)
    elif kind == "noise":
        content[at:end] = case.rng.randbytes(end - at)
    elif kind == "swap":
        content[at:end] = bytes(reversed(content[at:end]))
    case.options |= {"at": at, "end": end}
    path.unlink()
    if kind != "missing":
        path.write_bytes(b"" if kind == "empty" else content)


def killed(case: Case) -> None:
    """A process that saves in a loop is killed at a random time: one of its saves is there, whole."""
    folder = case.folder / "saved"
    versions = [result(seed, 0.5) for seed in range(2)]
    ispasp.save(versions[0], folder)
    for _ in range(case.rng.randint(1, 4)):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for version in versions:
                        ispasp.save(version, folder)
            finally:
                os._exit(1)
        time.sleep(case.rng.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        check(os.waitpid(child, 0)[1] == signal.SIGKILL, "the process that saves has ended by itself")
        loaded = weights(ispasp.load(folder, dense(0)))
        check(loaded in [weights(v.model) for v in versions], "what is loaded is neither of the saves")
    ispasp.save(versions[1], folder)
    check_same(weights(versions[1].model), weights(ispasp.load(folder, dense(0))), "a save after a killed one")
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    check(len(left) <= 1, f"killed saves have left {left} behind")
    case.facts["killed"] = True


def damaged_checkpoint(case: Case) -> None:
    """A damaged checkpoint is refused, or training goes on to the same parameters."""
    folder = case.folder / "run"
    seed = case.rng.randrange(1000)
    x, y = data(seed)
    batches = list(zip(x.split(8), y.split(8), strict=True))

    def train(where: Path | None, epochs: float = 2.0, stop: int = 10**9) -> nn.Module:
        model, calls = network(seed), 0

        def loss(output: Any, batch: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > stop:
                raise KeyboardInterrupt
            return nn.functional.cross_entropy(output, batch[1])

        with process_unchanged("finetune"):
            ispasp.finetune(
                model, batches, epochs=epochs, checkpoint=where, checkpoint_every=2, loss=loss, progress=False
            )
        return model

    expected = train(None)
    with suppress(KeyboardInterrupt):
        train(folder, stop=case.rng.randint(2, 9))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return
    damage(case, case.pick(*files))
    with case.may_refuse("finetune"):
        model = train(folder)
    check_same(weights(expected), weights(model), "weights after a damaged checkpoint")
    case.facts["unharmed checkpoint"] = True
