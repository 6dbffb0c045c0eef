"""Collectives that end: each succeeds on every rank, or raises on this one within the timeout."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ispasp.errors import DistributedError
from ispasp.types import Reading, Statistics
from ispasp.types.statistics import STATISTICS, Size

_DEVICES = {"nccl": "cuda", "xccl": "xpu"}  # backends that want their tensors on an accelerator
_PAUSE = 0.005  # seconds; bounds how late the end of a collective is seen


@final
class Wire:
    """The connection of this rank to all others. Making one is a collective.

    Messages and CPU tensors use a gloo group of its own: gloo notices a closed connection at once, it can wait without
    ending the process, and failures leave the caller's own groups alone. Tensors use the caller's backend if that is
    one for accelerators. A message comes before every tensor, so that a missing rank shows on gloo first.
    """

    def __init__(self, timeout_seconds: float) -> None:
        """Open the group; every rank must do so."""
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout_seconds
        self.broken = ""
        with self._collective("the start of the team"):
            self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        kind = _DEVICES.get(str(dist.get_backend()))
        self._tensors: Any = dist.group.WORLD if kind else self._group
        # Fixed now: the current device is a property of the thread, and calibration runs in several.
        index = torch.get_device_module(kind).current_device() if kind else 0
        self._device = torch.device(kind, index) if kind else torch.device("cpu")

    def exchange(self, what: str, message: Any) -> list[Any]:
        """The messages of all ranks, in order of rank. A message is anything JSON can hold."""
        payload = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        with self._in_step(what):
            lengths = [int(n) for n in self._gather(what, torch.tensor([len(payload)], device="cpu"))]
            padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
            padded[: len(payload)] = payload
            parts = self._gather(what, padded)
        return [json.loads(part[:n].numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]

    def add(self, what: str, x: Tensor) -> Tensor:
        """The sum of x over ranks in float64, the same bits on every rank, on the device of x.

        Rank 0 gets the sum and sends it to all. An all-reduce moves as many bytes, but no backend promises the same
        bits on all ranks, and one different bit can be one different unit.
        """
        with self._in_step(what):
            total = x.detach().to(self._device, torch.float64, copy=True).contiguous()
            if total.numel():
                self._wait(what, lambda: dist.reduce(total, 0, group=self._tensors, async_op=True))
                self._wait(what, lambda: dist.broadcast(total, 0, group=self._tensors, async_op=True))
            return total.to(x.device)

    def first(self, what: str, x: Tensor) -> Tensor:
        """The x of rank 0, bit for bit, on the device of x. Shape and dtype must be those of rank 0."""
        with self._in_step(what):
            flat = x.detach().to(self._device, copy=True).contiguous().flatten()
            if flat.numel():
                data = flat.view(torch.uint8)  # not every backend knows every dtype
                self._wait(what, lambda: dist.broadcast(data, 0, group=self._tensors, async_op=True))
            return flat.reshape(x.shape).to(x.device)

    def close(self) -> None:
        """Give the group back. Not a collective: every rank may close when it likes."""
        self.broken = self.broken or "the team was closed"
        if dist.is_initialized() and self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = self._tensors = None

    def _gather(self, what: str, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(what, lambda: dist.all_gather(parts, x, group=self._group, async_op=True))
        return parts

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        # Polls instead of waiting: Python hears Ctrl-C only between calls, and backends differ in what they do with a
        # timeout (nccl ends the process).
        with self._collective(what):
            work, end, pause = start(), time.monotonic() + self.timeout, 1e-5
            while not work.is_completed():
                if time.monotonic() > end:
                    raise RuntimeError("no answer")
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE)
            work.wait()

    @contextmanager
    def _in_step(self, what: str) -> Iterator[None]:
        """Send nothing more after a failure: ranks are out of step, and would read the wrong bytes."""
        if self.broken:
            raise DistributedError(f"{what} cannot start on rank {self.rank}: {self.broken}; start all ranks again")
        try:
            yield
        except BaseException:
            self.broken = f"{what} failed before"
            raise

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """Turn torch's error into one that says what to do."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = re.sub(r"^\[\S+:\d+\] ", "", lines[0]).split(". ")[0]  # gloo begins with its source line
            raise DistributedError(
                f"{what} failed on rank {self.rank} of {self.size} after {time.monotonic() - started:.1f} s: another "
                f"rank died, hangs or is late ({reason}). Look at the output of the other ranks; if they are only "
                f"slow, raise the timeout ({self.timeout:g} s)"
            ) from error


# Statistics as sums with keys: ranks that have seen different data agree on what to add ------------------------------
Key = tuple[int, str, Size]  # reading, statistic, key of its tensor
Outline = list[list[Any]]  # a row for each sum: the parts of its key, its shape, and the examples behind it


def sums(statistics: Statistics) -> dict[Key, Tensor]:
    """Every sum in the statistics that hold data, under its key."""
    rows = ((n, name, each) for n, row in enumerate(statistics.readings) for name, each in row.statistics.items())
    return {(n, name, size): x for n, name, each in rows if each.examples for size, x in each.tensors().items()}


def outline(statistics: Statistics) -> Outline:
    """The sums of one rank, for JSON."""
    found = sums(statistics).items()
    examples = [row.statistics for row in statistics.readings]
    return [[n, name, list(size), list(x.shape), examples[n][name].examples] for (n, name, size), x in found]


def added(statistics: Statistics, outlines: Iterable[Outline], add: Callable[[Key, Tensor], Tensor]) -> Statistics:
    """Statistics with the sums and examples of all ranks. A rank adds zeros for what it has not seen."""
    own = sums(statistics)
    shapes: dict[Key, tuple[int, ...]] = {}
    examples: dict[tuple[int, str], int] = {}
    for rows in outlines:
        shapes |= {(n, name, tuple(size)): tuple(shape) for n, name, size, shape, _ in rows}
        for at, count in {(n, name): count for n, name, _, _, count in rows}.items():
            examples[at] = examples.get(at, 0) + count
    parts: dict[tuple[int, str], dict[Size, Tensor]] = {}
    for key, shape in sorted(shapes.items()):
        device = statistics.readings[key[0]].consumer.weight.device
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        parts.setdefault(key[:2], {})[key[2]] = add(key, own.get(key, zeros))
    readings = []
    for n, row in enumerate(statistics.readings):
        known = [(kind, (n, name)) for name, kind in STATISTICS.items() if (n, name) in parts]
        readings.append(Reading(row.consumer, *(kind.from_tensors(parts[at], examples[at]) for kind, at in known)))
    return replace(statistics, readings=tuple(readings), parts=())
