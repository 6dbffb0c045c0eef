"""Two processes train as one with the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine import accelerate_launch
from ispasp._finetune import finetune
from ispasp.errors import InputError
from ispasp.train import Sgd, Teacher
from support.leave import leave

CASES = {"whole": (1, 40), "accumulated": (2, 40), "uneven": (2, 43), "one left over": (1, 41)}  # accumulate, examples
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ACCELERATE = (accelerate_launch.__file__, *accelerate_launch.TWO, "--mixed_precision", "bf16")


class Stopped(Exception):  # noqa: N818
    pass


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Adds random numbers to examples that are all the same."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(6), torch.tensor(index % 3)


def network(norm: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 3))


def trained(
    case: str, folder: Path | None = None, norm: bool = False, stop: int = 99, **more: Any
) -> dict[str, Tensor]:
    """Trains two epochs; `stop` interrupts the step of that number."""
    accumulate, n = CASES[case]
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1))
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    model = network(norm)
    calls = 0

    def loss(output: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > stop * accumulate:
            raise Stopped
        return functional.cross_entropy(output, batch[1])

    result = finetune(
        model,
        loader,
        epochs=2,
        recipe=Sgd(lr=0.2, schedule="constant"),
        loss=loss,
        accumulate=accumulate,
        checkpoint=folder,
        checkpoint_every=2,
        evaluate=lambda model: float(model(x).square().sum()),
        **more,
    )
    scores = torch.tensor(list(result.scores.values()))
    found = {"losses": torch.tensor(result.losses), "resumed": torch.tensor(result.resumed), "scores": scores}
    return {**model.state_dict(), **found}


def noise_of_a_step(shuffle: bool) -> Tensor:
    """What this process has read in the first step."""
    seen: list[Tensor] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        seen.append(batch[0])
        return output.square().mean()

    finetune(network(), DataLoader(Noisy(), batch_size=8, shuffle=shuffle), epochs=0.2, loss=loss)
    return seen[0]


def work(folder: Path) -> None:
    """What each of the two processes does."""
    rank = os.environ["RANK"]
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16":
        save_file(trained("uneven"), folder / f"bf16-{rank}.safetensors")
        return
    for case in CASES:
        save_file(trained(case), folder / f"{case}-{rank}.safetensors")
    save_file(trained("uneven", norm=True), folder / f"norm-{rank}.safetensors")
    taught = trained("whole", teacher=Teacher(network(seed=1), weight=0.3))
    save_file(taught, folder / f"taught-{rank}.safetensors")
    for stop in (3, 2):  # in the middle of an epoch of 3 steps, and at its end
        try:
            trained("uneven", folder / "run", norm=True, stop=stop)
        except Stopped:
            continue
    save_file(trained("uneven", folder / "run", norm=True), folder / f"resumed-{rank}.safetensors")
    save_file(trained("uneven", folder / "run", norm=True, stop=0), folder / f"again-{rank}.safetensors")
    noise = {name: noise_of_a_step(shuffle) for name, shuffle in (("in order", False), ("shuffled", True))}
    save_file(noise, folder / f"noise-{rank}.safetensors")
    refused = []
    for batches, more in (([(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))], {}), (loader_of(), other(folder))):
        try:
            finetune(network(), batches, **more)
        except InputError as error:
            refused.append(str(error))
    (folder / f"refused-{rank}").write_text("\n".join(refused))


def loader_of() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=8)


def other(folder: Path) -> dict[str, Any]:
    """A checkpoint that only one process can see."""
    finetune(network(), loader_of(), checkpoint=folder / "seen-by-0")
    return {"checkpoint": folder / f"seen-by-{os.environ['RANK']}"}


def launched(launcher: Sequence[str], folder: Path) -> None:
    command = [sys.executable, *launcher, __file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)  # noqa: S603
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        process.terminate()  # unlike kill, it ends the processes that the launcher has started as well
        process.wait()
    assert process.returncode == 0, errors


def check_equal(folder: Path, name: str, expected: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    a, b = (load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2))
    for key, tensor in expected.items():
        assert torch.equal(a[key], b[key]), f"{name} {key}"
        torch.testing.assert_close(a[key], tensor, rtol=rtol, atol=atol, msg=f"{name} {key}")


@pytest.mark.long
def test_two_processes_of_torchrun_equal_one(tmp_path: Path) -> None:
    launched(TORCHRUN, tmp_path)
    for case in CASES:
        check_equal(tmp_path, case, trained(case))
    check_equal(tmp_path, "taught", trained("whole", teacher=Teacher(network(seed=1), weight=0.3)))
    for rank in range(2):
        whole, resumed, again = (
            load_file(tmp_path / f"{name}-{rank}.safetensors") for name in ("norm", "resumed", "again")
        )
        assert [int(found.pop("resumed")) for found in (whole, resumed, again)] == [0, 4, 6]
        assert all(torch.equal(whole[name], found[name]) for found in (resumed, again) for name in whole)
        refused = (tmp_path / f"refused-{rank}").read_text()
        assert "pass a torch DataLoader without a DistributedSampler" in refused
        assert "processes read steps [5, -1]" in refused
    norms = [load_file(tmp_path / f"norm-{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(norms[0][name], norms[1][name]) for name in norms[0])
    noise = [load_file(tmp_path / f"noise-{rank}.safetensors") for rank in range(2)]
    for name in ("in order", "shuffled"):  # else all processes would augment alike
        assert not torch.isclose(noise[0][name], noise[1][name]).any()


@pytest.mark.long
def test_two_processes_of_accelerate_launch_take_its_precision(tmp_path: Path) -> None:
    launched(ACCELERATE, tmp_path)
    check_equal(tmp_path, "bf16", trained("uneven", mixed_precision="bf16"), rtol=0.02, atol=0.01)
    full = trained("uneven")
    assert not torch.allclose(load_file(tmp_path / "bf16-0.safetensors")["losses"], full["losses"], rtol=1e-6)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
    leave(Path(sys.argv[1]), int(os.environ["RANK"]), 2)
