"""Examples to train on without labels: mixed, in batches of one size, augmented."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from ispasp.engine.batches import count_examples, is_rows, part, signature
from ispasp.errors import InputError
from ispasp.graph.trace import Batch
from ispasp.train.loader import ORDER, STEP, seed_everything


class Examples:
    """Batches of examples in any order. Batches of one shape are cut into examples and mixed.

    Every batch has one size, since every shape is traced; examples that fill no batch wait for another epoch.
    """

    def __init__(self, batches: Sequence[Batch], size: int, augment: Any = None, seeds: Sequence[int] = (0,)) -> None:
        """`size` is the most that one batch holds."""
        self._batches, self._augment, self._seeds = batches, augmentation(augment), seeds
        sizes = [count_examples(batch) for batch in batches]
        self.count, self._size = sum(sizes), min(size, max(sizes))
        rows = all(is_rows(batch, size) for batch, size in zip(batches, sizes, strict=True))
        mixed = rows and len({signature(part(batch, slice(0, 1))) for batch in batches}) == 1
        self._pool: Batch = None
        if mixed:
            self._pool = pytree.tree_map(lambda *x: torch.cat(x) if isinstance(x[0], Tensor) else x[0], *batches)
        self.steps_per_epoch = self.count // self._size if mixed else len(batches)
        self._order: tuple[int, Tensor] = -1, torch.empty(0)

    def batch(self, step: int) -> Batch:
        """The batch of a step, augmented. Steps of an epoch see all examples in random order."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            seed_everything(*self._seeds, ORDER, epoch)
            self._order = epoch, torch.randperm(len(self._batches) if self._pool is None else self.count)
        batch = changed = self._chosen(self._order[1], place)
        seed_everything(*self._seeds, STEP, step)
        for change in self._augment:
            changed = change(changed)
        if signature(changed) != signature(batch):
            raise InputError(
                f"augment changes a batch of {signature(batch)[1:]} into {signature(changed)[1:]}: keep shape and dtype"
            )
        return changed

    def first(self, most: int) -> list[Batch]:
        """The first batches, up to that many examples."""
        if self._pool is not None:
            return [self._chosen(torch.arange(self.count), k) for k in range(min(most, self.count) // self._size)]
        ends = torch.tensor([count_examples(batch) for batch in self._batches]).cumsum(0).tolist()
        return [batch for k, batch in enumerate(self._batches) if k == 0 or ends[k] <= most]

    def _chosen(self, order: Tensor, place: int) -> Batch:
        if self._pool is None:
            return self._batches[int(order[place])]
        rows = order[place * self._size : (place + 1) * self._size]
        return pytree.tree_map_only(Tensor, lambda leaf: leaf[rows.to(leaf.device)], self._pool)


# Augmentation ---------------------------------------------------------------------------------------------------
def _flip(image: Tensor) -> Tensor:
    """Mirror half of the images."""
    mirrored = (torch.rand(len(image)) < 0.5).to(image.device)
    return torch.where(mirrored[:, None, None, None], image.flip(-1), image)


def _crop(image: Tensor) -> Tensor:
    """Shift every image by up to an eighth of its size; what comes in is zero."""
    height, width = image.shape[-2:]
    dy, dx = max(1, height // 8), max(1, width // 8)
    wide = functional.pad(image, (dx, dx, dy, dy))
    ys, xs = (torch.randint(2 * d + 1, (len(image),)).tolist() for d in (dy, dx))
    corners = enumerate(zip(ys, xs, strict=True))
    return torch.stack([wide[k, :, y : y + height, x : x + width] for k, (y, x) in corners])


_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {"flip": _flip, "crop": _crop}


def augmentation(given: Any) -> list[Callable[[Batch], Batch]]:
    """The changes that a user names or passes. They draw from the global generators."""
    if given is None:
        return []
    if callable(given):
        return [given]
    names = (given,) if isinstance(given, str) else tuple(given)
    unknown = [name for name in names if name not in _IMAGES]
    if unknown:
        raise InputError(f"augment={given!r}: choose from {list(_IMAGES)}, or pass a function of a batch of inputs")
    return [partial(_change_images, _IMAGES[name]) for name in names]


def _change_images(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    def is_image(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()

    if not any(map(is_image, pytree.tree_leaves(batch))):
        raise InputError(
            "augment='flip' and 'crop' are for images (examples, channels, height, width): pass a function for others"
        )
    return pytree.tree_map(lambda leaf: change(leaf) if is_image(leaf) else leaf, batch)
