"""An interrupted run goes on to the same parameters, to the bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset, WeightedRandomSampler

from ispasp._finetune import FinetuneResult, finetune
from ispasp.errors import InputError, SaveError
from ispasp.files import digest
from ispasp.train import AdamW, Recipe, Sgd, Teacher, checkpoint

FILE = "finetune.safetensors"


class Stopped(Exception):  # noqa: N818
    pass


def stopping(after: int) -> Callable[[Tensor, Any], Tensor]:
    """A loss that is interrupted in its (after + 1)th call."""
    calls = 0

    def loss(output: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Stopped
        return functional.cross_entropy(output, batch[1])

    return loss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))


def examples() -> tuple[Tensor, Tensor]:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments with the generators of torch, NumPy and Python."""

    def __init__(self) -> None:
        self.x, self.y = examples()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(6) + float(np.random.rand()) + random.gauss(0, 1)
        return self.x[index] + 0.1 * noise, self.y[index]


class Epochs:
    """A sampler that is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter([(index * 7 + self.epoch) % 40 for index in range(40)])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(9)


PLAIN = TensorDataset(*examples())
LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [(x, y) for x, y in zip(*(t.split(8) for t in examples()), strict=True)],
    "in order": lambda: DataLoader(PLAIN, batch_size=8),
    "shuffled": lambda: DataLoader(PLAIN, batch_size=8, shuffle=True),
    "own generator": lambda: DataLoader(PLAIN, batch_size=8, shuffle=True, generator=generator()),
    "sampler with generator": lambda: DataLoader(
        PLAIN, batch_size=8, sampler=RandomSampler(PLAIN, replacement=True, generator=generator())
    ),
    "weighted": lambda: DataLoader(
        PLAIN, batch_size=7, drop_last=True, sampler=WeightedRandomSampler([1.0] * 40, 40, generator=generator())
    ),
    "augmented": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
    "epoch sampler": lambda: DataLoader(PLAIN, batch_size=8, sampler=Epochs()),  # type: ignore[arg-type]
}


def trained(loader: Any, folder: Path | None, stop: int = 10**9, **options: Any) -> tuple[nn.Module, FinetuneResult]:
    model = network()
    arguments: dict[str, Any] = {"epochs": 2.4, "recipe": Sgd(lr=0.1), "checkpoint_every": 2, **options}
    return model, finetune(model, loader, loss=stopping(stop), checkpoint=folder, **arguments)


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


@cache
def uninterrupted(name: str) -> tuple[nn.Module, FinetuneResult]:
    return trained(LOADERS[name](), None)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [0, 3, 5, 11])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(name: str, stop: int, tmp_path: Path) -> None:
    expected, whole = uninterrupted(name)
    assert whole.steps == 12
    with pytest.raises(Stopped):
        trained(LOADERS[name](), tmp_path, stop)
    torch.rand(7)  # another process, another history of random numbers
    model, result = trained(LOADERS[name](), tmp_path)
    assert_equal(model, expected)
    assert result.losses == whole.losses
    assert result.resumed == stop - stop % 2


@settings(max_examples=15)
@given(
    stops=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    every=st.integers(1, 5),
    accumulate=st.sampled_from([1, 2, 3]),
    recipe=st.sampled_from([Sgd(lr=0.1), AdamW(lr=0.01, warmup=0.2)]),
    name=st.sampled_from(sorted(LOADERS)),
)
def test_any_interruptions_with_any_recipe(
    stops: list[int], every: int, accumulate: int, recipe: Recipe, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    options: dict[str, Any] = {"accumulate": accumulate, "checkpoint_every": every, "recipe": recipe}
    expected, whole = trained(LOADERS[name](), None, **options)
    for stop in stops:
        try:
            trained(LOADERS[name](), folder, stop, **options)
        except Stopped:
            continue
    model, result = trained(LOADERS[name](), folder, **options)
    assert_equal(model, expected)
    assert result.losses == whole.losses


KILLED: dict[str, Any] = {"accumulate": 2, "checkpoint_every": 1, "mixed_precision": "bf16", "epochs": 2.5}


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_killed_and_interrupted_processes(tmp_path: Path) -> None:
    """kill -9 in the first epoch, Ctrl-C in the third, both between two batches of a step; then the rest."""
    expected, whole = trained(LOADERS["augmented"](), None, **KILLED)
    assert whole.steps == 8
    command = [sys.executable, __file__, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n", process.communicate()[1]
        process.kill()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, errors
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_until(tmp_path, 11, lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, handler)
    model, result = trained(LOADERS["augmented"](), tmp_path, **KILLED)
    assert result.resumed == 7
    assert result.losses == whole.losses
    assert_equal(model, expected)


def train_until(folder: Path, stop: int, end: Callable[[], object]) -> None:
    """Train, and call `end` in the (stop + 1)th batch."""
    calls = 0

    def loss(output: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > stop:
            end()
        return functional.cross_entropy(output, batch[1])

    arguments: dict[str, Any] = {"recipe": Sgd(lr=0.1), "checkpoint": folder, **KILLED}
    finetune(network(), LOADERS["augmented"](), loss=loss, **arguments)


def wait() -> None:
    print("at work", flush=True)
    time.sleep(60)


def test_the_same_model_and_loader_may_go_on(tmp_path: Path) -> None:
    """A notebook: the interrupted call has changed the model and drawn from the loader's generator."""
    expected, _ = uninterrupted("own generator")
    model, loader = network(), LOADERS["own generator"]()
    arguments: dict[str, Any] = {"epochs": 2.4, "recipe": Sgd(lr=0.1), "checkpoint": tmp_path, "checkpoint_every": 5}
    for stop in (3, 9):
        with pytest.raises(Stopped):
            finetune(model, loader, loss=stopping(stop), **arguments)
    finetune(model, loader, loss=stopping(99), **arguments)
    assert_equal(model, expected)


