"""Training recipes: an optimizer and a schedule of its learning rate; soft filter pruning."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn

from ispasp.errors import InputError

# Factor on the learning rate, by the fraction of the run that is done, in [0, 1).
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "steps": lambda done: 0.1 ** ((done >= 0.5) + (done >= 0.75)),
    "constant": lambda done: 1.0,
}


class Recipe(ABC):
    """An optimizer and a schedule: "cosine", "linear", "steps" or "constant".

    "steps" divides the learning rate by ten after half and after three quarters of the run. `warmup` is the fraction
    of the run in which it rises from near zero. Subclasses are frozen dataclasses: a checkpoint stores their repr.
    """

    lr: float
    weight_decay: float
    schedule: str
    warmup: float

    def __post_init__(self) -> None:
        check_number("lr", self.lr, lambda lr: lr > 0, "a learning rate above 0")
        check_number("weight_decay", self.weight_decay, lambda decay: decay >= 0, "a number of 0 or more")
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule={self.schedule!r}: choose from {list(SCHEDULES)}")
        check_number("warmup", self.warmup, lambda part: 0 <= part < 1, "a part of the run, from 0 to below 1")

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of step 0, 1, ... of `steps`.

        >>> recipe = Sgd(lr=0.1, schedule="linear")
        >>> [round(recipe.lr_at(step, 4), 3) for step in range(4)]
        [0.1, 0.075, 0.05, 0.025]
        """
        rising = round(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / (rising + 1)
        return self.lr * SCHEDULES[self.schedule]((step - rising) / (steps - rising))

    @abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer. Its state must be tensors, so that a run can be resumed."""


@dataclass(frozen=True)
class Sgd(Recipe):
    """SGD with momentum.

    >>> Sgd(lr=0.1)
    Sgd(lr=0.1, momentum=0.9, weight_decay=0.0001, nesterov=False, schedule='cosine', warmup=0.0)
    """

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False
    schedule: str = "cosine"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum, lambda momentum: 0 <= momentum < 1, "a number from 0 to below 1")
        if self.nesterov and not self.momentum:
            raise InputError("nesterov=True needs momentum: pass momentum=0.9")

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        momentum, decay = self.momentum, self.weight_decay
        return torch.optim.SGD(parameters, self.lr, momentum, weight_decay=decay, nesterov=self.nesterov)


@dataclass(frozen=True)
class AdamW(Recipe):
    """Adam with decoupled weight decay.

    >>> AdamW()
    AdamW(lr=5e-05, weight_decay=0.01, betas=(0.9, 0.999), schedule='linear', warmup=0.0)
    """

    lr: float = 5e-5
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: str = "linear"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.betas, (tuple, list)) and len(self.betas) == 2):
            raise InputError(f"betas={self.betas!r}: pass two numbers, such as (0.9, 0.999)")
        for beta in self.betas:
            check_number("betas", beta, lambda beta: 0 <= beta < 1, "two numbers from 0 to below 1")

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, self.lr, betas=self.betas, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Soft:
    """Soft filter pruning, for `ispasp.finetune(..., soft=ispasp.train.Soft(keep=0.7))`.

    He, Kang, Dong, Fu, Yang (2018), Soft Filter Pruning for Accelerating Deep Convolutional Neural Networks. After
    every epoch, the weights that make the units of smallest norm are set to zero in each hidden dimension. They are
    trained on and may grow back. At the end the smallest units are removed.

    `keep`: as in `prune`, budgets apart. `skip`: names and globs that stay whole. `norm`: of the weights that make a
    unit; the paper takes 2.

    Where we leave the paper: it prunes every convolution, residual streams included; here they stay, as in
    `scope="blocks"`, since removing must equal masking. As in the paper a zeroed filter keeps its bias and its
    BatchNorm, whose constant goes with it at the end.

    >>> Soft(keep=0.7)
    Soft(keep=0.7, skip=(), norm=2.0)
    """

    keep: Any
    skip: Collection[str] = ()
    norm: float = 2.0

    def __post_init__(self) -> None:
        check_number("norm", self.norm, lambda norm: norm > 0, "a number above 0, such as 2")


def check_number(name: str, value: Any, fits: Callable[[float], bool], wanted: str) -> None:
    """Raise unless an option is a finite number that fits."""
    if not (isinstance(value, Real) and math.isfinite(value) and fits(float(value))):
        raise InputError(f"{name}={value!r}: pass {wanted}")


def check_counts(least: int = 1, **options: Any) -> None:
    """Raise unless the options are whole numbers, not below the least."""
    for name, value in options.items():
        if not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r}: pass a whole number of {least} or more")
