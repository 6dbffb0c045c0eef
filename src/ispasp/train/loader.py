"""The batches of every step, from any step on.

Random numbers depend on the seed and the place in the run, not on what was drawn before. So a resumed run needs no
saved generator: step 57 draws the same numbers whether or not steps 0 to 56 ran before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from ispasp.engine.batches import count_examples, is_rows, part, signature, tensors_of
from ispasp.errors import InputError
from ispasp.graph.state import seed_torch
from ispasp.graph.trace import Batch

ORDER, STEP = 0, 1  # reading data and running the model have random numbers of their own
_END = object()
_SAMPLERS = ("sampler", "batch_sampler", "batch_sampler.sampler", "batch_sampler.batch_sampler.sampler")
Group = list[tuple[Batch, int]]  # the batches of one step, each with its number of examples


def seed_everything(*place: int) -> None:
    """Seed the global generators of torch, NumPy and Python with numbers that say where in the run we are."""
    seed = int(np.random.SeedSequence(place).generate_state(1)[0])
    seed_torch(seed)
    np.random.seed(seed)
    random.seed(seed)


class StepLoader:
    """Reads a loader in groups of `accumulate` batches, one group per step; an epoch's last group may be smaller.

    Every epoch is seeded anew, so reading can start at any step: earlier batches of its epoch are read and dropped.
    """

    def __init__(self, loader: Any, batches: int, accumulate: int, seed: int, rank: int, *, shared: bool) -> None:
        """`shared`: other processes read the rest of each of the `batches`. Ranks augment with different numbers."""
        self.batches = batches
        self.steps_per_epoch = -(-self.batches // accumulate)
        self._loader, self._accumulate, self._shared = loader, accumulate, shared
        self._seed, self._rank = seed, rank
        found = [getattr(holder, "generator", None) for holder in _holders(loader, ("", *_SAMPLERS))]
        self._generators = list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
        self._epoch_start = self._states()
        self._groups: Iterator[Group] = iter(())
        self._next = -1  # the step whose group comes next

    def group(self, step: int) -> Group:
        """The batches of a step. Steps in order read everything once."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if step != self._next or place == 0:
            self._groups = self._epoch(epoch)
            for _ in range(place):
                next(self._groups)
        self._next = step + 1
        return next(self._groups)

    def states(self, step: int) -> list[Tensor]:
        """The states of the loader's generators at the start of the epoch of `step`, the next one to be read."""
        return self._epoch_start if step % self.steps_per_epoch else self._states()

    def resume(self, states: Sequence[Tensor]) -> None:
        """Set the loader's generators to what they were when the epoch to be read next began."""
        here, there = len(self._generators), len(states)
        if here != there:
            raise InputError(f"the checkpoint's loader has {there} generators, this one {here}: pass that one")
        try:
            for generator, state in zip(self._generators, states, strict=True):
                torch.Generator(generator.device).set_state(state)  # a trial, so that all are set or none
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"the checkpoint is of another loader ({error}): delete it to start over") from error
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _epoch(self, epoch: int) -> Iterator[Group]:
        seed_everything(self._seed, ORDER, epoch, self._rank)
        self._epoch_start = self._states()
        for holder in _holders(self._loader, ("", "sampler", "batch_sampler", "dataset")):
            if callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(epoch)
        batches = self._counted(iter(self._loader))
        for first in range(0, self.batches, self._accumulate):
            last = min(first + self._accumulate, self.batches)
            group = [next(batches) for _ in range(first, last)]
            if last == self.batches:
                next(batches, None)  # a sampler may draw from its generator once more at its end
            state = torch.get_rng_state(), np.random.get_state(), random.getstate()
            yield group
            torch.set_rng_state(state[0])  # the step has drawn numbers of its own
            np.random.set_state(state[1])
            random.setstate(state[2])

    def _counted(self, iterator: Iterator[Batch]) -> Iterator[tuple[Batch, int]]:
        """Yield exactly len(loader) batches, with their numbers of examples."""
        batch = last = None
        for number in range(self.batches):
            batch = next(iterator, _END)
            if batch is not _END:
                last = batch
                yield batch, _examples_in(batch)
            elif self._shared and number == self.batches - 1 and last is not None:
                yield last, 0  # the other processes read the rest: take part in their step with weight 0
            else:
                raise InputError(
                    f"the loader ended after {number} batches: it must give len(loader) = {self.batches} in every epoch"
                )
        if next(iterator, _END) is not _END:
            raise InputError(f"the loader gave more than the {self.batches} batches that its length says")

    def _states(self) -> list[Tensor]:
        return [generator.get_state().clone() for generator in self._generators]


def _holders(loader: Any, paths: Sequence[str]) -> list[Any]:
    """The object at each path of attributes, None if there is none."""
    return [reduce(lambda at, name: getattr(at, name, None), filter(None, path.split(".")), loader) for path in paths]


def _examples_in(batch: Batch) -> int:
    found = [t for t in tensors_of(dict(batch) if isinstance(batch, Mapping) else batch) if t.ndim]
    if not found:
        raise InputError(f"a batch is a {type(batch).__name__} without tensors: pass batches of tensors")
    return len(found[0])


# Examples without labels: mixed, in batches of one size, augmented ---------------------------------------------------
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
        if (now := signature(changed)) != (before := signature(batch)):
            raise InputError(f"augment changes a batch of {before[1:]} into {now[1:]}: keep shape and dtype")
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
        raise InputError("augment='flip' and 'crop' take images (examples, channels, h, w): pass a function for others")
    return pytree.tree_map(lambda leaf: change(leaf) if is_image(leaf) else leaf, batch)
