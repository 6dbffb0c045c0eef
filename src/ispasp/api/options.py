"""All that may be said about pruning beside the model and the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal

import torch
from torch import nn

from ispasp.api.evaluation import Evaluate
from ispasp.api.job import Compensate, Refitted
from ispasp.api.survey import KINDS
from ispasp.api.widths import check_round
from ispasp.budget import Budget
from ispasp.calibrate.batches import InputOf
from ispasp.calibrate.gradients import Loss
from ispasp.compensate.solve import RIDGE
from ispasp.errors import InputError
from ispasp.select import Selector, selector
from ispasp.types.checks import is_integer

Order = Literal["sequential", "oneshot", "global"]


@dataclass(frozen=True)
class Options:
    """All that may be said about pruning beside the model and the data; see `prune`."""

    keep: Any = 0.5
    method: str | Selector = "ispasp"
    compensate: Compensate = "dense"
    order: Order = "sequential"
    kinds: Collection[str] = KINDS
    scope: str = "blocks"
    skip: Collection[str] = ()
    round_to: int | None = None
    input_of: InputOf | None = None
    recalibrate: bool = False
    finetune_between: Callable[[nn.Module], Any] | None = None
    curves: bool = False
    loss: Loss | None = None
    memory: int | None = None
    ridge: float | None = None
    refit: Refitted = "consumers"
    evaluate: Evaluate | None = None
    hold_out: bool = True
    timeout: float = 600.0
    optimizer: torch.optim.Optimizer | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.compensate not in (None, "local", "dense"):
            raise InputError(f"compensate={self.compensate!r}: choose None, 'local' or 'dense'")
        if self.order not in ("sequential", "oneshot", "global"):
            raise InputError(f"order={self.order!r}: choose 'sequential' (as the paper), 'oneshot' or 'global'")
        if self.refit not in ("consumers", "all") or (self.refit == "all" and self.compensate != "dense"):
            raise InputError(f"refit={self.refit!r}: choose 'consumers', or 'all' with compensate='dense'")
        if self.ridge is not None and not positive(self.ridge):
            raise InputError(f"ridge={self.ridge!r}: pass a positive number, such as {RIDGE}, or None to find one")
        if self.memory is not None and not positive(self.memory):
            raise InputError(f"memory={self.memory!r}: pass a number of bytes, or None for no limit")
        if not positive(self.timeout):
            raise InputError(f"timeout={self.timeout!r}: pass seconds, such as 600")
        if self.loss is not None and not callable(self.loss):
            raise InputError(f"loss={self.loss!r}: pass a function, loss=lambda output, batch: ...")
        if self.evaluate is not None and not callable(self.evaluate):
            raise InputError(f"evaluate={self.evaluate!r}: pass a function of the model, evaluate=lambda model: ...")
        if not isinstance(self.hold_out, bool):
            raise InputError(f"hold_out={self.hold_out!r}: pass True or False")
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise InputError(f"optimizer is a {type(self.optimizer).__name__}: pass a torch.optim.Optimizer")
        check_round(self.round_to)
        if self.order == "global" and (self.round_to or isinstance(self.keep, Budget)):
            raise InputError(
                "order='global' ranks units of all hidden dimensions together, so it cannot promise widths: leave out "
                "round_to, Macs and Params, or choose another order"
            )
        selector(self.method)

    @property
    def walks(self) -> bool:
        """Whether all batches walk through the network in lockstep, which takes them in memory."""
        return self.order == "sequential" or self.compensate == "dense"

    def deciding(self) -> dict[str, Any]:
        """The options that decide the result, by name: on several machines they must be the same.

        How a machine reads its batches, how much memory it has and what it shows are its own affair.
        """
        own = ("method", "input_of", "memory", "timeout", "optimizer", "progress", "evaluate")
        return {"method": selector(self.method)} | {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in own
        }

    def described(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        named = ("compensate", "order", "scope", "round_to", "recalibrate", "memory", "ridge", "refit", "hold_out")
        keep = self.keep if isinstance(self.keep, (int, float)) else str(self.keep)
        plain = {name: int(v) if is_integer(v := getattr(self, name)) else v for name in named}  # numpy's numbers too
        return {"method": str(self.method), "keep": keep, **plain}


def positive(value: object) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, Real) and 0 < float(value) < math.inf
