"""`ispasp.heal` that is interrupted, in blocks, in mixed precision and in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import ispasp
from ispasp import Heal, HealResult, heal
from ispasp.errors import InputError, MissingExtraError, SaveError
from support.leave import leave

FILE = "heal.safetensors"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


class Residual(nn.Module):
    """A depthwise convolution and a norm in the branch."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(6, hidden, 1),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, 6, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def network(hidden: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [Residual(hidden) for _ in range(2)]
    net = nn.Sequential(nn.Conv2d(3, 6, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    with torch.no_grad():
        net.train()(torch.randn(64, 3, 8, 8))
    return net.eval()


def images(seed: int = 1, n: int = 96) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def dense() -> nn.Sequential:
    return network(16)


@pytest.fixture(scope="module")
def plan(dense: nn.Sequential) -> ispasp.Plan:
    return ispasp.prune(dense, images(), keep=0.5, method="l1", compensate=None, progress=False).plan


@pytest.fixture
def pruned(dense: nn.Sequential, plan: ispasp.Plan) -> Any:
    model = network(16)
    ispasp.apply_(model, plan)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


# Blocks ---------------------------------------------------------------------------------------------------------


def test_blocks_train_everything_but_what_was_right(dense: nn.Module, pruned: nn.Module) -> None:
    before = state(pruned)
    result = heal(pruned, dense, images(), Heal(steps=90, blocks=True, lr=3e-3), progress=False)
    assert result.steps == 90
    assert result.gained > 0.2
    assert len(result.history) == 4  # the start, two blocks, the head
    fixed = {name for name in before if name.startswith("0.") or "running" in name or "num_batches" in name}
    assert changed(pruned, before) == before.keys() - fixed  # depthwise and norms, too; the stem has no error
    assert (result.after, result.before) == (min(a for _, a in result.history), result.history[0][1])


def test_a_block_is_trained_alone(dense: nn.Module, pruned: nn.Module) -> None:
    before = state(pruned)
    seen = []

    def watch(x: Tensor) -> Tensor:
        seen.append({name.split(".")[0] for name in changed(pruned, before)})
        return x

    heal(pruned, dense, images(), Heal(steps=30, blocks=True, lr=1e-3, augment=watch), progress=False)
    assert seen[1] == seen[9] == {"1"}
    assert all("5" not in parts for parts in seen[:20])
    assert all(parts <= {"1", "2"} for parts in seen[:20])


def test_blocks_are_never_worse(dense: nn.Module, pruned: nn.Module) -> None:
    before = state(pruned)
    result = heal(pruned, dense, images(), Heal(steps=12, blocks=True, lr=1e3), progress=False)
    assert result.after == result.before
    assert not changed(pruned, before)


def test_without_features_all_is_one_block(dense: nn.Module) -> None:
    model = ispasp.prune(dense, images(), keep=0.5, scope="all", compensate=None, progress=False).model
    result = heal(model, dense, images(), Heal(steps=40, blocks=True), progress=False)
    assert result.gained > 0


def test_tied_weights_stay_tied_in_blocks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.up, self.down = nn.Embedding(20, 8), nn.Linear(8, 32), nn.Linear(32, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            return self.head(x + self.down(torch.relu(self.up(x))))

    teacher, batches = Tied().eval(), [{"input_ids": torch.randint(20, (16, 6))} for _ in range(4)]
    student = ispasp.prune(teacher, batches, keep=0.5, compensate=None, progress=False).model
    before = state(student)
    assert heal(student, teacher, batches, Heal(steps=60, blocks=True), progress=False).gained > 0
    assert student.head.weight is student.embed.weight
    assert torch.equal(student.embed.weight, before["embed.weight"])  # the embeddings are right already


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 10])
def test_takes_exactly_the_steps_it_was_given(steps: int, blocks: bool, dense: nn.Module, pruned: nn.Module) -> None:
    result = heal(pruned, dense, images(), Heal(steps=steps, blocks=blocks, lr=1e-9), progress=False)
    assert result.gained < 0.01  # also where hardly anything is gained on the way
    assert result.steps == steps == result.history[-1][0]


# Resumed --------------------------------------------------------------------------------------------------------


class Stopped(Exception):  # noqa: N818
    pass


def stopping(after: int, error: type[BaseException] = Stopped) -> Callable[[Tensor], Tensor]:
    """An augmentation with random numbers that is interrupted in its (after + 1)th call."""
    calls = 0

    def augment(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return x + 0.1 * torch.randn(x.shape, dtype=x.dtype)

    return augment


def run(model: nn.Module, dense: nn.Module, folder: Path | None, stop: int = 10**9, **options: Any) -> HealResult:
    given: dict[str, Any] = {"steps": 24, "lr": 1e-3, "checkpoint_every": 2, "checkpoint": folder, **options}
    error = given.pop("error", Stopped)
    x = images().to(next(model.parameters()).dtype)
    return heal(model, dense, x, Heal(augment=stopping(stop, error), **given), progress=False)


@pytest.mark.parametrize("options", [{}, {"blocks": True}, {"mixed_precision": "bf16"}], ids=str)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    options: dict[str, Any], dense: nn.Module, plan: ispasp.Plan, tmp_path: Path
) -> None:
    def fresh() -> nn.Module:
        model = network(16)
        ispasp.apply_(model, plan)
        return model

    expected = fresh()
    whole = run(expected, dense, None, **options)
    for stop in (5, 18):
        model, folder = fresh(), tmp_path / str(stop)
        before = state(model)
        with pytest.raises(Stopped):
            run(model, dense, folder, stop, **options)
        assert not changed(model, before)
        torch.rand(7)  # another process, another history of random numbers
        result = run(model, dense, folder, **options)
        assert result.resumed == stop - stop % 2
        assert result.history == whole.history
        assert not changed(model, state(expected))
    again = run(fresh(), dense, folder, 0, **options)  # a finished run is not run again
    assert (again.resumed, again.after) == (24, whole.after)


def test_half_precision_goes_on_from_its_float32_copies(dense: nn.Module, pruned: nn.Module, tmp_path: Path) -> None:
    large, small = network(16).bfloat16(), pruned.bfloat16()
    before = state(small)
    whole = run(small, large, None)
    expected = state(small)
    small.load_state_dict(before)
    with pytest.raises(Stopped):
        run(small, large, tmp_path, 7)
    assert run(small, large, tmp_path).history == whole.history
    assert not changed(small, expected)


def test_ctrl_c_then_the_same_model_goes_on(dense: nn.Module, pruned: nn.Module, tmp_path: Path) -> None:
    before = state(pruned)
    whole = run(pruned, dense, None)
    pruned.load_state_dict(before)
    with pytest.raises(KeyboardInterrupt):
        run(pruned, dense, tmp_path, 13, error=KeyboardInterrupt)
    assert changed(pruned, before)
    assert run(pruned, dense, tmp_path).history == whole.history


def test_prune_goes_on_too(dense: nn.Module, tmp_path: Path) -> None:
    config = Heal(steps=8, checkpoint=tmp_path, checkpoint_every=1)
    first = ispasp.prune(dense, images(), 0.5, heal=config, progress=False)
    again = ispasp.prune(dense, images(), 0.5, heal=config, progress=False)
    assert first.healed is not None and again.healed is not None
    assert (first.healed.resumed, again.healed.resumed) == (0, 8)
    assert not changed(again.model, state(first.model))


def test_checkpoints_of_other_runs_are_refused(dense: nn.Module, pruned: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(pruned, dense, tmp_path, 5)
    with safe_open(tmp_path / FILE, framework="pt") as file:
        assert file.metadata()["format"] == "ispasp-heal"
        assert {name.split("/")[0] for name in file.keys()} == {"model", "now", "good", "optimizer"}  # noqa: SIM118
    before = state(pruned)
    for change in ({"steps": 30}, {"lr": 1e-2}, {"blocks": True}, {"seed": 1}, {"mixed_precision": "bf16"}):
        name = next(iter(change))
        with pytest.raises(InputError, match=f"a run with {name}=.*delete the file to start over"):
            run(pruned, dense, tmp_path, **change)
    pruned[1].branch[1].running_mean += 1  # type: ignore[index, union-attr, operator]
    with pytest.raises(InputError, match="of another model.*or another folder"):
        run(pruned, dense, tmp_path)
    pruned[1].branch[1].running_mean -= 1  # type: ignore[index, union-attr, operator]
    with pytest.raises(InputError, match="'1.branch.0.bias' is float32 \\(16,\\) in the model and float32 \\(8,\\)"):
        run(network(16), dense, tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-9])
    with pytest.raises(SaveError, match="delete it to start over"):
        run(pruned, dense, tmp_path)
    pruned.load_state_dict(before)


# Precision and processes ----------------------------------------------------------------------------------------


def test_mixed_precision(dense: nn.Module, pruned: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(pruned)
    full = run(pruned, dense, None)
    pruned.load_state_dict(before)
    mixed = run(pruned, dense, None, mixed_precision="bf16")
    assert mixed.gained > 0
    assert mixed.before != full.before
    assert {p.dtype for p in pruned.parameters()} == {torch.float32}
    after = state(pruned)
    with pytest.raises(InputError, match="'fp16' needs a GPU"):
        run(pruned, dense, None, mixed_precision="fp16")
    with pytest.raises(InputError, match="mixed_precision='int8'"):
        run(pruned, dense, None, mixed_precision="int8")
    monkeypatch.setattr("ispasp.train.devices.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="mixed_precision='bf16' needs accelerate"):
        run(pruned, dense, None, mixed_precision="bf16")
    assert not changed(pruned, after)
    assert run(pruned, dense, None).after <= full.before


def work(folder: Path) -> None:
    """One of two processes, with half of the examples."""
    rank = int(os.environ["RANK"])
    dense, model = network(16), network_of(folder)
    x = images(n=128)[rank::2]
    config = Heal(steps=20, lr=1e-3, augment="flip", checkpoint=folder / "run")
    result = heal(model, dense, x, config, progress=False)
    found = {**state(model), "after": torch.tensor(result.after, dtype=torch.float64)}
    save_file(found, folder / f"{rank}.safetensors")
    again = heal(network_of(folder), dense, x, config, progress=False)
    told = [f"{result.examples} {result.held_out} {result.gained > 0} {again.resumed}"]
    for options in ({"lr": 1e-3 * (rank + 1)}, {"augment": failing if rank else torch.clone}):
        try:
            heal(model, dense, x, Heal(steps=3, **options), progress=False)  # type: ignore[arg-type]
        except ispasp.errors.IspaspError as error:
            told.append(str(error))
    (folder / f"told-{rank}").write_text("\n".join(told))


def network_of(folder: Path) -> nn.Module:
    model = network(16)
    ispasp.apply_(model, ispasp.Plan.from_json((folder / "plan.json").read_text()))
    return model


def failing(x: Tensor) -> Tensor:
    raise InputError("no such image")


@pytest.mark.long
def test_two_processes_of_torchrun_heal_one_model(plan: ispasp.Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan.to_json())
    command = [sys.executable, *TORCHRUN, __file__, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        process.terminate()  # unlike kill, it ends the processes that the launcher has started as well
        process.wait()
    assert process.returncode == 0, errors
    a, b = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    for rank in range(2):
        told = (tmp_path / f"told-{rank}").read_text().splitlines()
        assert told[0] == "112 16 True 20"
        assert "the settings of heal must be the same on every rank" in told[1]
        assert "no such image" in told[2]


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
    leave(Path(sys.argv[1]), int(os.environ["RANK"]), 2)
