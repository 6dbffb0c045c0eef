"""The batches of every step, from any step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.train.batch import Batch, examples_in
from ispasp.train.randomness import ORDER, RandomState, seed_everything

_END = object()
Group = list[tuple[Batch, int]]  # the batches of one step, each with its number of examples


class Order:
    """Reads a loader epoch by epoch, in groups of `accumulate` batches; an epoch's last group may be smaller.

    An epoch starts with random numbers made of the seed and its number, and with the loader's own generators as they
    were then; so reading can start at any step, by reading and dropping what comes before it in its epoch. Reading and
    training draw from separate random numbers.

    >>> order = Order([torch.ones(3), torch.ones(3), torch.ones(2)], accumulate=2, seed=0)
    >>> [[examples for _, examples in order.group(step)] for step in range(order.steps_per_epoch)]
    [[3, 3], [2]]
    """

    def __init__(
        self,
        loader: Any,
        accumulate: int,
        seed: int,
        *,
        batches: int | None = None,
        shared: bool = False,
        process: int = 0,
    ) -> None:
        """Read from `loader`; `shared` says that other processes read the rest of each of the `batches` batches.

        Processes with different numbers draw different random numbers, for augmentation.
        """
        self._loader, self._accumulate, self._shared = loader, accumulate, shared
        self._seed, self._process = seed, process
        self.batches = len(loader) if batches is None else batches
        self.steps_per_epoch = -(-self.batches // accumulate)
        self._generators = generators_of(loader)
        self._started = self._states()
        self._iterator: Iterator[Batch] = iter(())
        self._random: RandomState | None = None
        self._next = -1  # the step that the iterator stands at
        self._last: Batch = None

    def group(self, step: int) -> Group:
        """The batches of a step; steps in order need no reading twice."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self._accumulate
        if step != self._next or place == 0:
            self._start(epoch)
            self._read(0, first)
        else:
            assert self._random is not None  # noqa: S101
            self._random.put_back()
        group = self._read(first, min(first + self._accumulate, self.batches))
        if first + len(group) == self.batches:
            self._finish()
        self._random, self._next = RandomState.now(), step + 1
        return group

    def states(self, step: int) -> list[Tensor]:
        """The loader's generators as they were when the epoch of `step`, the next one to be read, began."""
        return self._started if step % self.steps_per_epoch else self._states()

    def resume(self, states: Sequence[Tensor]) -> None:
        """Set the loader's generators to what they were when the epoch to be read next began."""
        if len(states) != len(self._generators):
            raise InputError(
                f"the checkpoint knows {len(states)} generators of the loader, this loader has "
                f"{len(self._generators)}: build it as in the interrupted run"
            )
        try:
            for generator, state in zip(self._generators, states, strict=True):
                torch.Generator(generator.device).set_state(state)  # on trial, so that all are set or none
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"the checkpoint holds no state of this loader's generators ({error}): delete it to start anew"
            ) from error
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _start(self, epoch: int) -> None:
        seed_everything(self._seed, ORDER, epoch, self._process)
        self._started = self._states()
        loader = self._loader
        for name in ("", "sampler", "batch_sampler", "dataset"):
            set_epoch = getattr(getattr(loader, name, None) if name else loader, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        self._iterator = iter(loader)

    def _read(self, first: int, stop: int) -> Group:
        group: Group = []
        for number in range(first, stop):
            batch = next(self._iterator, _END)
            if batch is not _END:
                self._last = batch
                group.append((batch, examples_in(batch)))
            elif self._shared and number == self.batches - 1 and self._last is not None:
                group.append((self._last, 0))  # the others read the rest: take part in their step without a weight
            else:
                raise InputError(
                    f"the loader ended after {number} batches, its length says {self.batches}: pass one that gives "
                    "as many batches as len(loader) every time it is iterated"
                )
        return group

    def _finish(self) -> None:
        # Samplers may draw from their generator once more at their end; the next epoch starts after that.
        if next(self._iterator, _END) is not _END:
            raise InputError(f"the loader gave more than the {self.batches} batches that its length says")

    def _states(self) -> list[Tensor]:
        return [generator.get_state().clone() for generator in self._generators]


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader, its sampler and its batch sampler were given.

    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(3), shuffle=True, generator=torch.Generator())
    >>> generators_of(loader) == [loader.generator]
    True
    """
    found: list[torch.Generator] = []
    for path in ("", "sampler", "batch_sampler", "batch_sampler.sampler", "batch_sampler.batch_sampler.sampler"):
        holder = loader
        for name in path.split(".") if path else ():
            holder = getattr(holder, name, None)
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found
