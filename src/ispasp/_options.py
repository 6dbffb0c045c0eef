"""Arguments of `prune`: validated options, hints for misspelt ones, and the user's batches."""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from itertools import chain
from numbers import Real
from types import NoneType
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import nn

import ispasp
from ispasp._evaluate import Evaluate
from ispasp._heal import Heal
from ispasp._keep import Inside, Keep, Recipe, check_keep
from ispasp._survey import KINDS, Kind, Scope, check_scope, kinds_of
from ispasp.budget import Budget, Latency
from ispasp.budget.search import WidthSearch, width_search
from ispasp.compensate.solve import RIDGE
from ispasp.engine.batches import (
    NO_BATCHES,
    InputOf,
    Labels,
    Limit,
    Pair,
    batches_in,
    count_examples,
    described,
    find_labels,
    first_in,
    first_of,
    held_out,
    most_examples,
    placed,
    prepared,
    signature,
)
from ispasp.engine.task import Loss
from ispasp.engine.team import Team, joined_team
from ispasp.errors import InputError, OptionError, failing_as
from ispasp.graph.state import unwrapped
from ispasp.graph.trace import Batch, named_tensors, run_and_restore
from ispasp.select import Selector, selector
from ispasp.surgery.remove import check_optimizer
from ispasp.train.objective import loss_of
from ispasp.types.dimension import is_integer
from ispasp.types.plan import Plan

Compensate = Literal["local", "dense"] | None
Refitted = Literal["auto", "consumers", "all"]
Bias = Literal["auto", "add", "keep"]
Ridge = float | Literal["auto"]
P = ParamSpec("P")
R = TypeVar("R")
Order = Literal["sequential", "oneshot", "global"]

_REMOVED = ("sparsity", "ratio", "pruning_ratio", "amount")  # other libraries' names for the fraction that is removed
_SWITCHES = ("uniform", "hold_out", "recalibrate", "curves", "progress")
_ELSEWHERE = {"importance": "method", "criterion": "method", "ignored_layers": "skip", "exclude": "skip"}


