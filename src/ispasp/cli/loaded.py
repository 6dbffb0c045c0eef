"""The model and examples that a command has loaded, preprocessing of images, and the output that each label means."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ispasp.cli.options import Wanted
from ispasp.errors import InputError, failing_as
from ispasp.graph.trace import evaluating, run
from ispasp.types.plan import Plan

Labels = tuple[Tensor | None, tuple[str, ...]]  # numbers of classes, and the names of these
_LARGEST = 8192  # pixels of a side that a file may ask for
_INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos")


@dataclass(frozen=True)
class Preprocessing:
    """How images become inputs: resize the shorter side, crop the centre, normalise. `source` names their origin."""

    size: int = 224
    resize: int = 256
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    source: str = "ImageNet's defaults"

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (self.mean, self.std))
        how = "" if self.interpolation == "bilinear" else f" ({self.interpolation})"
        crop = f"centre {self.size}x{self.size}"
        return f"shorter side {self.resize}{how}, {crop}, mean {mean}, std {std} ({self.source})"

    def sized(self, size: int) -> Preprocessing:
        """The same for another image size, with the margin around the crop in proportion."""
        return self if size == self.size else replace(self, size=size, resize=round(size * self.resize / self.size))

    def changed(self, wanted: Wanted) -> Preprocessing:
        """The same with the user's options, which are named in `source`."""
        given = {name: v for name in ("size", "resize", "mean", "std") if (v := getattr(wanted, name))}
        found = self.sized(given.get("size", self.size))
        found = replace(found, **given, source=", ".join([self.source, *(f"--{name}" for name in given)]))
        if found.resize < found.size:
            raise InputError(f"--resize {found.resize} is less than the side {found.size} of the crop: lower --size")
        colours = max(len(found.mean), len(found.std))
        mean, std = (values * colours if len(values) == 1 else values for values in (found.mean, found.std))
        return replace(found, mean=mean, std=std)

    def image(self, picture: Any) -> Tensor:
        """An RGB image of PIL as the network sees it; an image of the right size is not resized."""
        from PIL import Image

        size = self.size
        if picture.size != (size, size):
            short = min(picture.size)
            width, height = (self.resize if side == short else int(self.resize * side / short) for side in picture.size)
            left, top = round((width - size) / 2), round((height - size) / 2)
            picture = picture.resize((width, height), Image.Resampling[self.interpolation.upper()])
            picture = picture.crop((left, top, left + size, top + size))
        return self.normalise(torch.from_numpy(np.array(picture)).permute(2, 0, 1))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Scale bytes to [0, 1] and standardise them, unless mean and std have another number of colours."""
        x = pixels.float() / 255  # (..., colours, height, width)
        if len(self.mean) not in (1, x.shape[-3]):
            return x
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std


IMAGENET = Preprocessing()


def from_dict(told: Any, source: str) -> Preprocessing | None:
    """Read preprocessing from a file's JSON; None if it holds none that is valid."""
    try:
        mean, std = (tuple(float(value) for value in told[key]) for key in ("mean", "std"))
        size, resize = (int(told[key]) for key in ("size", "resize"))
        how = str(told.get("interpolation", "bilinear"))
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
        return None
    scaled = len(mean) == len(std) in (1, 3) and all(map(math.isfinite, (*mean, *std))) and min(std) > 0
    valid = scaled and 0 < size <= resize <= _LARGEST and how in _INTERPOLATIONS
    return Preprocessing(size, resize, mean, std, how, source) if valid else None


def of_torchvision(entry: Any) -> Preprocessing:
    """That of an entry of torchvision's weights, else ImageNet's."""
    told = entry and entry.transforms()
    try:
        (size,), (resize,) = told.crop_size, told.resize_size
        how = told.interpolation.value
    except (AttributeError, TypeError, ValueError):  # not weights that classify images
        return IMAGENET
    told = {"size": size, "resize": resize, "mean": told.mean, "std": told.std, "interpolation": how}
    return from_dict(told, f"torchvision's {entry.name}") or IMAGENET


