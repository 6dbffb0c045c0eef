"""Whether a model runs on the data it was given: asked first, because every later failure is harder to read."""

from __future__ import annotations

from typing import Any

from ispasp.cli.sources.examples import Examples
from ispasp.cli.sources.loaded import Loaded
from ispasp.errors import InputError
from ispasp.graph.trace import evaluating, run


def runs(loaded: Loaded, examples: Examples) -> Any:
    """The model's output on the first example and the last, which of texts is the longest; or why there is none.

    >>> import torch
    >>> from torch import nn
    >>> data = Examples(4, lambda numbers: torch.ones(len(numbers), 3), "4 examples", remedy="pass --key")
    >>> runs(Loaded(nn.Linear(3, 2), "net"), data).shape
    torch.Size([2, 2])
    >>> runs(Loaded(nn.Linear(5, 2), "net"), data)
    Traceback (most recent call last):
    ispasp.errors.InputError: net does not run on 4 examples (RuntimeError: mat1 and mat2 ...): pass --key
    """
    batch = examples.read(sorted({0, examples.count - 1}))
    try:
        with evaluating(loaded.model):
            return run(loaded.model, batch)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{loaded.spec} does not run on {examples.text} ({type(error).__name__}: {reason}): {examples.remedy}"
        ) from error
