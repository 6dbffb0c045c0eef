"""Random crops and flips, as networks for ImageNet and CIFAR are trained with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from ispasp_lab.data import Files, Pixels
from ispasp_lab.data.images import SIZE

_PADDING = 4  # He et al. (2016) for CIFAR
_AREA, _ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # Szegedy et al. (2015) for ImageNet
_TRIES = 10


@dataclass(frozen=True, eq=False)
class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images with labels, cut and flipped anew whenever one is read, with the random numbers of torch.

    Images in memory are padded and cut at a random place; of files a random part is resized to 224 x 224.

    >>> x = Pixels(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ((0.5,) * 3, (0.5,) * 3))
    >>> Augmented(x, torch.tensor([3, 4]))[1][0].shape
    torch.Size([3, 8, 8])
    """

    x: Pixels | Files
    y: Tensor

    def __len__(self) -> int:
        """How many examples."""
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image, another view of it every time, and its label."""
        image = _shifted(self.x[index]) if isinstance(self.x, Pixels) else _part(self.x, index)
        return image.flip(-1) if float(torch.rand(())) < 0.5 else image, self.y[index]


def training_loader(x: Pixels | Files, y: Tensor, batch: int, seed: int, workers: int = 0) -> DataLoader[object]:
    """Augmented batches in random order; a last one that is not full is left out, if there is a full one.

    >>> x = Pixels(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), ((0.5,) * 3, (0.5,) * 3))
    >>> [len(labels) for _, labels in training_loader(x, torch.arange(5), batch=2, seed=0)]
    [2, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        Augmented(x, y), batch, shuffle=True, generator=generator, num_workers=workers, drop_last=len(y) >= batch
    )


def _shifted(image: Tensor) -> Tensor:
    """(channels, height, width), moved by up to four pixels; what comes in is the mean colour."""
    top, left = torch.randint(2 * _PADDING + 1, (2,)).tolist()
    wide = functional.pad(image, [_PADDING] * 4)
    return wide[:, top : top + image.shape[1], left : left + image.shape[2]]


def _part(files: Files, index: int) -> Tensor:
    from PIL import Image

    with Image.open(files.paths[index]) as file:
        picture = file.convert("RGB")
    cut = picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=_box(*picture.size))
    data = torch.from_numpy(np.array(cut)).permute(2, 0, 1)
    return Pixels(data[None], files.scale)[0]


def _box(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random part: area and ratio of sides as Szegedy et al., else the whole."""
    for _ in range(_TRIES):
        area = width * height * float(torch.empty(()).uniform_(*_AREA))
        aspect = math.exp(float(torch.empty(()).uniform_(*map(math.log, _ASPECT))))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(torch.randint(width - w + 1, ())), int(torch.randint(height - h + 1, ()))
            return left, top, left + w, top + h
    return 0, 0, width, height
