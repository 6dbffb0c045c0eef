"""Image folders: any nesting, links followed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ispasp.cli.sources.classes import check_no_splits, numbered
from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.loaded import Loaded
from ispasp.cli.sources.preprocessing import Preprocessing
from ispasp.errors import InputError, MissingExtraError

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}
REMEDY = "pass --size, the side of the images that it takes (now {}), or data of its kind"


def from_images(folder: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """All images below a folder. Their labels are the sub-folders of the first level, in the order of their names.

    Where all those names are numbers, they are the class indices themselves. Hidden files and folders do not count.
    """
    if loaded.reads_text:
        raise InputError(f"{folder} is a folder of images, and {loaded.spec} reads text: pass a text file")
    paths = sorted(_images(folder, set()))
    if not paths:
        raise InputError(
            f"no images in {folder}: pass a folder with {', '.join(sorted(ENDINGS)[3:6])} or similar files"
        )
    labels, classes = _labels(folder, paths)
    prepare = wanted.preprocessing(loaded.preprocessing)

    def read(numbers: Sequence[int]) -> object:
        return loaded.call(torch.stack([image(paths[i], prepare) for i in numbers]))

    text = f"{len(paths):,} images in {folder}"
    remedy = REMEDY.format(prepare.size)
    return Examples(len(paths), read, text, labels, classes=classes, remedy=remedy, preprocessing=prepare)


def image(path: Path, prepare: Preprocessing) -> Tensor:
    """One image file as the network sees it. (3, size, size)"""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("images need Pillow: pip install 'ispasp[vision]'") from error
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    except Exception as error:
        raise InputError(f"{path} cannot be read as an image ({error}): remove it, or write it anew") from error
    return prepare.image(picture)


def _images(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Image files below a folder. Links are followed, but no folder is entered twice below the same class."""
    here = folder.stat()
    if (here.st_dev, here.st_ino) in seen:
        return
    top = not seen
    seen.add((here.st_dev, here.st_ino))
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = folder / entry.name
            if path.is_dir():
                yield from _images(path, set(seen) if top else seen)
            elif path.suffix.lower() in ENDINGS and path.is_file():
                yield path


def _labels(folder: Path, paths: Sequence[Path]) -> tuple[Tensor | None, tuple[str, ...]]:
    """The label of every image, and the names that labels stand for unless they are numbers themselves."""
    parts = [path.relative_to(folder).parts for path in paths]
    if any(len(part) < 2 for part in parts):
        return None, ()
    check_no_splits(folder, sorted({part[0] for part in parts}))
    folders = [path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return numbered([part[0] for part in parts], among=folders)