def test_scores_go_on_too(tmp_path: Path) -> None:
    def score(model: nn.Module) -> float:
        return float(model(examples()[0]).sum())

    _, whole = trained(LOADERS["shuffled"](), None, evaluate=score)
    with pytest.raises(Stopped):
        trained(LOADERS["shuffled"](), tmp_path, 7, evaluate=score)
    _, result = trained(LOADERS["shuffled"](), tmp_path, evaluate=score)
    assert list(whole.scores) == [5, 10, 12]
    assert result.scores == whole.scores
    assert result.resumed == 6


def test_with_a_teacher_and_bf16(tmp_path: Path) -> None:
    options: dict[str, Any] = {"teacher": Teacher(network().eval(), weight=0.3), "mixed_precision": "bf16"}
    expected, _ = trained(LOADERS["augmented"](), None, **options)
    with pytest.raises(Stopped):
        trained(LOADERS["augmented"](), tmp_path, 7, **options)
    model, result = trained(LOADERS["augmented"](), tmp_path, **options)
    assert result.resumed == 6
    assert_equal(model, expected)


def test_workers(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1)

    expected, _ = trained(loader(), None, epochs=1)
    with pytest.raises(Stopped):
        trained(loader(), tmp_path, 3, epochs=1)
    model, _ = trained(loader(), tmp_path, epochs=1)
    assert_equal(model, expected)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    expected, whole = trained(LOADERS["shuffled"](), tmp_path)
    model, result = trained(LOADERS["shuffled"](), tmp_path, stop=0)
    assert_equal(model, expected)
    assert result.resumed == result.steps == 12
    assert result.losses == whole.losses
    assert "steps 1-12 from a checkpoint" in str(result)


