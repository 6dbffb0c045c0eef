"""A run on disk: one safetensors file with JSON metadata. Nothing is pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ispasp.engine.batches import described
from ispasp.engine.team import Team
from ispasp.errors import InputError, SaveError
from ispasp.files import TensorFile, digest, make_folder, opened, parsed, publish, write_tensors

VERSION = "2"
_STATES = 16  # most bytes of a checkpoint per byte of the model: optimizers keep float32
_BESIDE = 2**27  # bytes of names, metadata and generators
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_MEMORY = {"SGD": {"momentum_buffer"}, "Adam": _ADAM, "AdamW": _ADAM}  # state of each parameter

Found = TypeVar("Found")
Parts = Mapping[str, Mapping[str, Tensor]]  # part, such as "model" -> name -> tensor
Build = Callable[[dict[str, Any], Parts], Found]  # what was written beside the tensors, and these -> what they mean


@dataclass(frozen=True)
class Store:
    """The checkpoint file of a run in a folder, written every `every` steps.

    Runs with the same `settings` can go on from each other's files.
    """

    folder: Path
    kind: str
    settings: Mapping[str, Any]
    every: int

    @property
    def path(self) -> Path:
        """The file, such as "finetune.safetensors"."""
        return self.folder / f"{self.kind}.safetensors"

    def write(self, about: Mapping[str, Any], parts: Parts) -> None:
        """Write a checkpoint. If the run dies meanwhile, the previous one stays as it was."""
        flat = {f"{part}/{name}" if name else part: t for part, named in parts.items() for name, t in named.items()}
        # safetensors wants no views
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in flat.items()}
        text = json.dumps({"settings": self.settings, **about})
        metadata = {"format": f"ispasp-{self.kind}", "version": VERSION, "about": text, "sha256": digest(tensors, text)}
        fresh = self.folder / f".{self.path.name}.new"
        try:
            make_folder(self.folder)
            write_tensors(fresh, tensors, metadata)
            publish(fresh, self.path)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise SaveError(f"cannot write a checkpoint to {self.folder}: {error}") from error

    def read(self, ranks: Team, model: nn.Module, steps: float, build: Build[Found]) -> Found | None:
        """Read the checkpoint and pass it to `build`; None if there is none. All ranks read the same.

        Raises if it is from a run with other settings or of more than `steps` steps.
        """
        with ranks.together("the reading of the checkpoint"):
            found = self._read(model, steps, build) if os.path.lexists(self.path) else None
        # Nobody writes before all have read.
        numbers = ranks.gather("the step of the checkpoint", found[0] if found else -1)
        if len(set(numbers)) > 1:
            raise InputError(f"processes read steps {numbers} from {self.folder} (-1: none): give all the same file")
        return found[1] if found else None

    def _read(self, model: nn.Module, steps: float, build: Build[Found]) -> tuple[int, Found]:
        many = 0 if steps == float("inf") else int(steps)
        limit = _STATES * sum(t.nbytes for t in model_tensors(model).values()) + 8 * many + _BESIDE
        try:
            with opened(self.path) as file:
                about, parts = self._parsed(file, limit)
            built = build(about, parts)
        except SaveError as error:
            raise SaveError(f"{error}; delete it to start over") from None
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise SaveError(f"{self.path} is damaged: {error!r:.200}; delete it to start over") from None
        for name in {**about["settings"], **self.settings}:
            there, here = about["settings"].get(name), self.settings.get(name)
            if there != here:
                wrong = f"{self.path} is of a run with {name}={there!r:.200}, this one has {name}={here!r}"
                raise InputError(f"{wrong}: pass another folder, or delete the file to start over")
        if about["step"] > steps:
            raise SaveError(f"{self.path} is of step {about['step']}, the run has {steps}: delete it to start over")
        return about["step"], built

    def _parsed(self, file: TensorFile, limit: int) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        metadata = file.metadata
        if metadata.get("format") != f"ispasp-{self.kind}" or metadata.get("version") != VERSION:
            raise SaveError(f"{self.path} is not a checkpoint of this version of ispasp: choose another folder")
        tensors = file.tensors(limit)
        if metadata.get("sha256") != digest(tensors, metadata["about"]):
            raise SaveError(f"{self.path} has been changed (checksums differ): restore it")
        about = parsed(metadata["about"])
        if type(about["step"]) is not int or about["step"] < 0 or not isinstance(about["settings"], dict):
            raise ValueError(f"step {about['step']!r:.80}, settings {about['settings']!r:.80}")
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = tensor
        return about, parts


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers (non-persistent ones too), tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_fits(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors of the model and those in the checkpoint have the same names, shapes and dtypes."""
    for name in sorted({*tensors, *saved}):
        here, there = (described(t[name]) if name in t else "not there" for t in (tensors, saved))
        if here != there:
            remedy = "pass the model as it was when the run began (pruned in the same way), or another folder"
            raise InputError(f"{name!r} is {here} in the model and {there} in the checkpoint: {remedy}")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer by number of the parameter and name, such as "0/momentum_buffer"."""
    found, kind = {}, type(optimizer).__name__
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{number}/{key}"] = value
            elif value is not None:
                raise SaveError(f"{kind} keeps {key!r}, a {type(value).__name__}: only tensors can be saved")
    return found


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Load the state of another optimizer of the same parameters."""
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    fits = True
    for name, tensor in saved.items():
        number, _, key = name.partition("/")
        place = int(number) if number.isdecimal() and len(number) < 10 else len(shapes)
        fits &= place < len(shapes) and tensor.shape == (() if key == "step" else shapes[place])
        state.setdefault(place, {})[key] = tensor
    known = _MEMORY.get(type(optimizer).__name__)
    if not fits or (known is not None and any(memory.keys() != known for memory in state.values())):
        raise InputError("the saved run trained other parameters: set requires_grad as it was, or pass another folder")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
