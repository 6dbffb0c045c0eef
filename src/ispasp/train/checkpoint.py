"""An interrupted run on disk: one safetensors file, whose metadata is JSON. Nothing is pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ispasp.errors import InputError, SaveError
from ispasp.files.reading import TensorFile, digest, opened
from ispasp.files.text import parsed
from ispasp.files.writing import make_folder, publish, write_tensors

FILE = "finetune.safetensors"
FORMAT, VERSION, _FIRST = "ispasp-finetune", "2", "1"  # the first version had no checksum
_STATES = 16  # a checkpoint may take this many times the bytes of the model: optimizers remember in float32
_BESIDE = 2**27  # bytes of names, metadata and generators
_MEMORY = {"SGD": {"momentum_buffer"}, "AdamW": {"step", "exp_avg", "exp_avg_sq"}}  # of optimizers for a parameter


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
        about = json.dumps({"step": self.step, "settings": self.settings, "scaler": self.scaler, "scores": scores})
        told = {"format": FORMAT, "version": VERSION, "about": about, "sha256": digest(tensors, about)}
        fresh = folder / f".{FILE}.new"
        try:
            make_folder(folder)
            write_tensors(fresh, tensors, told)
            publish(fresh, folder / FILE)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise SaveError(f"cannot write a checkpoint to {folder}: {error}") from error


def read(folder: Path, settings: Mapping[str, Any], steps: int, model: nn.Module) -> Checkpoint | None:
    """The checkpoint in a folder; None where there is none, an error where it is of a run with other settings.

    `steps`: how many the whole run has. A file that is much larger than the model explains is not read.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        return None
    limit = _STATES * sum(t.nbytes for t in model_tensors(model).values()) + 8 * steps + _BESIDE
    try:
        with opened(path) as file:
            found = _parsed(file, path, limit)
    except SaveError as error:
        raise SaveError(f"{error}; delete it to start anew") from None
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise SaveError(f"{path} is damaged: {error!r:.200}; delete it to start anew") from None
    _check_same(path, found.settings, settings)
    if not found.step <= steps:
        raise SaveError(f"{path} is of step {found.step}, the run has {steps}: delete it to start anew")
    return found


def _parsed(file: TensorFile, path: Path, limit: int) -> Checkpoint:
    told = file.metadata
    if told.get("format") != FORMAT or told.get("version") not in (VERSION, _FIRST):
        raise SaveError(f"{path} is not a checkpoint of this version of ispasp: choose another folder")
    tensors = file.tensors(limit)
    if told["version"] == VERSION and told.get("sha256") != digest(tensors, told["about"]):
        raise SaveError(f"{path} has been changed (checksums differ): restore it")
    about, losses = parsed(told["about"]), tensors["losses"]
    step = about["step"]
    if type(step) is not int or step < 0 or losses.dtype != torch.float64 or losses.shape != (step,):
        raise ValueError(f"{losses.numel()} losses of step {step!r:.80}")
    if not isinstance(about["settings"], dict):
        raise TypeError(f"its settings are a {type(about['settings']).__name__}")
    for name in tensors:
        if name != "losses" and not name.startswith(("model/", "optimizer/", "loader/")):
            raise ValueError(f"a tensor {name!r:.80}")
    return Checkpoint(
        step,
        about["settings"],
        _part(tensors, "model/"),
        _part(tensors, "optimizer/"),
        [tensors[f"loader/{number}"] for number in range(len(_part(tensors, "loader/")))],
        losses.tolist(),
        {str(name): float(value) for name, value in about["scaler"].items()},
        {_step(number, step): float(score) for number, score in about["scores"]},
    )


def _step(value: Any, last: int) -> int:
    if type(value) is not int or not 0 < value <= last:
        raise ValueError(f"a score of step {value!r:.80}")
    return value


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers (also those that a state dict leaves out), tied ones once.

    >>> sorted(model_tensors(nn.BatchNorm1d(2)))
    ['bias', 'num_batches_tracked', 'running_mean', 'running_var', 'weight']
    """
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Refuse saved tensors of a model with other names, shapes or dtypes."""
    tensors = model_tensors(model)
    for name in sorted({*tensors, *saved}):
        here, there = (_described(t.get(name)) for t in (tensors, saved))
        if here != there:
            raise InputError(
                f"{name!r} is {here} in the model and {there} in the checkpoint: pass "
                "the model as it was when the run began (pruned in the same way), or another folder"
            )


@torch.no_grad()
def restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy the saved tensors into a model of the same shape."""
    for name, tensor in model_tensors(model).items():
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
        number, _, key = name.partition("/")
        place = int(number) if number.isdecimal() and len(number) < 10 else len(shapes)
        if place >= len(shapes) or tensor.shape != (() if key == "step" else shapes[place]):
            raise _others()
        state.setdefault(place, {})[key] = tensor
    known = _MEMORY.get(type(optimizer).__name__)
    if known is not None and any(memory.keys() != known for memory in state.values()):
        raise _others()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _others() -> InputError:
    return InputError(
        "the checkpoint is of a run that trained other parameters of the model: set requires_grad as it was then, or "
        "pass another folder"
    )


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
                f"{path} is of a run with {name}={there.get(name)!r:.200}, this one has {name}={here.get(name)!r}: "
                "pass another folder, or delete the file to start anew"
            )
