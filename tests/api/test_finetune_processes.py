"""Two processes train as one with the same global batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ispasp.api.finetune import finetune
from ispasp.errors import InputError
from ispasp.train import Sgd

CASES = {"whole": (1, 40), "accumulated": (2, 40), "uneven": (2, 43), "one left over": (1, 41)}  # accumulate, examples


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 3))


def trained(case: str, folder: Path | None = None, epochs: float = 2, norm: bool = False) -> dict[str, Tensor]:
    accumulate, n = CASES[case]
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1))
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    model = network(norm)
    recipe = Sgd(lr=0.2, schedule="constant")
    result = finetune(
        model, loader, epochs=epochs, recipe=recipe, accumulate=accumulate, checkpoint=folder, checkpoint_every=3
    )
    return {**model.state_dict(), "losses": torch.tensor(result.losses), "resumed": torch.tensor(result.resumed)}


def work(folder: Path) -> None:
    """What each of the two processes does."""
    rank = os.environ["RANK"]
    for case in CASES:
        save_file(trained(case), folder / f"{case}-{rank}.safetensors")
    save_file(trained("uneven", norm=True), folder / f"norm-{rank}.safetensors")
    trained("uneven", folder / "run")
    save_file(trained("uneven", folder / "run"), folder / f"again-{rank}.safetensors")
    try:
        finetune(network(), [(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))])
    except InputError as error:
        (folder / f"refused-{rank}").write_text(str(error))
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, str(tmp_path)]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(  # noqa: S603
            command, env={**shared, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    for case in CASES:
        expected = trained(case)
        for rank in range(2):
            found = load_file(tmp_path / f"{case}-{rank}.safetensors")
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{case} {rank} {name}")
    a, b = (load_file(tmp_path / f"norm-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    for rank in range(2):
        whole, again = (load_file(tmp_path / f"{name}-{rank}.safetensors") for name in ("uneven", "again"))
        assert int(again.pop("resumed")) == len(again["losses"])
        assert all(torch.equal(whole[name], again[name]) for name in again)
        assert "pass a torch DataLoader without a DistributedSampler" in (tmp_path / f"refused-{rank}").read_text()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
