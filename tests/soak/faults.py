"""Exceptions and Ctrl-C at random places: the model is bit for bit as before, and the process can prune again."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

import ispasp
from ispasp.select import Selector, selector
from soak.case import Case, check
from soak.networks import Subject, check_masking, draw
from soak.options import SCALING, random_options
from soak.state import check_same, fingerprint, process, weights

ERRORS = (ValueError, RuntimeError, MemoryError, KeyboardInterrupt, OSError, TypeError, SystemExit, AssertionError)
PACKAGE = os.path.dirname(ispasp.__file__)  # noqa: PTH120
RESTORING = (
    ("remove.py", "run"),
    ("state.py", "restore"),
    ("corrections.py", "_put_back"),
    ("interrupts.py", "uninterrupted"),
    ("contextlib.py", "__exit__"),
)


@dataclass
class Bomb:
    """Counts ticks and raises at the `at`th; 0 is never."""

    error: type[BaseException] = ValueError
    at: int = 0
    ticks: int = 0
    raised: BaseException | None = field(default=None)

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == self.at:
            self.raised = self.error("planted")
            raise self.raised


BOMBS: dict[str, Bomb] = {}  # not in the model: what a forward changes there is another matter


class Mined(nn.Module):
    """A network whose forward ticks."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "forward" in BOMBS:
            BOMBS["forward"].tick()
        return self.net(*args, **kwargs)


class MinedMethod(Selector):
    """A method that ticks."""

    def __init__(self, inner: Selector) -> None:
        self.inner = inner
        self.name, self.needs = inner.name, inner.needs  # type: ignore[misc]

    @property
    def parts(self) -> int:
        return self.inner.parts

    def select(self, statistics: Any, keep: float | int) -> Any:
        if "method" in BOMBS:
            BOMBS["method"].tick()
        return self.inner.select(statistics, keep)

    def factors(self, statistics: Any, kept: Any) -> tuple[float, ...]:
        return self.inner.factors(statistics, kept)


class MinedBatches:
    """Batches that tick, and may be gone through again."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if "batch" in BOMBS:
                BOMBS["batch"].tick()
            yield batch


class Lines:
    """Ticks at every call of a function of the library, but for those that put things back."""

    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and frame.f_lasti <= 0 and not restoring(frame):
            self.bomb.tick()


def restoring(frame: FrameType | None) -> bool:
    """Whether somebody up the stack is putting things back: nothing can survive a fault there."""
    while frame is not None:
        if (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) in RESTORING:  # noqa: PTH119
            return True
        frame = frame.f_back
    return False


def run(case: Case) -> None:
    subject = draw(case)
    options = random_options(case)
    options["method"] = MinedMethod(selector(options["method"]))
    keep = case.chosen("keep", 0.5, 0.25, 0.75)
    verb = case.chosen("verb", "prune", "prune_", "prune_", "survey")
    kind = case.chosen("fault", "forward", "batch", "method", "ctrl-c", "call", "call")

    def act(model: nn.Module) -> Any:
        batches = MinedBatches(subject.batches)
        if verb == "survey":
            return ispasp.survey(model, next(iter(batches)), scope=options["scope"])
        return getattr(ispasp, verb)(model, batches, keep, **options)

    model = Mined(subject.fresh())
    with case.may_refuse("before the fault"):
        began = time.monotonic()
        bomb, first = counted(kind, lambda: act(copy.deepcopy(model)))
        took = time.monotonic() - began
    bomb.at = case.rng.randint(1, max(1, bomb.ticks))
    bomb.error = case.pick(*ERRORS)
    bomb.ticks = 0
    case.options |= {"at": bomb.at, "error": bomb.error.__name__}
    before, around = fingerprint(model), process()
    raised, value = (
        interrupted(case, took, lambda: act(model)) if kind == "ctrl-c" else fail(kind, bomb, lambda: act(model))
    )
    case.facts["ended"] = f"{kind}: {type(raised).__name__ if raised else 'well'}"
    check_same(around, process(), "the process")
    if raised is not None:
        check_raised(raised, bomb, kind)
        check_same(before, fingerprint(model), "the model")
    elif verb != "survey":
        check(kind == "ctrl-c" or bomb.error is not KeyboardInterrupt or bomb.raised is None, "Ctrl-C was swallowed")
        check_well(subject, value, options)
    check_again(act(Mined(subject.fresh())), first, verb)


def counted(kind: str, act: Callable[[], Any]) -> tuple[Bomb, Any]:
    """How often it ticks when nothing is wrong, and what comes out."""
    bomb = Bomb()
    raised, value = fail(kind, bomb, act)
    if raised is not None:
        raise raised
    return bomb, value


def fail(kind: str, bomb: Bomb, act: Callable[[], Any]) -> tuple[BaseException | None, Any]:
    BOMBS[kind] = bomb
    try:
        if kind == "call":
            with Lines(bomb):
                return None, act()
        return None, act()
    except BaseException as error:
        return error, None
    finally:
        del BOMBS[kind]


def interrupted(case: Case, took: float, act: Callable[[], Any]) -> tuple[BaseException | None, Any]:
    """Ctrl-C after a random time; one that comes when the call has returned does not count."""
    timer = threading.Timer(case.rng.uniform(0, took * 1.1), lambda: os.kill(os.getpid(), signal.SIGINT))
    value: list[Any] = []
    try:
        timer.start()
        try:
            value.append(act())
        finally:
            timer.cancel()
            timer.join()
    except KeyboardInterrupt as error:
        inside = any(frame.filename.startswith(PACKAGE) for frame in traceback.extract_tb(error.__traceback__))
        return (error, None) if inside or not value else (None, value[0])
    return None, value[0]


def check_raised(raised: BaseException, bomb: Bomb, kind: str) -> None:
    planted = raised is bomb.raised or (kind == "ctrl-c" and isinstance(raised, KeyboardInterrupt))
    if not (planted or isinstance(raised, ispasp.IspaspError)):
        raise raised
    if isinstance(bomb.raised, (KeyboardInterrupt, SystemExit)):
        check(planted, f"{bomb.error.__name__} became {raised!r}")


def check_well(subject: Subject, result: ispasp.Result, options: dict[str, Any]) -> None:
    plain = Subject(subject.network, Mined(subject.model), subject.batches, subject.dtype)
    plan = result.plan
    exact = options["compensate"] is None and options["method"].name not in SCALING and not options.get("recalibrate")
    twins = Subject(_mined(subject.network), plain.model, subject.batches, subject.dtype)
    check_masking(twins, result.model, plan, exact)


def _mined(network: Any) -> Any:
    class Named:
        model = Mined(network.model)

    return Named


def check_again(second: Any, first: Any, verb: str) -> None:
    """After a failure the same call gives what it gave before."""
    if verb == "survey":
        check([d.name for d in second.dimensions] == [d.name for d in first.dimensions], "another survey afterwards")
        return
    check(second.plan == first.plan, "another plan afterwards")
    check_same(weights(first.model), weights(second.model), "weights of a call afterwards")
    check(torch.is_grad_enabled(), "gradients are off")
