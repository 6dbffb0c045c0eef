"""Examples: how many there are, how a few of them become a batch, and their labels where there are any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ispasp.cli.sources.preprocessing import Preprocessing
from ispasp.errors import InputError


@dataclass(frozen=True)
class Wanted:
    """What users may say about data."""

    examples: int = 256
    size: int | None = None  # of images
    input_size: tuple[int, ...] | None = None  # of random inputs
    key: str = ""  # of an array in an .npz file, or of a column
    labels: str = ""  # of the labels in an .npz file, or of their column
    length: int = 128  # of texts, in tokens
    seed: int = 0
    resize: int | None = None  # shorter side of images before their centre is cut out
    mean: tuple[float, ...] = ()  # of pixels
    std: tuple[float, ...] = ()

    def preprocessing(self, known: Preprocessing) -> Preprocessing:
        """What is known of the model, with what the user says."""
        return known.changed(self.size, self.resize, self.mean, self.std)


@dataclass(frozen=True, eq=False)
class Examples:
    """`read(numbers)` makes a batch as the model takes it; `text` says what the examples are.

    `remedy`: what to do if the model does not run on them.
    """

    count: int
    read: Callable[[Sequence[int]], Any]
    text: str
    labels: Tensor | None = None
    warnings: tuple[str, ...] = ()
    tokenizer: Any = None  # what made them of text
    classes: tuple[str, ...] = ()  # what labels 0, 1, ... stand for, where names say it
    remedy: str = "pass data as this model takes it"
    preprocessing: Preprocessing | None = None  # of images

    def some(self, number: int) -> list[int]:
        """Numbers of that many examples, spread evenly, so that a sorted folder gives some of each class.

        >>> Examples(10, list, "").some(4)
        [0, 2, 5, 7]
        """
        number = min(number, self.count)
        return [i * self.count // number for i in range(number)]

    def loader(
        self, batch_size: int, *, numbers: Sequence[int] | None = None, labelled: bool = False, shuffle: bool = False
    ) -> DataLoader[Any]:
        """Batches of inputs, or of inputs with labels: (inputs, labels), or a dict with "labels".

        >>> examples = Examples(3, lambda numbers: torch.tensor(numbers), "", labels=torch.tensor([5, 6, 7]))
        >>> list(examples.loader(2, labelled=True))
        [(tensor([0, 1]), tensor([5, 6])), (tensor([2]), tensor([7]))]
        """
        chosen = cast("Dataset[int]", range(self.count) if numbers is None else numbers)
        read = self._read_labelled if labelled else self.read
        return DataLoader(chosen, batch_size, shuffle=shuffle, collate_fn=read)

    def needed_labels(self) -> Tensor:
        """The labels, or what to do where there are none.

        >>> Examples(3, list, "3 lines of a.txt").needed_labels()
        Traceback (most recent call last):
        ispasp.errors.InputError: 3 lines of a.txt have no labels: pass an image folder with one sub-folder per ...
        """
        if self.labels is None:
            raise InputError(
                f"{self.text} have no labels: pass an image folder with one sub-folder per class, an .npz or a "
                "table (.csv, .tsv) with --labels NAME, or hf-dataset:NAME"
            )
        return self.labels

    def _read_labelled(self, numbers: Sequence[int]) -> Any:
        x, y = self.read(numbers), self.needed_labels()[torch.as_tensor(numbers)]
        return {**x, "labels": y} if isinstance(x, Mapping) else (x, y)