@dataclass(frozen=True)
class Options:
    """Validated options of `prune`; made by `options_for`."""

    keep: Keep = 0.5
    method: str | Selector = "auto"
    compensate: Compensate = "dense"
    order: Order = "sequential"
    kinds: tuple[Kind, ...] = KINDS
    scope: Scope = "blocks"
    skip: Collection[str | Inside] = ()
    round_to: int | None = None
    input_of: InputOf | None = None
    examples: Limit = "auto"
    positions: Limit = "auto"
    recalibrate: bool = False
    finetune_between: Callable[[nn.Module], Any] | None = None
    search: int | str | WidthSearch = 0
    least: int = 1
    curves: bool = False
    heal: bool | Heal | None = None
    loss: Loss | None = None
    memory: int | None = None
    ridge: Ridge = "auto"
    refit: Refitted = "auto"
    bias: Bias = "auto"
    uniform: bool = False
    evaluate: Evaluate | None = None
    hold_out: bool = True
    timeout: float = 600.0
    optimizer: torch.optim.Optimizer | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_scope(self.scope)
        for name, valid, remedy in self._checks():
            if not valid:
                raise InputError(f"{name}={getattr(self, name)!r}: {remedy}")
        if self.order == "global" and (self.round_to or self.uniform or isinstance(self.keep, Budget)):
            raise InputError(
                "order='global' ranks units of all hidden dimensions together, so it cannot promise widths: leave out "
                "round_to, uniform and budgets, or choose another order"
            )
        selector(self.method)

    def _checks(self) -> list[tuple[str, bool, str]]:
        """Option, whether its value is valid, what to pass instead."""
        limits = ((name, getattr(self, name)) for name in ("examples", "positions"))
        some = {name: limit in ("auto", None) or whole(limit) for name, limit in limits}
        refit = self.refit in ("auto", "consumers") or (self.refit == "all" and self.compensate == "dense")
        ridge, fast = self.ridge == "auto" or positive(self.ridge), isinstance(self.keep, Latency)
        functions = (self.loss, self.evaluate, self.finetune_between)
        loss, evaluate, trains = (each is None or callable(each) for each in functions)
        wanted: Any = self.search
        search = wanted >= 0 if is_integer(wanted) else width_search(wanted) is not None
        return [
            ("compensate", self.compensate in (None, "local", "dense"), "choose None, 'local' or 'dense'"),
            ("order", self.order in get_args(Order), "choose 'sequential' (as the paper), 'oneshot' or 'global'"),
            ("refit", refit, "choose 'consumers', or 'all' with compensate='dense'"),
            ("bias", self.bias in get_args(Bias), "choose 'add', 'keep' or 'auto'"),
            *((name, isinstance(getattr(self, name), bool), "pass True or False") for name in _SWITCHES),
            ("uniform", not (self.uniform and fast), "Latency chooses widths by what is fast"),
            ("round_to", self.round_to is None or whole(self.round_to), "pass a whole number such as 8, or None"),
            *((name, valid, f"pass a number of {name}, None for all, or 'auto'") for name, valid in some.items()),
            ("ridge", ridge, f"pass a positive number such as {RIDGE}, or 'auto'"),
            ("memory", self.memory is None or positive(self.memory), "pass a number of bytes, or None for no limit"),
            ("timeout", positive(self.timeout), "pass seconds, such as 600"),
            ("search", search, "pass a number of candidates to try, 0 for none, or a search by name"),
            ("least", is_integer(self.least) and self.least >= 0, "pass a number of units, 0 to let whole branches go"),
            ("loss", loss, "pass a function, loss=lambda output, batch: ..."),
            ("evaluate", evaluate, "pass a function of the model, evaluate=lambda model: ..."),
            ("heal", isinstance(self.heal, (bool, Heal, NoneType)), "pass True, or ispasp.Heal(...)"),
            ("finetune_between", trains, "pass a function of the model, lambda model: ispasp.finetune(model, loader)"),
            ("hold_out", self.hold_out or not self.heal, "held-out examples judge healing, pass True"),
            ("heal", not (self.heal and self.finetune_between), "finetune_between trains already, leave one out"),
        ]

    @property
    def adds_biases(self) -> bool:
        """Whether compensation may give a layer a bias that it did not have."""
        return self.bias == "add" or (self.bias == "auto" and not self.uniform)

    @property
    def walks(self) -> bool:
        """Whether all batches walk through the network in lockstep, and so are kept in memory."""
        return self.order == "sequential" or self.compensate == "dense" or bool(self.heal)

    def deciding(self) -> dict[str, Any]:
        """Options that decide the result: they must be the same on all ranks."""
        own = ("method", "input_of", "memory", "timeout", "optimizer", "progress", "evaluate")
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        return {"method": selector(self.method), **shared}

    def described(self) -> dict[str, Any]:
        """The settings and software versions, as JSON values."""
        named = "compensate order scope search least round_to recalibrate memory ridge refit bias uniform hold_out"
        values = {name: getattr(self, name) for name in (*named.split(), "positions")}
        plain = {name: int(v) if is_integer(v) else v for name, v in values.items()}  # numpy's numbers too
        if callable(self.search):
            plain["search"] = str(self.search)
        lists = {"kinds": list(self.kinds), "skip": [str(each) for each in self.skip]}
        versions = {"ispasp": ispasp.__version__, "torch": torch.__version__, "python": platform.python_version()}
        return {"method": str(self.method), "keep": _described(self.keep), **plain, **lists, "versions": versions}


def options_for(model: nn.Module, given: Mapping[str, Any]) -> Options:
    """Validate the arguments of `prune` and bring them into one form."""
    chosen = dict(given)
    if chosen["method"] == "auto":
        chosen["method"] = best_method(chosen["order"])
    if not isinstance(chosen["method"], str):
        chosen["method"] = selector(chosen["method"])
    if chosen["refit"] == "auto":
        chosen["refit"] = "all" if chosen["compensate"] == "dense" else "consumers"
    chosen["kinds"] = kinds_of(chosen["kinds"])
    chosen["skip"] = _skipped(model, chosen["skip"])
    if callable(chosen["loss"]):
        chosen["loss"] = loss_of(chosen["loss"])
    options = Options(**chosen)
    if isinstance(options.keep, Recipe):
        options.keep.check(model)
    check_optimizer(options.optimizer, model)
    return options


