"""Images as normalised floats, made a batch at a time: bytes or file names are all that stays in memory.

Every set is a pair `(x, y)`. `y` is a tensor of class indices; `x` is read like a tensor: `len(x)`, `x[3]`,
`x[:64]`, each giving float32 tensors. Code that reads `x` in slices also takes a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ispasp.errors import InputError
from ispasp_lab.data.folder import find

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MNIST = ((0.1307,), (0.3081,))
SIZE, SHORTER_SIDE = 224, 256
_ENDINGS = {".jpg", ".jpeg", ".png"}

Scale = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of every channel


class Examples(Protocol):
    """Images that are read in slices: a tensor, Pixels or Files."""

    def __len__(self) -> int:
        """How many examples."""

    def __getitem__(self, index: slice, /) -> Tensor:
        """Some examples as one batch."""


@dataclass(frozen=True, eq=False)
class Pixels:
    """Images in memory as bytes (n, channels, height, width), read as floats of about mean 0 and deviation 1.

    >>> x = Pixels(torch.full((5, 1, 2, 2), 255, dtype=torch.uint8), ((0.5,), (0.25,)))
    >>> x[1:3].shape, x[0].flatten()
    (torch.Size([2, 1, 2, 2]), tensor([2., 2., 2., 2.]))
    """

    data: Tensor
    scale: Scale

    def __len__(self) -> int:
        """How many images."""
        return len(self.data)

    def __getitem__(self, index: int | slice) -> Tensor:
        """One image (channels, height, width), or a batch of them."""
        return _normalised(self.data[index], self.scale)

    def subset(self, indices: Sequence[int] | Tensor) -> Pixels:
        """The images of these numbers, still as bytes.

        >>> x = Pixels(torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1), ((0.0,), (1 / 255,)))
        >>> x.subset([3, 1])[:].flatten()
        tensor([3., 1.])
        """
        return replace(self, data=self.data[torch.as_tensor(indices)])


@dataclass(frozen=True, eq=False)
class Files:
    """RGB images in files, read as floats (n, 3, 224, 224); what is not 224 x 224 is resized and cut at the centre."""

    paths: tuple[Path, ...]
    scale: Scale = IMAGENET

    def __len__(self) -> int:
        """How many images."""
        return len(self.paths)

    def __getitem__(self, index: int | slice) -> Tensor:
        """One image (3, 224, 224), or a batch of them."""
        if isinstance(index, slice):
            return torch.stack([_normalised(_read(path), self.scale) for path in self.paths[index]])
        return _normalised(_read(self.paths[index]), self.scale)

    def subset(self, indices: Sequence[int] | Tensor) -> Files:
        """The images of these numbers."""
        return replace(self, paths=tuple(self.paths[int(i)] for i in indices))


@dataclass(frozen=True, eq=False)
class Labelled(Dataset[tuple[Tensor, Tensor]]):
    """Images with their labels, as a DataLoader reads them.

    >>> from torch.utils.data import DataLoader
    >>> x, y = next(iter(DataLoader(Labelled(torch.ones(5, 2), torch.arange(5)), batch_size=2)))
    >>> x.shape, y
    (torch.Size([2, 2]), tensor([0, 1]))
    """

    x: Pixels | Files | Tensor
    y: Tensor

    def __len__(self) -> int:
        """How many examples."""
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One example: an image and its label."""
        return self.x[index], self.y[index]


def cifar10(part: str) -> tuple[Pixels, Tensor]:
    """CIFAR-10 from cifar10.npz: x (n, 3, 32, 32), y (n,); part is "train" (50,000) or "test" (10,000).

    Normalised with the mean and deviation of ImageNet, as the ResNets of `ispasp_lab.models` were trained.
    """
    return _npz("cifar10.npz", part, IMAGENET)


def mnist(part: str) -> tuple[Pixels, Tensor]:
    """MNIST from mnist.npz: x (n, 1, 28, 28), y (n,); part is "train" (60,000) or "test" (10,000)."""
    return _npz("mnist.npz", part, MNIST)


def imagenet_mini(part: str) -> tuple[Files, Tensor]:
    """One ImageNet image per class, from the folder imagenet-mini: x (1000, 3, 224, 224), y (1000,).

    Part is "calibration" or "val"; the two share no image.
    """
    _check_part(part, ("calibration", "val"))
    return image_folder(find("imagenet-mini") / part)


def image_folder(folder: str | Path) -> tuple[Files, Tensor]:
    """All .jpg and .png files of a folder that has one sub-folder per class.

    A sub-folder's name is its class index where all names are numbers; otherwise the sub-folders are numbered in the
    order of their names.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: pass one with a sub-folder of images per class")
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    numbered = all(path.name.isdecimal() for path in classes)
    paths, labels = [], []
    for position, path in enumerate(classes):
        found = sorted(file for file in path.iterdir() if file.suffix.lower() in _ENDINGS)
        paths += found
        labels += [int(path.name) if numbered else position] * len(found)
    if not paths:
        raise InputError(f"{folder} has no sub-folder with .jpg or .png files: pass one with a sub-folder per class")
    return Files(tuple(paths)), torch.tensor(labels)


@overload
def batches(x: Examples, size: int) -> Iterator[Tensor]: ...
@overload
def batches(x: Examples, size: int, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]: ...
def batches(x: Examples, size: int, y: Tensor | None = None) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
    """Slices of `size` examples in order, the last one shorter; with labels: pairs.

    >>> [len(batch) for batch in batches(torch.ones(5, 2), 2)]
    [2, 2, 1]
    """
    if size < 1:
        raise InputError(f"batches of {size} examples: pass a size of 1 or more")
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        yield x[part] if y is None else (x[part], y[part])


def _npz(name: str, part: str, scale: Scale) -> tuple[Pixels, Tensor]:
    _check_part(part, ("train", "test"))
    path = find(name)
    with np.load(path) as arrays:
        missing = {f"x_{part}", f"y_{part}"} - set(arrays.files)
        if missing:
            raise InputError(f"{path} has no array {sorted(missing)[0]!r}: it holds {arrays.files}")
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    x = np.moveaxis(x, -1, 1) if x.ndim == 4 else x[:, None]  # files have the colours last, or none
    return Pixels(torch.from_numpy(np.ascontiguousarray(x)), scale), torch.from_numpy(y.astype(np.int64))


def _check_part(part: str, parts: tuple[str, str]) -> None:
    if part not in parts:
        raise InputError(f"part={part!r}: choose {parts[0]!r} or {parts[1]!r}")


def _normalised(data: Tensor, scale: Scale) -> Tensor:
    mean, deviation = (torch.tensor(values).reshape(-1, 1, 1) for values in scale)
    return data.float().div_(255).sub_(mean).div_(deviation)


def _read(path: Path) -> Tensor:
    """The bytes of one image. (3, 224, 224)"""
    from PIL import Image

    with Image.open(path) as file:
        image = file.convert("RGB")
    if image.size != (SIZE, SIZE):
        factor = SHORTER_SIDE / min(image.size)
        width, height = (max(SIZE, round(side * factor)) for side in image.size)
        left, top = (width - SIZE) // 2, (height - SIZE) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + SIZE, top + SIZE))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
