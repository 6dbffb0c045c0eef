"""Every file that ispasp reads, damaged at random: what is read is used or refused by an IspaspError, in bounded time.

`one_case(seed)` makes one damaged file and reads it. `python -m support.files_fuzz FIRST COUNT` runs many.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import ispasp
from ispasp.cli.data import load_data
from ispasp.cli.huggingface import image_preprocessing
from ispasp.cli.loaded import Examples, Loaded
from ispasp.cli.models import fill, load_saved
from ispasp.cli.options import Wanted
from ispasp.errors import IspaspError, visible
from ispasp.files import digest
from support.forge import forge_model, read
from support.mutate import damaged_bytes, damaged_json

SECONDS = 30.0  # of one case, on a machine that does other things as well


class Conv(nn.Module):
    """Depthwise convolution (groups), BatchNorm, a layer that gains a bias, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(2, 8, 1, bias=False)
        self.norm, self.deep = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.fc2, self.end = nn.Conv2d(8, 6, 1, bias=False), nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(self.deep(self.norm(self.fc1(x)).relu()).relu())
        return self.end(x.relu().mean((2, 3))) * self.scale


class Attend(nn.Module):
    """Heads, tied weights and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc1 = parametrizations.weight_norm(nn.Linear(8, 8))
        self.fc2, self.first, self.twin = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.twin.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.attend(x, x, x, need_weights=False)[0]
        return self.twin(x) + self.fc2(self.fc1(x).relu())


def batches(make: Callable[[], nn.Module]) -> list[Tensor]:
    return [torch.linspace(-1, 1, 64).reshape(2, 2, 4, 4) if make is Conv else torch.linspace(-1, 1, 48).view(2, 3, 8)]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


@functools.cache
def saved_files(make: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, bytes], ispasp.Plan]:
    """A dense model, and the files of the pruned one."""
    dense = seeded(make)
    result = ispasp.prune(copy.deepcopy(dense), batches(make), 0.5, compensate="dense", progress=False)
    with tempfile.TemporaryDirectory() as folder:
        ispasp.save(result, folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    files["result.json"] = json.dumps({**json.loads(result.to_json()), "model": "torchvision:resnet18"}).encode()
    return dense, files, result.plan


def trained(model: nn.Module, folder: Path, epochs: float) -> None:
    data = [(torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 1, 0, 1]))] * 2
    ispasp.finetune(model, data, epochs=epochs, loss=_loss, checkpoint=folder, checkpoint_every=1, progress=False)


def _loss(output: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(output, batch[1])


@functools.cache
def checkpoint_bytes() -> bytes:
    """The file of a run that has done two steps of four."""
    with tempfile.TemporaryDirectory() as name:
        trained(seeded(line), Path(name), 1)
        path = Path(name) / "finetune.safetensors"
        forge_checkpoint(path, lambda _, told: told["settings"].update(epochs=2.0))
        return path.read_bytes()


def line() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def forge_checkpoint(path: Path, change: Callable[[dict[str, Tensor], Any], object]) -> None:
    tensors, metadata = read(path)
    about = json.loads(metadata["about"])
    changed = change(tensors, about)
    metadata["about"] = changed if isinstance(changed, str) else json.dumps(about)
    metadata["sha256"] = digest(tensors, metadata["about"])
    save_file(tensors, path, metadata)


# --- the kinds of files -----------------------------------------------------------------------------------------------


def plan_file(rng: random.Random, folder: Path) -> None:
    """A plan, read and applied."""
    make = rng.choice((Conv, Attend))
    dense, _, plan = saved_files(make)
    text: str | bytes = damaged_json(json.loads(plan.to_json()), rng)
    if rng.random() < 0.2:
        text = damaged_bytes(plan.to_json().encode(), rng)
    model = copy.deepcopy(dense)
    _unchanged(model, lambda: ispasp.apply_(model, ispasp.Plan.from_json(text)))


def model_file(rng: random.Random, folder: Path) -> None:
    """A saved folder: bytes, tensors, metadata, plan and configs."""
    make = rng.choice((Conv, Attend))
    dense, files, plan = saved_files(make)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    path, kind = folder / "model.safetensors", rng.randrange(5)
    if kind == 0:
        path.write_bytes(damaged_bytes(files[path.name], rng, first=600))
    elif kind == 1:
        forge_model(path, lambda _, told: told.update(plan=damaged_json(json.loads(plan.to_json()), rng)))
    elif kind == 2:
        forge_model(path, lambda _, told: told.update(about=damaged_json(json.loads(told["about"]), rng)))
    elif kind == 3:
        forge_model(path, lambda tensors, told: _damage_tensors(tensors, told, rng))
    else:
        (folder / "plan.json").write_bytes(damaged_bytes(files["plan.json"], rng))
    model = copy.deepcopy(dense)
    _unchanged(model, lambda: ispasp.load(folder, model))


def checkpoint_file(rng: random.Random, folder: Path) -> None:
    """A checkpoint of training that is interrupted."""
    path = folder / "finetune.safetensors"
    path.write_bytes(checkpoint_bytes())
    kind = rng.randrange(3)
    if kind == 0:
        path.write_bytes(damaged_bytes(checkpoint_bytes(), rng, first=600))
    elif kind == 1:
        forge_checkpoint(path, lambda _, about: damaged_json(about, rng))
    else:
        forge_checkpoint(path, lambda tensors, _: _damage_tensors(tensors, {}, rng))
    model = seeded(line)
    _unchanged(model, lambda: trained(model, folder, 2))


def weights_file(rng: random.Random, folder: Path) -> None:
    """What --weights reads: safetensors, archives and pickles of torch."""
    model = seeded(line)
    state: Any = dict(model.state_dict())
    if rng.random() < 0.6:
        state = _damaged_state(state, rng)
    else:
        _damage_tensors(state, {}, rng)
    path = folder / rng.choice(("w.pt", "w.pth", "w.safetensors", "w.bin"))
    if path.suffix == ".safetensors":
        tensors = {str(k): v for k, v in state.items() if isinstance(v, Tensor)} if isinstance(state, dict) else {}
        data = save({k: v.contiguous().clone() for k, v in tensors.items() if _plain(v)})
    else:
        buffer = io.BytesIO()
        torch.save(state, buffer, _use_new_zipfile_serialization=rng.random() < 0.7)
        data = buffer.getvalue()
    path.write_bytes(damaged_bytes(data, rng, first=400) if rng.random() < 0.5 else data)
    fill(model, path)


def _plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def command_line_file(rng: random.Random, folder: Path) -> None:
    """A folder as the command line reads it: result.json, configs."""
    _, files, _ = saved_files(Conv)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    told = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(damaged_json(told, rng))
    if rng.random() < 0.7:
        (folder / "result.json").write_text(damaged_json(json.loads(files["result.json"]), rng), errors="surrogatepass")
    else:
        (folder / "result.json").write_bytes(damaged_bytes(files["result.json"], rng))
    prepare = image_preprocessing(str(folder))
    assert len(prepare.mean) == len(prepare.std) in (1, 3) and min(prepare.std) > 0
    load_saved(folder, "", lambda spec: Loaded(seeded(Conv), spec))


def arrays_file(rng: random.Random, folder: Path) -> None:
    """What --data reads: arrays and text."""
    buffer, path = io.BytesIO(), folder / rng.choice(("d.npz", "d.npz", "d.txt"))
    shape = rng.choice(((4, 3), (), (0, 3), (4,), (4, 3, 8, 8)))
    kind = rng.choice(("float32", "uint8", "int64", "bool", "complex64", "U3", "float16"))
    arrays: dict[str, Any] = {
        rng.choice(("x", "y", "\x1b[2J")): np.zeros(shape, kind),
        "y": np.zeros(rng.choice((4, 5)), "int64"),
    }
    np.savez_compressed(buffer, **arrays) if rng.random() < 0.5 else np.savez(buffer, **arrays)
    path.write_bytes(damaged_bytes(buffer.getvalue(), rng, first=200) if rng.random() < 0.8 else buffer.getvalue())
    found = load_data(str(path), Loaded(nn.Identity(), "identity"), Wanted())
    assert isinstance(found, Examples)
    found.read([0])


KINDS = (plan_file, model_file, checkpoint_file, weights_file, command_line_file, arrays_file)


def _damage_tensors(tensors: dict[str, Tensor], told: dict[str, str], rng: random.Random) -> None:
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(sorted(tensors))
        tensor, kind = tensors[name], rng.randrange(8)
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensors[rng.choice(("x", name + "\x1b[2J", "", "__metadata__x", "a" * 3000))] = tensor.clone()
        elif kind == 2:
            tensors[name] = tensor.new_zeros([size + rng.choice((-1, 0, 1)) for size in tensor.shape if size])
        elif kind == 3:
            dtypes = (torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8)
            tensors[name] = tensor.to(rng.choice(dtypes))
        elif kind == 4:
            tensors[name] = tensor.reshape(-1)
        elif kind == 5:
            tensors[name] = tensor[None].clone()
        elif kind == 6:
            tensors[name] = torch.full_like(tensor, rng.choice((0, 1)))
        else:
            told[rng.choice(("version", "format", "about", "plan", "config", "x\x1b[2J"))] = rng.choice(
                ("", "1", "2", "3", "{}", "[]", "null", "\x1b[2J", "{" * 1000, "[" * 200_000, "é")
            )
        if not tensors:
            return


def _damaged_state(state: dict[Any, Any], rng: random.Random) -> Any:
    """A state dict as no training script should write it."""
    kind = rng.randrange(9)
    name = rng.choice(sorted(state))
    if kind == 0:
        state["state_dict"] = state
    elif kind == 1:
        other: dict[Any, Any] = {"model": state}
        state["state_dict"] = other
    elif kind == 2:
        state[rng.choice((7, None, ("a",), 1.5, "\x1b[2J"))] = state[name]
    elif kind == 3:
        state[name] = rng.choice(("text", None, [], {}, 3, state[name].to_sparse(), torch.empty(2, device="meta")))
    elif kind == 4:
        state[name] = torch.quantize_per_tensor(state[name], 0.1, 0, torch.quint8)
    elif kind == 5:
        state[name] = torch.zeros(1).expand(state[name].shape)
    elif kind == 6:
        wrapped: Any = state
        for _ in range(rng.choice((1, 3, 50))):
            wrapped = {"model": wrapped, "epoch": 3}
        return wrapped
    elif kind == 7:
        return rng.choice(([], [state], state[name], "text", 3, {}, None))
    else:
        return {f"module.{key}": value for key, value in state.items()}
    return state


# --- one case ---------------------------------------------------------------------------------------------------------


def _unchanged(model: nn.Module, use: Callable[[], object]) -> None:
    """Whatever `use` raises, the model is as it was."""
    before = {name: (id(t), t.detach().clone()) for name, t in model.state_dict(keep_vars=True).items()}
    modules = [(name, id(module)) for name, module in model.named_modules()]
    try:
        use()
    except BaseException:
        after = model.state_dict(keep_vars=True)
        assert after.keys() == before.keys(), "names have changed"
        assert modules == [(name, id(module)) for name, module in model.named_modules()], "modules have changed"
        for name, (identity, value) in before.items():
            assert id(after[name]) == identity, f"{name} is another tensor"
            assert torch.equal(after[name], value), f"{name} has changed"
        raise


def one_case(seed: int) -> str:
    """Make and read one damaged file; returns "kind: read" or "kind: refused", and fails on anything else."""
    rng = random.Random(seed)  # noqa: S311
    kind = rng.choice(KINDS)
    start = time.process_time()  # others may use the machine
    outcome = "read"
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kind(rng, Path(name))
        except IspaspError as error:
            outcome = "refused"
            text = str(error)
            assert text, f"seed {seed}: {kind.__name__}: an error without a text"
            assert text == visible(text), f"seed {seed}: {kind.__name__}: raw characters in {text!r}"
            assert len(text) < 5000, f"seed {seed}: {kind.__name__}: an error of {len(text)} characters"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # Rust panics are no Exceptions
            raise AssertionError(f"seed {seed}: {kind.__name__}: {type(error).__name__}: {error}") from error
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"seed {seed}: {kind.__name__} took {seconds:.0f} s"
    return f"{kind.__name__}: {outcome}"


def main(first: int, count: int) -> int:
    """Run many cases, go on after failures, and print counts; returns how many failed."""
    counts: Counter[str] = Counter()
    failed = 0
    for seed in range(first, first + count):
        try:
            counts[one_case(seed)] += 1
        except AssertionError as error:
            failed += 1
            print(ascii(str(error))[:500], flush=True)
    for name, number in sorted(counts.items()):
        print(f"{name:30} {number:8,}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{count:,} cases, {failed} failed, at most {peak:.1f} GiB of memory")
    return failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
