"""Figure "runtime" (Section 4.2): seconds to prune ResNet34 blocks 2 and 15 with i-SpaSP and with GFS.

Everything starts from the hidden representation of a real torchvision ResNet34 block (random weights, random data: no
time depends on them). i-SpaSP and gfs-local look at the block's second convolution alone. GFS follows the loss of the
whole network, so each of its evaluations is a forward pass from the block to the logits. What is too slow is timed on a
part of its examples and evaluations and scaled linearly, which every row says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.report import track
from ispasp.select import GFSLocal, i_spasp
from ispasp.select.gfs import grow
from ispasp.types import ConvConsumer, Reading, Statistics, units_to_keep
from ispasp.types.consumer import Geometry
from ispasp_lab import reference

BLOCKS = {2: ("layer1", 1, 56), 15: ("layer4", 1, 7)}  # number in the paper -> group, index, size of the maps
KEEPS = (0.2, 0.4)
_GROUPS = ("layer1", "layer2", "layer3", "layer4")
_CHUNK = 32  # examples at a time: their patches, in float64, are the largest thing in memory


@dataclass(frozen=True)
class Settings:
    """The data that each method sees (the paper's values), and the part of it that slow ones are timed on.

    >>> Settings(examples=64, reference_examples=128)
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: reference_examples=128: pass 1 to 64, of which its time is scaled up to 64
    """

    examples: int = 1280
    batch: int = 256  # the mini-batch of a step of GFS
    iterations: int = 20
    candidates: int = 50  # of stochastic GFS
    reference_examples: int = 128
    gram_examples: int = 128
    gfs_examples: int = 32
    gfs_evaluations: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse to time on more than all, or on nothing."""
        whole = {"reference_examples": self.examples, "gram_examples": self.examples, "gfs_examples": self.batch}
        whole |= {"gfs_evaluations": min(self.candidates, 64)}
        for name, most in whole.items():
            if not 1 <= getattr(self, name) <= most:
                raise InputError(
                    f"{name}={getattr(self, name)}: pass 1 to {most}, of which its time is scaled up to {most}"
                )


QUICK = Settings(examples=64, reference_examples=2, gram_examples=4, gfs_examples=1, gfs_evaluations=4)


@dataclass(frozen=True)
class Row:
    """The time of one method on one block. `seconds` is for everything, `timed_s` what the clock showed.

    `examples` are those of a mini-batch for GFS, which sees a new one in each step; `evaluations` are its forward
    passes, one for the other methods.
    """

    block: int
    units: int
    keep: float
    kept: int
    method: str
    seconds: float
    timed_s: float
    examples: int
    timed_examples: int
    evaluations: int = 1
    timed_evaluations: int = 1

    @property
    def scaling(self) -> str:
        """In words, what was timed.

        >>> Row(2, 64, 0.2, 13, "gfs", 800.0, 0.5, 256, 32, 754, 16).scaling
        '32 of 256 examples, 16 of 754 evaluations'
        >>> Row(2, 64, 0.2, 13, "ispasp", 0.5, 0.5, 1280, 1280).scaling
        'all'
        """
        parts = [(self.timed_examples, self.examples, "examples")]
        parts.append((self.timed_evaluations, self.evaluations, "evaluations"))
        return ", ".join(f"{part} of {whole} {what}" for part, whole, what in parts if part < whole) or "all"


@dataclass(frozen=True, eq=False)
class Block:
    """A residual block of ResNet34 with its input x and hidden representation H (n, channels, h, w)."""

    number: int
    model: Any
    block: Any
    x: Tensor
    H: Tensor

    @staticmethod
    def build(number: int, examples: int, seed: int) -> Block:
        """The paper's block of this number, on random non-negative input."""
        group, index, size = BLOCKS[number]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = import_torchvision().models.resnet34().eval().requires_grad_(False)
            block = getattr(model, group)[index]
            x = torch.randn(examples, block.conv1.in_channels, size, size).relu_()
        H = torch.cat([torch.relu(block.bn1(block.conv1(part))) for part in torch.split(x, _CHUNK)])
        return Block(number, model, block, x, H)

    def consumer(self) -> ConvConsumer:
        """conv2 with bn2 as one linear map."""
        conv, norm = self.block.conv2, self.block.bn2
        return ConvConsumer(
            conv.weight,
            scale=norm.weight / torch.sqrt(norm.running_var + norm.eps),
            geometry=Geometry(conv.stride, conv.padding, conv.dilation, conv.groups),
        )

    def logits(self, mask: Tensor, examples: int) -> Tensor:
        """The whole network's output with the units of the mask (units,) alone in this block. (examples, 1000)"""
        group, index, _ = BLOCKS[self.number]
        H = self.H[:examples] * mask.reshape(-1, 1, 1)
        y = torch.relu(self.block.bn2(self.block.conv2(H)) + self.x[:examples])
        y = getattr(self.model, group)[index + 1 :](y)
        for name in _GROUPS[_GROUPS.index(group) + 1 :]:
            y = getattr(self.model, name)(y)
        out: Tensor = self.model.fc(self.model.avgpool(y).flatten(1))
        return out


def run(
    settings: Settings,
    keeps: Sequence[float] = KEEPS,
    blocks: Sequence[int] = tuple(BLOCKS),
    *,
    progress: bool = True,
) -> list[Row]:
    """Time every method on every block, one after the other in this process.

    GFS costs the same for every evaluation, so one step is timed and both sizes follow from their numbers of them.
    """
    rows: list[Row] = []
    jobs = [(number, method) for number in blocks for method in METHODS]
    block = None
    for number, method in track(jobs, "runtime", show=progress):
        if block is None or block.number != number:
            block = None  # the activations of one block at a time
            block = Block.build(number, settings.examples, settings.seed)
        with torch.no_grad():
            rows += METHODS[method](block, settings, keeps)
    return rows


def _row(block: Block, keep: float, method: str, seconds: float, timed_s: float, *counts: int) -> Row:
    units = block.H.shape[1]
    return Row(block.number, units, keep, units_to_keep(keep, units), method, seconds, timed_s, *counts)


def _clock(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def _total(block: Block, examples: int, need: str) -> Reading:
    """A statistic of the first `examples` examples, added up part by part."""
    consumer = block.consumer()
    parts = torch.split(block.H[:examples], _CHUNK)
    total = measure(consumer, parts[0], [need])
    for part in parts[1:]:
        total = total + measure(consumer, part, [need])
    return total


def _library(block: Block, settings: Settings, keeps: Sequence[float]) -> Iterator[Row]:
    """Summing the activations of all examples, and Algorithm 1 on the sum."""
    n = len(block.H)

    def select(examples: int, keep: float) -> None:
        statistics = Statistics(block.H.shape[1], (_total(block, examples, "moment"),))
        i_spasp(statistics, keep, iterations=settings.iterations)

    select(1, keeps[0])  # it has run once before it is timed
    for keep in keeps:
        _, seconds = _clock(partial(select, n, keep))
        yield _row(block, keep, "ispasp", seconds, seconds, n, n)


def _reference(block: Block, settings: Settings, keeps: Sequence[float]) -> Iterator[Row]:
    """The paper's procedure: importance by automatic differentiation in each of T iterations."""
    n, part = len(block.H), settings.reference_examples
    layer = nn.Sequential(block.block.conv2, block.block.bn2)
    batches = list(torch.split(block.H[:part], _CHUNK))
    with torch.enable_grad():
        reference.importance(batches[0][:1], set(), [layer])
        for keep in keeps:
            s = units_to_keep(keep, block.H.shape[1])
            _, timed = _clock(partial(reference.algorithm2, [batches] * settings.iterations, [layer], s=s))
            yield _row(block, keep, "reference", timed * n / part, timed, n, part)


def _gfs(block: Block, settings: Settings, keeps: Sequence[float], candidates: int | None, name: str) -> Iterator[Row]:
    """Greedy forward selection by the squared difference to the dense logits, as there are no labels.

    A step is timed on a few candidates. The dense logits are not: with labels there would be none.
    """
    units, examples, tries = block.H.shape[1], settings.gfs_examples, settings.gfs_evaluations
    truth = block.logits(torch.ones(units), examples)

    def loss(kept: Tensor, tried: Tensor, step: int) -> Tensor:
        masks = kept.float().repeat(len(tried), 1)
        masks[torch.arange(len(tried)), tried] = 1.0
        return torch.stack([(block.logits(mask, examples) - truth).square().sum() for mask in masks])

    _, timed = _clock(partial(grow, units, 1, loss, candidates=tries, seed=settings.seed))
    for keep in keeps:
        count = evaluations(units, units_to_keep(keep, units), candidates)
        seconds = timed * count / tries * settings.batch / examples
        yield _row(block, keep, name, seconds, timed, settings.batch, examples, count, tries)


def _stochastic(block: Block, settings: Settings, keeps: Sequence[float]) -> Iterator[Row]:
    return _gfs(block, settings, keeps, settings.candidates, "gfs-stochastic")


def _vanilla(block: Block, settings: Settings, keeps: Sequence[float]) -> Iterator[Row]:
    return _gfs(block, settings, keeps, None, "gfs")


def evaluations(units: int, kept: int, candidates: int | None) -> int:
    """Number of times that GFS evaluates the loss until `kept` units are in.

    >>> evaluations(4, 2, None), evaluations(4, 2, 3), evaluations(4, 4, 2)
    (7, 6, 7)
    """
    return sum(min(units - step, candidates or units) for step in range(kept))


def _local(block: Block, settings: Settings, keeps: Sequence[float]) -> Iterator[Row]:
    """The Gram matrix of all examples, which is what scales, and the greedy selection on it."""
    n, part = len(block.H), settings.gram_examples
    reading, gram_s = _clock(partial(_total, block, part, "gram"))
    statistics = Statistics(block.H.shape[1], (reading,))
    for keep in keeps:
        _, select_s = _clock(partial(GFSLocal().select, statistics, keep))
        yield _row(block, keep, "gfs-local", gram_s * n / part + select_s, gram_s + select_s, n, part)


METHODS: dict[str, Callable[[Block, Settings, Sequence[float]], Iterator[Row]]] = {
    "ispasp": _library,
    "reference": _reference,
    "gfs-local": _local,
    "gfs-stochastic": _stochastic,
    "gfs": _vanilla,
}
