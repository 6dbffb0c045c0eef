"""Random inputs, so that anyone can try a command; they say nothing about a trained network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.loaded import Loaded
from ispasp.errors import InputError

WARNING = (
    "The inputs are random numbers, not data: this shows that it works, and says nothing about accuracy. "
    "Pass --data with an image folder, an .npz or a text file."
)

_REMEDY = "pass --input-size with the size of one input, such as 3x224x224, or --data"


def generated(loaded: Loaded, wanted: Wanted) -> Examples:
    """Noise of the model's input size, or random tokens."""
    vocabulary = getattr(loaded.config, "vocab_size", None)
    generator = torch.Generator().manual_seed(wanted.seed)
    if wanted.input_size is None and loaded.keyword == "input_ids" and isinstance(vocabulary, int):
        shape: tuple[int, ...] = (min(wanted.length, loaded.longest, 32),)
        x = torch.randint(0, vocabulary, (wanted.examples, *shape), generator=generator)
    else:
        shape = _shape(loaded, wanted)
        x = torch.randn((wanted.examples, *shape), generator=generator)

    def read(numbers: Sequence[int]) -> Any:
        return loaded.call(x[torch.as_tensor(numbers)])

    text = f"{wanted.examples:,} random inputs {'x'.join(map(str, shape))}"
    return Examples(wanted.examples, read, text, warnings=(WARNING,), remedy=_REMEDY)


def _shape(loaded: Loaded, wanted: Wanted) -> tuple[int, ...]:
    known = wanted.input_size or loaded.input_size
    if known is None:
        raise InputError(f"the input size of {loaded.spec} is not known: pass --input-size, such as 3x224x224 or 64")
    return known if wanted.size is None or wanted.input_size else (*known[:-2], wanted.size, wanted.size)