def of_timm(config: Mapping[str, Any], size: int) -> Preprocessing:
    """That of timm's data config, for another image size; else ImageNet's."""
    try:
        told = {**config, "size": size, "resize": int(size / float(config.get("crop_pct") or 0.875))}
    except (TypeError, ValueError, ZeroDivisionError):
        told = {}
    return from_dict(told, "timm's data config") or IMAGENET.sized(size)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in eval mode. `spec` is what was typed."""

    model: nn.Module
    spec: str
    input_size: tuple[int, ...] | None = None  # of one example, if known
    preprocessing: Preprocessing = IMAGENET
    tokenizer: str = ""  # folder or hub name
    warnings: tuple[str, ...] = ()
    plan: Plan | None = None  # of a pruned model
    names: tuple[str, ...] = ()  # of the outputs, if known

    @property
    def config(self) -> Any:
        """The config of a Hugging Face model; None for other models."""
        return getattr(self.model, "config", None) if hasattr(self.model, "main_input_name") else None

    @property
    def keyword(self) -> str:
        """The main input of a Hugging Face model; empty for other models."""
        return str(getattr(self.model, "main_input_name", "")) if self.config is not None else ""

    @property
    def reads_text(self) -> bool:
        """Whether it is a Hugging Face model that takes tokens."""
        return self.keyword in ("input_ids", "decoder_input_ids")

    @property
    def longest(self) -> int:
        """The most tokens a text may have, according to the config."""
        told = getattr(self.config, "max_position_embeddings", None)
        return told if isinstance(told, int) and told > 0 else sys.maxsize

    @property
    def parameters(self) -> set[str]:
        return set(inspect.signature(self.model.forward).parameters)

    def call(self, x: Tensor) -> Any:
        """Return the input in the model's dtype, as keyword arguments for a Hugging Face model."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), x.dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        return self.complete({self.keyword: x}) if self.keyword else x

    def complete(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the other arguments that a Hugging Face forward needs: no cache, and inputs of a decoder."""
        if "use_cache" in self.parameters:
            batch["use_cache"] = False
        if getattr(self.config, "is_encoder_decoder", False) and "decoder_input_ids" in self.parameters:
            batch.setdefault("decoder_input_ids", batch[self.keyword])
        return batch


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples that `read(numbers)` makes into a batch for the model. `text` names them in messages.

    `remedy` says what to do if the model does not run on them.
    """

    count: int
    read: Callable[[Sequence[int]], Any]
    text: str
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()  # names of labels 0, 1, ...; empty if labels are the model's outputs
    warnings: tuple[str, ...] = ()
    tokenizer: Any = None  # of texts
    remedy: str = "pass data as this model takes it"
    preprocessing: Preprocessing | None = None  # of images

    def some(self, number: int) -> list[int]:
        """Indices of `number` examples, spread evenly so that a sorted folder yields all its classes."""
        number = min(number, self.count)
        return [i * self.count // number for i in range(number)]

    def loader(
        self, batch_size: int, *, numbers: Sequence[int] | None = None, labelled: bool = False, shuffle: bool = False
    ) -> DataLoader[Any]:
        """Return batches of inputs; with `labelled`, (inputs, labels) or a dict with "labels"."""
        chosen = cast("Dataset[int]", range(self.count) if numbers is None else numbers)
        return DataLoader(chosen, batch_size, shuffle=shuffle, collate_fn=self._labelled if labelled else self.read)

    def needed_labels(self) -> Tensor:
        if self.labels is None:
            other = "an .npz or a table (.csv, .tsv) with --labels NAME, or hf-dataset:NAME"
            remedy = f"pass an image folder with one sub-folder per class, {other}"
            raise InputError(f"{self.text} have no labels: {remedy}")
        return self.labels

    def _labelled(self, numbers: Sequence[int]) -> Any:
        x, y = self.read(numbers), self.needed_labels()[torch.as_tensor(numbers)]
        return {**x, "labels": y} if isinstance(x, Mapping) else (x, y)


def runs(loaded: Loaded, examples: Examples) -> Any:
    """Return the output on the first and last (for texts: longest) example, or raise an error that users understand."""
    batch = examples.read(sorted({0, examples.count - 1}))
    what = f"{loaded.spec} does not run on {examples.text}"
    with failing_as(InputError, what, examples.remedy), evaluating(loaded.model):
        return run(loaded.model, batch)


def numbered(names: Sequence[str], among: Sequence[str] = ()) -> Labels:
    """Return the label of every example, and the class names in alphabetical order; none if names are numbers.

    `among` names classes that may have no example."""
    classes = sorted({*names, *among})
    if all(name.isdecimal() for name in classes):
        return torch.tensor([int(name) for name in names]), ()
    index = {name: i for i, name in enumerate(classes)}
    return torch.tensor([index[name] for name in names]), tuple(classes)


def pictures(
    count: int, picture: Callable[[int], Any], text: str, labels: Labels, loaded: Loaded, wanted: Wanted
) -> Examples:
    """Return examples made of RGB images of PIL, `picture(0)` to `picture(count - 1)`."""
    prepare = loaded.preprocessing.changed(wanted)

    def read(numbers: Sequence[int]) -> Any:
        return loaded.call(torch.stack([prepare.image(picture(int(i))) for i in numbers]))

    remedy = f"pass --size, the side of the images that it takes (now {prepare.size}), or other data"
    return Examples(count, read, text, *labels, remedy=remedy, preprocessing=prepare)


def matched(examples: Examples, outputs: int, names: Sequence[str] = ()) -> Examples:
    """Return the examples with outputs of the model as labels; `names` of the outputs, if known."""
    labels = examples.needed_labels()
    if examples.classes:
        index = _index(examples.classes, outputs, names)
        if index is None:
            known = f"{examples.text} have {len(examples.classes)} classes, such as {examples.classes[0]!r}"
            remedy = f"name the classes by output, from 0 to {outputs - 1}, or as the model does"
            raise InputError(f"{known}, the model has {outputs:,} outputs: {remedy}")
        labels = torch.tensor(index)[labels]
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= outputs:
        wrong = f"up to {highest}" if highest >= outputs else f"from {lowest} on"
        raise InputError(f"{examples.text} have labels {wrong}, the model has {outputs:,} outputs: pass other data")
    return replace(examples, labels=labels)


def _index(classes: Sequence[str], outputs: int, names: Sequence[str]) -> list[int] | None:
    """Return the output of every class: by name, else in alphabetical order if there are as many of both."""
    for known in (names, _synsets(classes, outputs)):
        plain = [_plain(name) for name in known]
        unique = {name for name, times in Counter(plain).items() if times == 1}
        if len(known) == outputs and all(_plain(name) in unique for name in classes):
            return [plain.index(_plain(name)) for name in classes]
    return list(range(outputs)) if len(classes) == outputs else None


def _synsets(classes: Sequence[str], outputs: int) -> Sequence[str]:
    """Return ImageNet's names of its classes, such as n01440764, if these are some."""
    if outputs != 1000 or not all(re.fullmatch(r"n\d{8}", name) for name in classes) or find_spec("timm") is None:
        return ()
    from ispasp.integrations.torchvision import import_torchvision

    import_torchvision()  # timm imports it
    from timm.data.imagenet_info import ImageNetInfo

    return [str(name) for name in ImageNetInfo().label_names()]  # type: ignore[no-untyped-call]


def _plain(name: str) -> str:
    return " ".join(re.split(r"[\s_-]+", name.casefold().strip(" _-")))
