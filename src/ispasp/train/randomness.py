"""Random numbers that depend on a seed and a place in the run, not on what was drawn before.

So a resumed run needs no saved generator: step 57 draws the same numbers whether or not steps 0 to 56 ran before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ORDER, STEP = 0, 1  # the purposes that have numbers of their own: reading data, running the model


def seed_everything(*place: int) -> None:
    """Start the global generators of torch, NumPy and Python anew; the same place gives the same numbers.

    >>> with left_alone():
    ...     seed_everything(0, STEP, 57); a = torch.rand(2)
    ...     seed_everything(0, STEP, 57); torch.equal(a, torch.rand(2))
    True
    """
    seed = int(np.random.SeedSequence(place).generate_state(1)[0])
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # the above costs 1 ms: it prepares for devices that are not there
    np.random.seed(seed)
    random.seed(seed)


@dataclass(frozen=True, eq=False)
class RandomState:
    """Where the global generators of torch (on the CPU), NumPy and Python are.

    >>> with left_alone():
    ...     state = RandomState.now(); a = torch.rand(2)
    ...     state.put_back(); torch.equal(a, torch.rand(2))
    True
    """

    torch: Tensor
    numpy: Any
    python: Any

    @staticmethod
    def now() -> RandomState:
        """The state at this moment."""
        return RandomState(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def put_back(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextmanager
def left_alone() -> Iterator[None]:
    """Whatever is drawn inside, the caller's random numbers go on as if nothing had been.

    >>> a = torch.get_rng_state()
    >>> with left_alone(): _ = torch.rand(3)
    >>> torch.equal(a, torch.get_rng_state())
    True
    """
    state = RandomState.now()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        state.put_back()
        if devices:
            torch.cuda.set_rng_state_all(devices)
