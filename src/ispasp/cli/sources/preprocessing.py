"""Preprocessing of images: resize, cut the centre out, normalise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ispasp.errors import InputError

_SIZE, _RESIZE = 224, 256
_LARGEST = 8192  # pixels of a side that a file may ask for


@dataclass(frozen=True)
class Preprocessing:
    """How images become inputs: the shorter side is resized, the centre cut out, the pixels normalised.

    `source` says where the numbers come from.

    >>> print(Preprocessing())
    shorter side 256, centre 224x224, mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225 (ImageNet's defaults)
    """

    size: int = _SIZE
    resize: int = _RESIZE
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    source: str = "ImageNet's defaults"

    def __str__(self) -> str:
        """One line."""
        mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (self.mean, self.std))
        how = "" if self.interpolation == "bilinear" else f" ({self.interpolation})"
        return (
            f"shorter side {self.resize}{how}, centre {self.size}x{self.size}, mean {mean}, std {std} ({self.source})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON holds them."""
        return asdict(self)

    def sized(self, size: int) -> Preprocessing:
        """The same for images of another side; the margin around the centre grows alike.

        >>> Preprocessing().sized(112).resize
        128
        """
        return self if size == self.size else replace(self, size=size, resize=round(size * self.resize / self.size))

    def changed(
        self, size: int | None, resize: int | None, mean: Sequence[float], std: Sequence[float]
    ) -> Preprocessing:
        """With what the user says.

        >>> Preprocessing().changed(None, None, [0.5], [0.5]).source
        "ImageNet's defaults, --mean, --std"
        """
        given = {"--size": size, "--resize": resize, "--mean": mean, "--std": std}
        found = self.sized(size) if size else self
        found = replace(
            found, resize=resize or found.resize, mean=tuple(mean) or found.mean, std=tuple(std) or found.std
        )
        if found.resize < found.size:
            raise InputError(
                f"--resize {found.resize} is less than the side {found.size} that is cut out: pass a smaller --size"
            )
        colours = max(len(found.mean), len(found.std))
        mean, std = (values * colours if len(values) == 1 else values for values in (found.mean, found.std))
        source = ", ".join([self.source, *(name for name, value in given.items() if value)])
        return replace(found, mean=mean, std=std, source=source)

    def image(self, picture: Any) -> Tensor:
        """A PIL image in RGB as the network sees it. An image of the right size is neither resized nor cut."""
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
        """Bytes as floats of about mean 0 and deviation 1. (..., colours, height, width)

        Grey images are divided by 255 where mean and deviation are those of three colours.

        >>> Preprocessing(mean=(0.5,), std=(0.5,)).normalise(torch.full((3, 1, 1), 255, dtype=torch.uint8)).flatten()
        tensor([1., 1., 1.])
        """
        x = pixels.float() / 255
        if len(self.mean) not in (1, x.shape[-3]):
            return x
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std


IMAGENET = Preprocessing()


def from_dict(told: Any, source: str) -> Preprocessing | None:
    """The preprocessing that a file tells, None where it tells none that can be used.

    >>> from_dict({"size": 32, "resize": 32, "mean": [0.5], "std": [0.0]}, "a file") is None
    True
    """
    if not isinstance(told, Mapping):
        return None
    try:
        mean, std = (tuple(float(value) for value in told[key]) for key in ("mean", "std"))
        size, resize = (int(told[key]) for key in ("size", "resize"))
        how = str(told.get("interpolation", "bilinear"))
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    sound = (
        len(mean) == len(std) in (1, 3) and all(map(math.isfinite, (*mean, *std))) and all(value > 0 for value in std)
    )
    sound = sound and 0 < size <= resize <= _LARGEST and how in ("bilinear", "bicubic", "nearest", "lanczos")
    return Preprocessing(size, resize, mean, std, how, source) if sound else None


def of_torchvision(transforms: Any, source: str) -> Preprocessing | None:
    """That of torchvision's weights: None for presets other than classification of images."""
    size, resize = (getattr(transforms, name, None) for name in ("crop_size", "resize_size"))
    if not (size and resize and len(size) == len(resize) == 1):
        return None
    how = str(getattr(transforms.interpolation, "value", "bilinear"))
    told = {"size": size[0], "resize": resize[0], "mean": transforms.mean, "std": transforms.std, "interpolation": how}
    return from_dict(told, source)


def of_timm(config: Mapping[str, Any], size: int) -> Preprocessing | None:
    """That of timm's data config, for images of a side of `size`."""
    try:
        resize = int(size / float(config.get("crop_pct") or 0.875))
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    told = {**config, "size": size, "resize": resize}
    return from_dict(told, "timm's data config")
