"""Image folders: any nesting, read as the networks of ImageNet were trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.loaded import Loaded
from ispasp.errors import InputError
from ispasp.experiments.data.images import Scale

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}
_SIZE = 224
REMEDY = "pass --size, the side of the images that it takes (now {}), or data of its kind"
_MARGIN = 256 / 224  # the shorter side before the centre is cut out, relative to the size after it


def from_images(folder: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """All images below a folder. Their labels are the sub-folders of the first level, in the order of their names.

    Where all those names are numbers, they are the class indices themselves.
    """
    if loaded.reads_text:
        raise InputError(f"{folder} is a folder of images, and {loaded.spec} reads text: pass a text file")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    if not paths:
        raise InputError(
            f"no images in {folder}: pass a folder with {', '.join(sorted(ENDINGS)[3:6])} or similar files"
        )
    size = side(loaded, wanted)

    def read(numbers: Sequence[int]) -> object:
        return loaded.call(torch.stack([image(paths[i], size, loaded.scale) for i in numbers]))

    text = f"{len(paths):,} images in {folder}"
    labels, classes = _labels(folder, paths)
    return Examples(len(paths), read, text, labels, classes=classes, remedy=REMEDY.format(size))


def image(path: Path, size: int, scale: Scale) -> Tensor:
    """One image file as the network sees it. (3, size, size)"""
    from PIL import Image

    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    except Exception as error:
        raise InputError(f"{path} cannot be read as an image ({error}): remove it, or write it anew") from error
    return pixels_of(picture, size, scale)


def side(loaded: Loaded, wanted: Wanted) -> int:
    """The side of images in pixels: as the user says, else as the model, else as ImageNet.

    >>> side(Loaded(torch.nn.Identity(), "identity"), Wanted())
    224
    """
    return wanted.size or (loaded.input_size[-1] if loaded.input_size else _SIZE)


def pixels_of(picture: Any, size: int, scale: Scale) -> Tensor:
    """A PIL image in RGB, resized, cut at the centre, normalised. (3, size, size)"""
    from PIL import Image

    if picture.size != (size, size):
        factor = _MARGIN * size / min(picture.size)
        width, height = (max(size, round(side * factor)) for side in picture.size)
        left, top = (width - size) // 2, (height - size) // 2
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        picture = picture.crop((left, top, left + size, top + size))
    return normalised(torch.from_numpy(np.array(picture)).permute(2, 0, 1), scale)


def normalised(pixels: Tensor, scale: Scale) -> Tensor:
    """Bytes as floats of about mean 0 and deviation 1. (..., 3, height, width)

    >>> normalised(torch.full((3, 1, 1), 255, dtype=torch.uint8), ((0.5,) * 3, (0.5,) * 3)).flatten()
    tensor([1., 1., 1.])
    """
    mean, deviation = (torch.tensor(values).reshape(-1, 1, 1) for values in scale)
    return (pixels.float() / 255 - mean) / deviation


def _labels(folder: Path, paths: Sequence[Path]) -> tuple[Tensor | None, tuple[str, ...]]:
    """The label of every image, and the names that labels stand for unless they are numbers themselves."""
    parts = [path.relative_to(folder).parts for path in paths]
    if any(len(part) < 2 for part in parts):
        return None, ()
    names = sorted({part[0] for part in parts})
    numbered = all(name.isdecimal() for name in names)
    classes = {name: int(name) if numbered else i for i, name in enumerate(names)}
    return torch.tensor([classes[part[0]] for part in parts]), () if numbered else tuple(names)
