"""The files of a save: their metadata, checked, and the dense Hugging Face model that the config describes.

`model.safetensors` is the whole save: its metadata hold the plan and the configs, so replacing this one file replaces
the save. The JSON files beside it are copies.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook as on_module,
    register_module_parameter_registration_hook as on_parameter,
)

from ispasp.errors import MissingExtraError, PlanError, SaveError, needed
from ispasp.files import TensorFile, digest, folder_path, is_regular, memory, opened, parsed, read_bytes
from ispasp.types.plan import Plan

PLAN, CONFIG, GENERATION, WEIGHTS = "plan.json", "config.json", "generation_config.json", "model.safetensors"
COPIES = {PLAN: "plan", CONFIG: "config", GENERATION: "generation_config"}  # file name -> key in the metadata
FILES = (*COPIES, WEIGHTS)
FORMAT, _VERSION = "ispasp", "2"
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
Texts = Mapping[str, str]
_REMEDY = "pass the dense model: ispasp.load(folder, model)"


@dataclass(frozen=True)
class Saved:
    """Checked metadata of a save, with its still unread tensors."""

    path: Path
    file: TensorFile
    plan: Plan
    texts: Texts  # by file name
    ties: Texts  # name -> the name that its tensor is stored under
    unsaved: Mapping[str, torch.dtype]  # of buffers
    zeros: tuple[str, ...]  # tensors that only the published config asks for
    salt: str

    def tensors(self, limit: int) -> dict[str, Tensor]:
        """The tensors of a file of at most `limit` bytes, after comparing them with their checksum and the ties."""
        tensors = self.file.tensors(limit)
        if self.file.metadata.get("tensors_sha256") != digest(tensors, self.salt):
            raise _changed(self.path)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self.zeros}
        for name, stored in self.ties.items():
            if name in tensors or stored not in tensors:
                raise _damaged(self.path, f"{name!r} is tied to {stored!r}")
        return tensors


@contextmanager
def opened_save(folder: str | os.PathLike[str]) -> Iterator[Saved]:
    """Open `model.safetensors` in a folder and check its metadata."""
    folder = folder_path(folder)
    path = folder / WEIGHTS
    if not os.path.isdir(folder):  # noqa: PTH112  # False for names that are too long, too
        raise SaveError(f"{folder} is not a folder: pass the folder that ispasp.save wrote")
    if not is_regular(path):
        raise SaveError(f"{folder} has no {WEIGHTS}: pass a folder that ispasp.save finished writing")
    with opened(path) as file:
        header = file.metadata
        form, version, about = writer(header), header.get("version"), header.get("about", "")
        if form != FORMAT:
            raise SaveError(f"{path} was not written by ispasp (format {form!r}): pass a folder that ispasp.save wrote")
        if version != _VERSION:
            raise SaveError(f"{folder} has version {version!r}; this ispasp reads {_VERSION!r}: update ispasp")
        texts = _texts(header, folder)
        try:
            plan = Plan.from_json(texts[PLAN])
        except PlanError as error:
            raise PlanError(f"{folder}: {error}") from None
        zeros = tuple(header.get("zeros", "").split())
        yield Saved(path, file, plan, texts, *_ties_and_unsaved(about, path), zeros, header["texts_sha256"])


def writer(header: Texts) -> str | None:
    """The library that wrote a file, by its metadata."""
    return header.get("writer", header.get("format"))


def is_ours(folder: Path) -> bool:
    """Whether ispasp wrote the weights in a folder."""
    with suppress(SaveError), opened(folder / WEIGHTS) as file:
        return writer(file.metadata) == FORMAT
    return False


def metadata(
    texts: Texts, ties: Texts, unsaved: Texts, tensors: Mapping[str, Tensor], published: str, zeros: Iterable[str]
) -> dict[str, str]:
    """The metadata of `model.safetensors`. `texts`: file name -> text of the plan and the configs.

    `published` is the `config.json` of a folder that transformers opens, else empty; `zeros` are tensors added for it.
    """
    header = {COPIES[name]: text for name, text in texts.items()}
    header |= {"format": FORMAT, "version": _VERSION, "about": json.dumps({"ties": ties, "unsaved": unsaved})}
    if published:
        header |= {"format": "pt", "writer": FORMAT, "published": published, "zeros": " ".join(sorted(zeros))}
    salt = checksum(header)
    return header | {"texts_sha256": salt, "tensors_sha256": digest(tensors, salt)}


def checksum(header: Texts) -> str:
    """Checksum of all metadata but the checksums themselves."""
    texts = sorted((key, text) for key, text in header.items() if key not in ("texts_sha256", "tensors_sha256"))
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _texts(header: Texts, folder: Path) -> dict[str, str]:
    texts = {name: header[key] for name, key in COPIES.items() if key in header}
    if header.get("texts_sha256") != checksum(header) or PLAN not in texts:
        raise _changed(folder / WEIGHTS)
    for name, text in texts.items():
        path, data = folder / name, (header.get("published", text) if name == CONFIG else text).encode()
        if is_regular(path) and (path.stat().st_size != len(data) or read_bytes(path) != data):
            message = f"{path} is not the one that {WEIGHTS} was saved with, and is ignored: save the model again"
            warnings.warn(message, stacklevel=5)  # the caller of load
    return texts


def _ties_and_unsaved(text: str, path: Path) -> tuple[dict[str, str], dict[str, torch.dtype]]:
    try:
        about = parsed(text)
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    parts = list(about.values()) if isinstance(about, dict) and about.keys() == {"ties", "unsaved"} else [None]
    if not all(isinstance(part, dict) and all(isinstance(v, str) for v in part.values()) for part in parts):
        raise _damaged(path, f"it says {text[:80]!r}")
    for name, dtype in about["unsaved"].items():
        if dtype not in _DTYPES:
            raise _damaged(path, f"{name!r} is of the dtype {dtype[:80]!r}")
    return about["ties"], {name: _DTYPES[dtype] for name, dtype in about["unsaved"].items()}


def _changed(path: Path) -> SaveError:
    return SaveError(f"{path} has been changed (checksums differ): copy or save it again")


def _damaged(path: Path, reason: str) -> SaveError:
    return SaveError(f"the metadata of {path} are damaged ({reason}): copy or save it again")


def build(saved: Saved) -> nn.Module:
    """The dense Hugging Face model that the saved config describes, in eval mode."""
    path = saved.path.with_name(CONFIG)
    try:
        data = parsed(saved.texts[CONFIG])
        name = data["architectures"][0]
    except (ValueError, LookupError, TypeError) as error:
        raise SaveError(f"{path} does not say which model to build ({error!r}): {_REMEDY}") from error
    transformers = needed("transformers", f"building a {name}", "transformers")
    try:
        cls = getattr(transformers, name)
        if not issubclass(cls, transformers.PreTrainedModel):
            raise TypeError(f"{name} is not a PreTrainedModel")
        with torch.random.fork_rng(devices=[]), _bounded(saved):
            model: nn.Module = cls(cls.config_class.from_dict(data))
        if GENERATION in saved.texts:
            model.generation_config = transformers.GenerationConfig.from_dict(parsed(saved.texts[GENERATION]))
    except Exception as error:
        if "torchvision::" in "".join(traceback.format_exception(error)):  # it misses its own operators
            raise MissingExtraError(
                f"building a {name} imports torchvision, which does not fit this PyTorch {torch.__version__} (its "
                "compiled part does not load): install the torchvision made for it, or pip uninstall torchvision"
            ) from error
        raise SaveError(f"cannot build a {name} from {path} ({error}): {_REMEDY}") from error
    return model.eval()


@contextmanager
def _bounded(saved: Saved) -> Iterator[None]:
    """Stop a constructor that makes more than the saved tensors explain, before it fills what it allocates."""
    layouts, shapes = saved.plan.structure.tensors, saved.file.shapes()
    numbers = sum(math.prod(layouts[name].shape if name in layouts else shape) for name, shape in shapes.items())
    left = {
        "modules": 20 * (len(shapes) + len(saved.ties)) + 1000,  # activations, dropouts and containers among them
        "bytes": min(memory(), 16 * numbers + 2**26),  # twice float64
    }
    thread = threading.get_ident()  # the hooks are called for all threads

    def count(what: str, number: int) -> None:
        if threading.get_ident() == thread:
            left[what] -= number
            if left[what] < 0:
                raise ValueError(f"it makes more {what} than the saved tensors explain")

    with (
        on_parameter(lambda _module, _name, value: count("bytes", 0 if value is None else value.nbytes)),
        on_module(lambda _module, _name, _child: count("modules", 1)),
    ):
        yield
