"""Preprocessing of images: resize, crop the centre, normalise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ispasp.cli.options import Wanted
from ispasp.errors import InputError

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sized(self, size: int) -> Preprocessing:
        """The same for another image size, with the margin around the crop in proportion."""
        return self if size == self.size else replace(self, size=size, resize=round(size * self.resize / self.size))

    def changed(self, wanted: Wanted) -> Preprocessing:
        """The same with the user's options, which are named in `source`."""
        given = {name: v for name in ("size", "resize", "mean", "std") if (v := getattr(wanted, name))}
        found = self.sized(given.get("size", self.size))
        found = replace(found, **given, source=", ".join([self.source, *(f"--{name}" for name in given)]))
        if found.resize < found.size:
            raise InputError(
                f"--resize {found.resize} is less than the side {found.size} of the crop: pass a smaller --size"
            )
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
