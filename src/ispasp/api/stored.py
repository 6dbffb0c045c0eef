"""What `model.safetensors` says beside its tensors: the plan, the config, ties and checksums.

Version 2 holds all of it in the metadata, so that one file, replaced in one step, is the whole save; `plan.json` and
the configs beside it are copies for people and other tools. Version 1 trusted the files beside it.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ispasp.api.files import CONFIG, FORMAT, GENERATION, PLAN, WEIGHTS
from ispasp.errors import PlanError, SaveError
from ispasp.files.reading import TensorFile, digest, is_regular, read_bytes
from ispasp.files.text import parsed
from ispasp.types.plan import Plan

VERSION, _FIRST = "2", "1"
_CHECKSUMS = ("texts_sha256", "tensors_sha256")
_KEYS = {PLAN: "plan", CONFIG: "config", GENERATION: "generation_config"}  # file beside it -> key in the metadata
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@dataclass(frozen=True)
class Stored:
    """`texts`: file name -> text; `ties`: name -> name that its tensor is stored under; `unsaved`: buffer -> dtype."""

    plan: Plan
    texts: Mapping[str, str]
    ties: Mapping[str, str]
    unsaved: Mapping[str, torch.dtype]
    salt: str
    checksum: str

    def check(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Compare the tensors with their checksum, and the ties with the tensors."""
        if self.checksum != digest(tensors, self.salt):
            raise SaveError(f"{folder / WEIGHTS} has been changed (checksums differ): copy or save it again")
        for name, stored in self.ties.items():
            if name in tensors or stored not in tensors:
                raise _damaged(folder, f"{name!r} is tied to {stored!r}")


def metadata_of(
    texts: Mapping[str, str], ties: Mapping[str, str], unsaved: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, str]:
    """The metadata of version 2. `texts`: file name -> text of the plan and the configs."""
    told = {_KEYS[name]: text for name, text in texts.items()}
    told |= {"format": FORMAT, "version": VERSION, "about": json.dumps({"ties": ties, "unsaved": unsaved})}
    salt = _checksum(told)
    return {**told, "texts_sha256": salt, "tensors_sha256": digest(tensors, salt)}


def stored(file: TensorFile, folder: Path) -> Stored:
    """What the open `model.safetensors` of a folder says, checked."""
    told = file.metadata
    if told.get("format") != FORMAT:
        raise SaveError(f"{folder / WEIGHTS} was not written by ispasp (its format is {told.get('format')!r}): "
                        "pass a folder that ispasp.save wrote")  # fmt: skip
    version = told.get("version")
    if version not in (VERSION, _FIRST):
        raise SaveError(f"{folder} has version {version!r}; this ispasp reads up to {VERSION!r}: update ispasp")
    texts = _texts(told, folder) if version == VERSION else _texts_beside(told, folder)
    salt = told.get("texts_sha256", "") if version == VERSION else told.get("about", "")
    ties, unsaved = _about(told.get("about", ""), folder)
    try:
        plan = Plan.from_json(texts[PLAN])
    except PlanError as error:
        raise PlanError(f"{folder}: {error}") from None
    return Stored(plan, texts, ties, unsaved, salt, told.get("tensors_sha256", ""))


def _texts(told: Mapping[str, str], folder: Path) -> dict[str, str]:
    texts = {name: told[key] for name, key in _KEYS.items() if key in told}
    if told.get("texts_sha256") != _checksum(told) or PLAN not in texts:
        raise SaveError(f"{folder / WEIGHTS} has been changed (checksums differ): copy or save it again")
    for name, text in texts.items():
        path = folder / name
        if is_regular(path) and (path.stat().st_size != len(text.encode()) or read_bytes(path) != text.encode()):
            warnings.warn(
                f"{path} is not the one that {WEIGHTS} was saved with, and is ignored: save the model again",
                stacklevel=5,
            )
    return texts


def _texts_beside(told: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The texts of version 1, from the files."""
    if not is_regular(folder / PLAN):
        raise SaveError(f"{folder} has no {PLAN}: pass a folder that ispasp.save wrote to the end")
    data = {name: read_bytes(folder / name) for name in _KEYS if is_regular(folder / name)}
    if told.get("plan_sha256") != hashlib.sha256(data[PLAN]).hexdigest():
        raise SaveError(f"{folder / PLAN} is not the plan that {WEIGHTS} was saved with (checksums differ): "
                        "restore both files from one save")  # fmt: skip
    try:
        return {name: text.decode() for name, text in data.items()}
    except UnicodeDecodeError:
        raise SaveError(f"{folder} holds a {', '.join(data)} that is not UTF-8: restore the files") from None


def _about(text: str, folder: Path) -> tuple[dict[str, str], dict[str, torch.dtype]]:
    try:
        about = parsed(text)
    except ValueError as error:
        raise _damaged(folder, str(error)) from None
    if not isinstance(about, dict) or about.keys() != {"ties", "unsaved"}:
        raise _damaged(folder, f"it says {text[:80]!r}")
    ties, unsaved = about["ties"], about["unsaved"]
    for part in (ties, unsaved):
        if not isinstance(part, dict) or not all(isinstance(value, str) for value in part.values()):
            raise _damaged(folder, f"it says {text[:80]!r}")
    for name, dtype in unsaved.items():
        if dtype not in _DTYPES:
            raise _damaged(folder, f"{name!r} is of the dtype {dtype[:80]!r}")
    return ties, {name: _DTYPES[dtype] for name, dtype in unsaved.items()}


def _checksum(told: Mapping[str, Any]) -> str:
    texts = sorted((key, text) for key, text in told.items() if key not in _CHECKSUMS)
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _damaged(folder: Path, reason: str) -> SaveError:
    return SaveError(f"the metadata of {folder / WEIGHTS} are damaged ({reason}): copy or save it again")
