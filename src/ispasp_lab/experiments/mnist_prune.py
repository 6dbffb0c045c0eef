"""Choose hidden units of a two-layer network: i-SpaSP, GFS, Top-K, and a random draw as the control."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.select import Random, TopK, i_spasp
from ispasp.select.gfs import AddLoss, grow
from ispasp.types import LinearConsumer, Reading, Statistics
from ispasp_lab.experiments.mnist_network import Digits, Settings, weights

_CHUNK = 128  # candidates at a time: their logits stay in the cache


@dataclass(frozen=True, eq=False)
class Task:
    """A dense network to prune, with the mini-batches of one trial; every method sees the same ones."""

    net: nn.Sequential
    data: Digits
    settings: Settings
    trial: int

    def minibatch(self, number: int) -> tuple[Tensor, Tensor]:
        """The hidden representation H (batch, hidden) and labels (batch,) of training examples drawn at random."""
        generator = torch.Generator().manual_seed((self.settings.seed + self.trial) * 1_000_003 + number)
        index = torch.randperm(len(self.data.y), generator=generator)[: self.settings.prune_batch]
        W0, _ = weights(self.net)
        return torch.relu(self.data.x[index] @ W0.T), self.data.y[index]

    def statistics(self, number: int, *needs: str) -> Statistics:
        """Statistics of one mini-batch at the second layer."""
        reading = measure(self.consumer(), self.minibatch(number)[0], needs)
        return Statistics(self.settings.hidden, (reading,))

    def consumer(self) -> LinearConsumer:
        """The second layer, which reads the hidden units."""
        return LinearConsumer(weights(self.net)[1])


@dataclass(frozen=True)
class Choice:
    """The kept units of one size, and the seconds it took to find them."""

    kept: tuple[int, ...]
    seconds: float


def _ispasp(task: Task, sizes: Sequence[int]) -> Iterator[Choice]:
    """Algorithm 1; statistics are taken once for all sizes."""
    settings = task.settings
    started = time.perf_counter()
    parts = [task.statistics(t, "moment") for t in range(settings.iterations if settings.fresh else 1)]
    spent = time.perf_counter() - started
    for size in sizes:
        started = time.perf_counter()
        kept = i_spasp(parts, size, iterations=settings.iterations).kept
        yield Choice(kept, spent + time.perf_counter() - started)


def _topk(task: Task, sizes: Sequence[int]) -> Iterator[Choice]:
    started = time.perf_counter()
    statistics = task.statistics(0, "magnitude")
    spent = time.perf_counter() - started
    for size in sizes:
        started = time.perf_counter()
        kept = TopK().select(statistics, size).kept
        yield Choice(kept, spent + time.perf_counter() - started)


def _random(task: Task, sizes: Sequence[int]) -> Iterator[Choice]:
    statistics = Statistics(task.settings.hidden, (Reading(task.consumer()),))
    for size in sizes:
        started = time.perf_counter()
        kept = Random(task.settings.seed + task.trial).select(statistics, size).kept
        yield Choice(kept, time.perf_counter() - started)


def _gfs(task: Task, sizes: Sequence[int]) -> Iterator[Choice]:
    """One growth serves all sizes: the first k units do not depend on how many follow."""
    loss, ends = added_loss(task), []
    started = time.perf_counter()

    def timed(kept: Tensor, candidates: Tensor, step: int) -> Tensor:
        values = loss(kept, candidates, step)
        ends.append(time.perf_counter() - started)
        return values

    growth = grow(task.settings.hidden, max(sizes), timed)
    for size in sizes:
        yield Choice(growth.kept(size), ends[size - 1])


METHODS: dict[str, Callable[[Task, Sequence[int]], Iterator[Choice]]] = {
    "ispasp": _ispasp,
    "gfs": _gfs,
    "topk": _topk,
    "random": _random,
}


def choose(method: str, task: Task, sizes: Sequence[int]) -> Iterator[Choice]:
    """The choice of a method for every size, in order."""
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}: choose from {', '.join(METHODS)}")
    return METHODS[method](task, sizes)


def added_loss(task: Task) -> AddLoss:
    """Cross entropy with one unit more, on a new mini-batch in every step.

    Unit i adds H_i W1[:, i] to the logits of the units that are in, so no candidate needs a forward pass of its own.
    The logits are sums over the units that are in, with the weights they have, as the paper writes its network; Ye et
    al. (2020) would divide by their number and multiply by that of all units.
    """
    _, W1 = weights(task.net)

    def loss(kept: Tensor, candidates: Tensor, step: int) -> Tensor:
        H, y = task.minibatch(step)
        logits = H[:, kept] @ W1[:, kept].T  # (batch, outputs)
        own = nn.functional.one_hot(y, W1.shape[0]).to(H.dtype)  # (batch, outputs)
        at_label = (logits * own).sum() + (own.T @ H * W1).sum(0)[candidates]  # summed over the batch; (m,)
        columns = zip(torch.split(H[:, candidates], _CHUNK, 1), torch.split(W1[:, candidates], _CHUNK, 1), strict=True)
        parts = []
        for h, w in columns:
            z = torch.addcmul(logits.T[:, :, None], h[None], w[:, None])  # (outputs, batch, chunk)
            parts.append(z.logsumexp(0).sum(0))
        return (torch.cat(parts) - at_label) / len(y)

    return loss