def positive(value: object) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, Real) and 0 < float(value) < math.inf


def whole(value: object) -> bool:
    """Whether a value is a whole number above 0."""
    return is_integer(value) and positive(value)


def suggest_names(verb: Callable[P, R]) -> Callable[P, R]:
    """Decorator: an unknown option raises `OptionError` with the nearest known name, on all ranks.

    >>> suggest_names(lambda *, method: method)(methd="l1")
    Traceback (most recent call last):
    ...
    ispasp.errors.OptionError: <lambda> has no option 'methd': did you mean 'method'?
    """
    known = inspect.signature(verb).parameters

    @wraps(verb)
    def called(*args: P.args, **options: P.kwargs) -> R:
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            with joined_team() as ranks, ranks.together("the check of the arguments"):
                remedy = _remedy(unknown, options[unknown], known)
                raise OptionError(f"{verb.__name__} has no option {unknown!r}: {remedy}")
        return verb(*args, **options)

    return called


def _remedy(name: str, value: object, known: Mapping[str, Any]) -> str:
    if name == "optimizer":
        return "a copy is pruned, which no optimizer knows; use prune_(model, ..., optimizer=optimizer)"
    if name in _REMOVED and "keep" in known:
        part = 1 - float(value) if isinstance(value, Real) and 0 < float(value) < 1 else 0.5
        return f"keep= says what stays; pass keep={part:g}"
    nearest = [_ELSEWHERE[name]] if _ELSEWHERE.get(name) in known else get_close_matches(name, known, 1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"choose from {', '.join(known)}"


def _described(keep: Any) -> int | float | str:
    if isinstance(keep, Plan):
        return f"a plan for {len(keep.kept)} hidden dimensions"
    if is_integer(keep):
        return int(keep)
    return float(keep) if isinstance(keep, Real) else str(keep)


def best_method(order: object) -> str:
    """The best measured method without labels (docs/results); `order="global"` needs scores, which `l1` has."""
    return "l1" if order == "global" else "obs"


def _skipped(model: nn.Module, skip: Any) -> tuple[str | Inside, ...]:
    listed = (skip,) if isinstance(skip, (str, nn.Module)) else skip
    if not isinstance(listed, Collection):
        raise InputError(f"skip={skip!r}: pass a list of names or globs, such as ['layer1.*'], or of modules")
    paths = {module: path for path, module in model.named_modules()}
    for module in listed:
        if isinstance(module, nn.Module) and not paths.get(unwrapped(module)):
            kind = type(module).__name__
            raise InputError(f"skip holds a {kind} that is not a layer of the model: pass its modules, or names")
    return tuple(Inside(paths[unwrapped(each)]) if isinstance(each, nn.Module) else each for each in listed)


class Inputs:
    """The user's batches, which can be iterated again and again, up to the allowed number of examples."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], options: Options) -> None:
        """Read the first batch and check that the model runs on it."""
        for name, value in named_tensors(model).items():
            if value.is_meta:
                raise InputError(f"{name!r} is on the meta device and has no values: load the model's weights first")
        self._given = batches_in(batches, model)
        self._model = model
        self._options = options
        self._list: list[Pair] | None = None
        self._held: list[Pair] = []
        self._taken, self._more = 0, False  # examples of the last pass, and whether some were left out
        self.divided: Batch | None = None  # the batch that is held out in part
        first = first_in(self._given)
        self._labels = Labels() if options.input_of else find_labels(model, placed(first, model))
        ((self.first, _),) = self._within_limit([first])
        try:
            self.example = _try(model, self.first)
        except Exception as error:
            hint = "" if options.input_of else f"; it is {described(first)}, pass input_of=lambda batch: ... if needed"
            reason = f"{type(error).__name__}: {error}{hint}"
            raise InputError(f"the model does not run on the first batch: {reason}") from error
        if options.walks or isinstance(self._given, Sequence):
            self._divide()

    def _divide(self) -> None:
        """Keep all batches in memory (inputs only, not activations), and hold some out."""
        labelled = self._options.loss is not None
        pairs = [(batch, given if labelled else batch) for batch, given in self.pairs()]
        self._list, self._held = held_out(pairs) if self._options.hold_out else (pairs, [])
        if len(self._list) + len(self._held) > len(pairs):
            self.divided = pairs[len(self._list) - 1][0]
        if self.example is self.first:
            self.example = self._list[0][0]
        self.first = self._list[0][0]

    @property
    def examples(self) -> int:
        """Number of calibration examples; before all are read, that of the first batch."""
        return max(self._taken - sum(count_examples(batch) for batch in self.held_out()), count_examples(self.first))

    def again(self) -> Iterator[Batch]:
        """Iterate over the calibration batches."""
        return (batch for batch, _ in self.pairs())

    def pairs(self) -> Iterator[Pair]:
        """Iterate over pairs: the inputs of the model, and the batch as given."""
        pair = None
        for pair in self._within_limit(self._given) if self._list is None else self._list:
            yield pair
        if pair is None:
            raise InputError(NO_BATCHES)

    def _within_limit(self, batches: Iterable[Any]) -> Iterator[Pair]:
        """Yield batches up to the limit, which may cut the last one short.

        "auto" ends with a whole batch, since every new shape is traced, unless half of the examples would be missing.
        """
        limit, most, taken, more = self._options.examples, None, 0, False
        for pair in prepared(batches, self._model, self._labels, self._options.input_of):
            most = most_examples(limit, pair[0]) if taken == 0 else most
            if most is not None and taken + count_examples(pair[0]) > most:
                more = True
                if taken >= most or (limit == "auto" and 2 * taken >= most):
                    break
                pair = first_of(pair, most - taken)  # noqa: PLW2901
            taken += count_examples(pair[0])
            yield pair
        self._taken, self._more = taken, more

    def held_out(self) -> Sequence[Batch]:
        """Held-out batches; none if there are few examples, or batches are not kept in memory."""
        return [batch for batch, _ in self._held]

    def described(self, team: Team) -> dict[str, Any]:
        """Numbers of examples on all ranks, and which labels were found, for `result.settings`."""
        held = sum(count_examples(batch) for batch in self.held_out())
        counts = {"examples": team.total(self._taken), "held_out_examples": team.total(held)}
        labels = str(self._labels) if self._labels else None
        return {**counts, "all_examples": not team.total(int(self._more)), "labels": labels}

    @property
    def timed(self) -> Batch:
        """The batch to measure a `Latency` budget on: the first examples of the first batch."""
        wanted = getattr(self._options.keep, "batch", 1)
        batch, size = first_of(self.first, wanted), count_examples(self.first)
        if size < wanted:
            raise InputError(f"Latency(batch={wanted}): the first batch has {size} examples; pass larger batches")
        return batch

    def check_kinds(self) -> None:
        """Raise if the model fails on a batch of some kind, with the number of that batch."""
        seen = set[Any]()
        for number, (batch, _) in enumerate(self._within_limit(self._given)):
            what = f"the model does not run on batch {number}, {described(batch)}"
            with failing_as(InputError, what, "leave it out, or correct it"):
                if signature(batch) not in seen:
                    run_and_restore(self._model, batch)
            seen.add(signature(batch))

    def other_kinds(self, example: Batch) -> list[Batch]:
        """The first batch of every kind (shapes, dtypes, other values) but the example's, held-out ones included."""
        # The held-out rest of a divided batch has another size, which need not be traced.
        found = {signature(example): example}
        timed = [self.timed] if isinstance(self._options.keep, Latency) else []
        for batch in chain(timed, self.again(), () if self.divided is not None else self.held_out()):
            found.setdefault(signature(batch), batch)
        return list(found.values())[1:]


def _try(model: nn.Module, batch: Batch) -> Batch:
    """Run the model on two examples, or on all of them if that fails; returns the batch it ran on."""
    small = first_of(batch, 2)
    with suppress(Exception):
        run_and_restore(model, small)
        return small
    run_and_restore(model, batch)
    return batch
