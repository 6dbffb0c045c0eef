"""An interrupted run on disk: one safetensors file, whose metadata is JSON. Nothing is pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ispasp.errors import InputError, SaveError

FILE = "finetune.safetensors"
FORMAT, VERSION = "ispasp-finetune", "1"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All that decides how a run goes on after `step` steps.

    `settings` says which run it is; `model`, `optimizer` and `loader` are tensors by name.
    """

    step: int
    settings: Mapping[str, Any]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    loader: Sequence[Tensor]
    losses: Sequence[float]
    scaler: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[int, float] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put it into the folder. Whatever ends the run while it writes, the file before it stays as it was."""
        parts = {"model": self.model, "optimizer": self.optimizer}
        tensors = {f"{part}/{name}": _plain(t) for part, named in parts.items() for name, t in named.items()}
        tensors |= {f"loader/{number}": _plain(t) for number, t in enumerate(self.loader)}
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64, device="cpu")
        scores = list(self.scores.items())  # JSON has no whole numbers as keys
        about = {"step": self.step, "settings": self.settings, "scaler": self.scaler, "scores": scores}
        fresh = folder / f".{FILE}.new"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, fresh, {"format": FORMAT, "version": VERSION, "about": json.dumps(about)})
            with fresh.open("rb+") as file:
                os.fsync(file)  # else a loss of power may leave the new name with nothing behind it
            fresh.replace(folder / FILE)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise SaveError(f"cannot write a checkpoint to {folder}: {error}") from error


def read(folder: Path, settings: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint in a folder; None where there is none, an error where it is of a run with other settings."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{path} cannot be read: {error}; delete it to start anew") from error
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise SaveError(f"{path} is not a checkpoint of this version of ispasp: choose another folder")
    try:
        about = json.loads(metadata["about"])
        found = Checkpoint(
            about["step"],
            about["settings"],
            _part(tensors, "model/"),
            _part(tensors, "optimizer/"),
            [tensors[f"loader/{number}"] for number in range(len(_part(tensors, "loader/")))],
            tensors["losses"].tolist(),
            about["scaler"],
            dict(about["scores"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SaveError(f"{path} is damaged: {error!r}; delete it to start anew") from error
    _check_same(path, found.settings, settings)
    return found


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers (also those that a state dict leaves out), tied ones once.

    >>> sorted(model_tensors(nn.BatchNorm1d(2)))
    ['bias', 'num_batches_tracked', 'running_mean', 'running_var', 'weight']
    """
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy the saved tensors into a model of the same shape."""
    tensors = model_tensors(model)
    for name in sorted({*tensors, *saved}):
        here, there = (_described(t.get(name)) for t in (tensors, saved))
        if here != there:
            raise InputError(
                f"{name!r} is {here} in the model and {there} in the checkpoint: pass "
                "the model as it was when the run began (pruned in the same way), or another folder"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer remembers, by number of the parameter and name.

    >>> weight = nn.Parameter(torch.ones(2)); optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    >>> weight.sum().backward(); optimizer.step(); optimizer_tensors(optimizer)
    {'0/momentum_buffer': tensor([1., 1.])}
    """
    found = {}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{number}/{key}"] = value
            elif value is not None:
                raise SaveError(
                    f"{type(optimizer).__name__} remembers {key!r} as a {type(value).__name__}: only an optimizer "
                    "whose state is tensors can be checkpointed"
                )
    return found


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Give a new optimizer, of the same parameters, the memory of another."""
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in saved.items():
        number, key = name.split("/", 1)
        if int(number) >= len(shapes) or tensor.shape not in (shapes[int(number)], ()):  # (): a count of steps
            raise InputError(
                "the checkpoint is of a run that trained other parameters of the model: set requires_grad as it was "
                "then, or pass another folder"
            )
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _described(tensor: Tensor | None) -> str:
    return "not there" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()  # safetensors refuses views of one storage


def _check_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
            raise InputError(
                f"{path} is of a run with {name}={there.get(name)!r}, this one has {name}={here.get(name)!r}: pass "
                "another folder, or delete the file to start anew"
            )