def test_tied_and_unsaved_tensors_are_restored(tmp_path: Path) -> None:
    class Tied(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.b.weight = self.a.weight
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            return self.out(self.b(torch.relu(self.a(x))) + 0.01 * self.calls)

    def run(stop: int, folder: Path | None) -> Tied:
        model = Tied()
        finetune(model, LOADERS["shuffled"](), loss=stopping(stop), checkpoint=folder, checkpoint_every=1)
        return model

    expected = run(99, None)
    with pytest.raises(Stopped):
        run(3, tmp_path)
    model = run(99, tmp_path)
    assert model.a.weight is model.b.weight
    assert float(model.calls) == float(expected.calls) == 5.0
    assert_equal(model, expected)


def test_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = uninterrupted("own generator")
    real, writes = checkpoint.write_tensors, 0

    def dying(path: Path, tensors: Any, metadata: Any) -> None:
        nonlocal writes
        writes += 1
        real(path, tensors, metadata)
        if writes == 4:
            path.write_bytes(path.read_bytes()[:100])
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", dying)
        with pytest.raises(KeyboardInterrupt):
            trained(LOADERS["own generator"](), tmp_path)
    model, result = trained(LOADERS["own generator"](), tmp_path)
    assert result.resumed == 4
    assert_equal(model, expected)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(SaveError, match="cannot write a checkpoint to .*No space left"):
        trained(LOADERS["list"](), tmp_path)


def test_the_file_holds_tensors_and_json_only(tmp_path: Path) -> None:
    trained(LOADERS["own generator"](), tmp_path)
    with safe_open(tmp_path / FILE, framework="pt") as file:
        names = set(file.keys())
        assert file.metadata()["format"] == "ispasp-finetune"
    assert {"model/1.running_var", "model/0.weight", "optimizer/0/momentum_buffer", "loader/0", "losses"} <= names


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"epochs": 3}, "a run with epochs=2.4, this one has epochs=3"),
        ({"recipe": Sgd(lr=0.2)}, 'a run with recipe="Sgd\\(lr=0.1'),
        ({"seed": 5}, "seed=0, this one has seed=5"),
        ({"accumulate": 2}, "accumulate=1"),
        ({"teacher": network()}, "teacher=None"),
        ({"mixed_precision": "bf16"}, "mixed_precision='no'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        trained(LOADERS["list"](), tmp_path, 3)
    with pytest.raises(InputError, match=says + ".*delete the file to start over"):
        trained(LOADERS["list"](), tmp_path, **change)


def test_a_checkpoint_of_another_model_or_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        trained(LOADERS["own generator"](), tmp_path, 3)
    other = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    arguments: dict[str, Any] = {"epochs": 2.4, "recipe": Sgd(lr=0.1), "loss": stopping(99), "checkpoint": tmp_path}
    with pytest.raises(InputError, match="'0.bias' is float32 \\(8,\\) in the model and float32 \\(12,\\) in the ch"):
        finetune(other, LOADERS["own generator"](), **arguments)
    with pytest.raises(InputError, match="'4.bias' is .* in the model and not there|'4.bias' is not there"):
        finetune(nn.Sequential(*list(network())[:4]), LOADERS["own generator"](), **arguments)
    with pytest.raises(InputError, match="'0.bias' is float64 \\(12,\\) in the model and float32 \\(12,\\) in the ch"):
        finetune(network().double(), LOADERS["own generator"](), **arguments)
    for frozen in (0, 4):
        model = network()
        model[frozen].requires_grad_(False)
        with pytest.raises(InputError, match="trained other parameters: set requires_grad as it was"):
            finetune(model, LOADERS["own generator"](), **arguments)
    with pytest.raises(InputError, match="loader has 1 generators, this one 0"):
        trained(LOADERS["in order"](), tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"something else")
    with pytest.raises(SaveError, match="is damaged.*delete it to start over"):
        trained(LOADERS["list"](), tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / FILE)
    with pytest.raises(SaveError, match="not a checkpoint of this version"):
        trained(LOADERS["list"](), tmp_path)
    for about in ("{", "[]", '{"step": 2}'):
        losses = {"losses": torch.ones(1)}
        metadata = {"format": "ispasp-finetune", "version": checkpoint.VERSION, "about": about}
        metadata["sha256"] = digest(losses, about)
        save_file(losses, tmp_path / FILE, metadata)
        with pytest.raises(SaveError, match="is damaged: .*delete it to start over"):
            trained(LOADERS["list"](), tmp_path)


def test_persistent_workers_cannot_be_resumed(tmp_path: Path) -> None:
    loader = DataLoader(Noisy(), batch_size=8, num_workers=1, persistent_workers=True)
    with pytest.raises(InputError, match="pass persistent_workers=False, or no checkpoint"):
        trained(loader, tmp_path)


def test_an_optimizer_that_remembers_more_than_tensors_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    optimizer.state[weight]["note"] = "text"
    with pytest.raises(SaveError, match="keeps 'note', a str"):
        checkpoint.optimizer_tensors(optimizer)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as the tests run: sums over more threads round otherwise
    train_until(Path(sys.argv[1]), 3, wait)
