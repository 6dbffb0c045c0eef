"""The options of `prune`, checked before the model is touched."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal

import torch
from torch import nn

import ispasp
from ispasp.api.evaluation import Evaluate
from ispasp.api.job import Compensate, Refitted
from ispasp.api.recipes import Recipe
from ispasp.api.survey import KINDS, Kind, Scope, check_scope, kinds_of
from ispasp.api.task import check_loss
from ispasp.api.widths import Inside, Keep, check_keep, check_round
from ispasp.budget import Budget
from ispasp.calibrate.batches import InputOf
from ispasp.calibrate.gradients import Loss
from ispasp.calibrate.limit import Limit
from ispasp.compensate.solve import RIDGE
from ispasp.errors import InputError
from ispasp.graph.wrappers import unwrapped
from ispasp.select import Selector, selector
from ispasp.surgery.remove import check_optimizer
from ispasp.train.losses import loss_of
from ispasp.types.checks import is_integer
from ispasp.types.plan import Plan

Order = Literal["sequential", "oneshot", "global"]


@dataclass(frozen=True)
class Options:
    """Validated options of `prune`; made by `options_for`."""

    keep: Keep = 0.5
    method: str | Selector = "ispasp"
    compensate: Compensate = "dense"
    order: Order = "sequential"
    kinds: tuple[Kind, ...] = KINDS
    scope: Scope = "blocks"
    skip: Collection[str | Inside] = ()
    round_to: int | None = None
    input_of: InputOf | None = None
    examples: Limit = "auto"
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
        """Validate the options."""
        check_keep(self.keep)
        check_scope(self.scope)
        if self.compensate not in (None, "local", "dense"):
            raise InputError(f"compensate={self.compensate!r}: choose None, 'local' or 'dense'")
        if self.order not in ("sequential", "oneshot", "global"):
            raise InputError(f"order={self.order!r}: choose 'sequential' (as the paper), 'oneshot' or 'global'")
        if self.refit not in ("consumers", "all") or (self.refit == "all" and self.compensate != "dense"):
            raise InputError(f"refit={self.refit!r}: choose 'consumers', or 'all' with compensate='dense'")
        if self.examples not in ("auto", None) and not (is_integer(self.examples) and positive(self.examples)):
            raise InputError(f"examples={self.examples!r}: pass a number of examples, None for all, or 'auto'")
        if self.ridge is not None and not positive(self.ridge):
            raise InputError(f"ridge={self.ridge!r}: pass a positive number, such as {RIDGE}, or None to find one")
        if self.memory is not None and not positive(self.memory):
            raise InputError(f"memory={self.memory!r}: pass a number of bytes, or None for no limit")
        if not positive(self.timeout):
            raise InputError(f"timeout={self.timeout!r}: pass seconds, such as 600")
        self._check_functions()
        if not isinstance(self.hold_out, bool):
            raise InputError(f"hold_out={self.hold_out!r}: pass True or False")
        check_round(self.round_to)
        if self.order == "global" and (self.round_to or isinstance(self.keep, Budget)):
            raise InputError(
                "order='global' ranks units of all hidden dimensions together, so it cannot promise widths: leave out "
                "round_to, Macs and Params, or choose another order"
            )
        selector(self.method)

    def _check_functions(self) -> None:
        if self.loss is not None and not callable(self.loss):
            raise InputError(f"loss={self.loss!r}: pass a function, loss=lambda output, batch: ...")
        if self.evaluate is not None and not callable(self.evaluate):
            raise InputError(f"evaluate={self.evaluate!r}: pass a function of the model, evaluate=lambda model: ...")

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
        """The settings as JSON can hold them, and the versions that they go with."""
        named = ("compensate", "order", "scope", "round_to", "recalibrate", "memory", "ridge", "refit", "hold_out")
        plain = {name: int(v) if is_integer(v := getattr(self, name)) else v for name in named}  # numpy's numbers too
        what = {"kinds": list(self.kinds), "skip": [str(each) for each in self.skip]}
        versions = {"ispasp": ispasp.__version__, "torch": torch.__version__, "python": platform.python_version()}
        return {"method": str(self.method), "keep": _described(self.keep), **plain, **what, "versions": versions}


def _described(keep: Any) -> int | float | str:
    if isinstance(keep, Plan):
        return f"a plan for {len(keep.kept)} hidden dimensions"
    if is_integer(keep):
        return int(keep)
    return float(keep) if isinstance(keep, Real) else str(keep)


def options_for(model: nn.Module, given: Mapping[str, Any]) -> Options:
    """The options as they were given, with what users may leave out filled in.

    One kind or name may stand alone, modules stand for what they make, and functions for methods and losses.
    """
    chosen = dict(given)
    if not isinstance(chosen["method"], str):
        chosen["method"] = selector(chosen["method"])
    chosen["kinds"] = kinds_of(chosen["kinds"])
    chosen["skip"] = _skipped(model, chosen["skip"])
    if callable(chosen["loss"]):
        chosen["loss"] = loss_of(chosen["loss"])
    options = Options(**chosen)
    if isinstance(options.keep, Recipe):
        options.keep.check(model)
    check_loss(selector(options.method), options.loss)
    check_optimizer(options.optimizer, model)
    return options


def _skipped(model: nn.Module, skip: Any) -> tuple[str | Inside, ...]:
    listed = (skip,) if isinstance(skip, (str, nn.Module)) else skip
    if not isinstance(listed, Collection):
        raise InputError(f"skip={skip!r}: pass a list of names or globs, such as ['layer1.*'], or of modules")
    paths = {module: path for path, module in model.named_modules()}
    for module in listed:
        if isinstance(module, nn.Module) and not paths.get(unwrapped(module)):
            raise InputError(
                f"skip holds a {type(module).__name__} that is no layer of the model: pass its modules, or names such "
                "as 'layer1.*'"
            )
    return tuple(Inside(paths[unwrapped(each)]) if isinstance(each, nn.Module) else each for each in listed)


def positive(value: object) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, Real) and 0 < float(value) < math.inf
