"""What every refused file has in common."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ispasp.errors import IspaspError, visible

ESCAPE = "\x1b[2J"  # clears a terminal that is shown it


def refused(use: Callable[[], object], kind: type[IspaspError], match: str, model: nn.Module | None = None) -> None:
    """Refused with a text that prints and holds a remedy, in seconds, in a gigabyte, with the model as before."""
    before = {} if model is None else {name: tensor.clone() for name, tensor in model.state_dict().items()}
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(kind, match=match) as caught:
        use()
    text = str(caught.value)
    assert text == visible(text)
    assert ": " in text
    assert time.process_time() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20, "kilobytes"
    if model is not None:
        assert before.keys() == model.state_dict().keys()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def sparse(path: Path, size: int, start: bytes = b"") -> None:
    """A file of that many bytes that takes no place on the disk."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
