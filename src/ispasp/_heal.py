"""`ispasp.heal`: train a pruned model towards the dense one, without labels."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.engine.batches import ENOUGH, InputOf, count_examples, held_out, inputs_in
from ispasp.engine.team import SAME_OPTIONS, Team, alike, joined_team, plain as comparable, weights_alike
from ispasp.errors import InputError
from ispasp.files import folder_path
from ispasp.graph.state import plain, random_numbers_kept
from ispasp.graph.trace import Batch, check_model
from ispasp.train.checkpoint import Store
from ispasp.train.devices import accelerated_if_useful, placed
from ispasp.train.healing import Healing, Networks, Stage
from ispasp.train.loader import Examples, augmentation
from ispasp.train.recipe import check_counts, check_number

Augment = Callable[[Batch], Batch]
_EPOCHS, _LEAST_STEPS, _MOST_STEPS = 20, 300, 3000  # where the user sets no limit
_SHARES = (3 / 4, 1 / 4)  # share of the steps in each cycle of the learning rate
_CAREFUL = 3  # the learning rate of the second cycle is lower by this factor
_REACH, _TURN = 0.2, 0.05  # change of a weight matrix in one step of Adam: for each unit of damage, and at most
_SHORT = 300  # with fewer steps there is no time to recover from large ones


@dataclass(frozen=True)
class Heal:
    """How to heal. The defaults need no tuning.

    epochs, steps, time   limits, time in seconds; without any, 20 epochs but at least 300 and at most 3,000 steps
    lr        the highest learning rate of Adam; None takes one for each weight matrix, from the size of its entries and
              from how far the features are from those of the dense model
    augment   "flip", "crop" (image tensors), a tuple of them, or a function of a batch of inputs. The dense model sees
              the same inputs, so any change works that keeps them realistic
    blocks    train one block after the other, each towards the dense features at its end, instead of all at once:
              gradients and activations take the memory of one block
    batch     examples in a step, at most as many as in the batches given
    seed      of the order of examples and the augmentation
    mixed_precision   "bf16", "fp16" (GPU), or None: the setting of `accelerate launch`, else full precision
    checkpoint        a folder: call again with the same arguments to resume an interrupted run
    checkpoint_every  steps between checkpoints

    >>> Heal(time=60, augment=("flip", "crop")).epochs is None
    True
    """

    epochs: float | None = None
    steps: int | None = None
    time: float | None = None
    lr: float | None = None
    augment: str | tuple[str, ...] | Augment | None = None
    blocks: bool = False
    batch: int = 32
    seed: int = 0
    mixed_precision: str | None = None
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "time", "lr"):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, lambda value: value > 0, "a number above 0, or None")
        check_counts(batch=self.batch, checkpoint_every=self.checkpoint_every)
        check_counts(0, seed=self.seed)
        if self.checkpoint is not None:
            folder_path(self.checkpoint)
        augmentation(self.augment)

    def limit(self, steps_per_epoch: float) -> float:
        """Total number of steps; infinite if time is the only limit."""
        steps = min(self.steps or math.inf, math.inf if self.epochs is None else self.epochs * steps_per_epoch)
        if math.isinf(steps) and self.time is None:
            steps = min(max(_EPOCHS * steps_per_epoch, _LEAST_STEPS), _MOST_STEPS)
        return max(1.0, steps)


@dataclass(frozen=True, eq=False)
class HealResult:
    """Result of healing. `before` and `after` are divergences from the dense outputs on held-out examples.

    `history` has such a divergence after some of the steps, as (steps done, divergence). `features` is how many
    features were compared on the way, `resumed` how many steps came from a checkpoint.
    """

    model: nn.Module = field(repr=False)
    before: float
    after: float
    lr: float
    steps: int
    seconds: float
    features: int
    examples: int
    held_out: int
    history: tuple[tuple[int, float], ...] = field(repr=False)
    resumed: int = 0

    @property
    def gained(self) -> float:
        """Fraction of the divergence that is gone, from 0 to 1."""
        return 1 - self.after / self.before if self.before else 0.0

    def record(self) -> dict[str, Any]:
        """Everything but the model, as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"} | {"gained": self.gained}

    def __str__(self) -> str:
        where = f"on {self.held_out:,} held-out examples"
        how = f"{self.steps:,} steps, {self.seconds:.0f} s, learning rate {self.lr:.2g}, {self.examples:,} examples"
        if self.after >= self.before:
            return f"healing gained nothing {where} ({how}): the model is as before"
        return f"healed: divergence from the dense outputs {self.before:.4g} -> {self.after:.4g} {where} ({how})"


def heal(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    config: Heal = Heal(),  # noqa: B008  # frozen
    *,
    input_of: InputOf | None = None,
    progress: bool = True,
) -> HealResult:
    """Train a pruned model towards the dense one it comes from. Changes `model` itself; needs no labels.

    Compares the outputs (KL divergence of logits, relative squared error of anything else) and all features of equal
    shape on the way, such as the residual stream after every block. BatchNorm statistics stay as they are. About an
    eighth of the examples are held out, and the best state on them is kept: the model is never worse there than before.
    After an error it is as before; after Ctrl-C it is the best so far.

    `batches` are as for `prune`, and are all held in memory. With torchrun or accelerate launch each process passes its
    own part of the examples, and gradients are averaged. With accelerate (`pip install 'ispasp[train]'`) healing runs
    on the device that it finds. Both models end where they came from.

    >>> torch.manual_seed(0)                                                              # doctest: +ELLIPSIS
    <...>
    >>> dense = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> small = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> result = heal(small, dense, torch.randn(256, 4), Heal(steps=100), progress=False)
    >>> result.gained > 0.5
    True
    """
    if not isinstance(config, Heal):
        raise InputError(f"config is a {type(config).__name__}: pass ispasp.Heal(...)")
    with plain(model) as student, plain(teacher) as dense:
        check_model(student)
        check_model(dense)
        rest, held = held_out([(batch, batch) for batch in inputs_in(batches, student, input_of)])
        result = healed(student, dense, [b for b, _ in rest], [b for b, _ in held], config, progress=progress)
        return replace(result, model=model)


def healed(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Batch],
    held: Sequence[Batch],
    config: Heal,
    ranks: Team | None = None,
    *,
    progress: bool = True,
) -> HealResult:
    """`heal` on prepared batches, with some held out. Ranks average their gradients."""
    start = time.monotonic()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(torch.inference_mode(False))
        enter(torch.enable_grad())
        enter(random_numbers_kept())
        accelerator = enter(accelerated_if_useful(config.mixed_precision, join=ranks is None))
        ranks = ranks or enter(joined_team())
        enter(ranks.together("healing"))
        _check(model, teacher, batches, held)
        alike(ranks, "the settings of heal", lambda: vars(config), SAME_OPTIONS)
        weights_alike(ranks, model)
        weights_alike(ranks, teacher, of="the teacher")
        for each in (model, teacher) if accelerator else ():
            enter(placed(each, accelerator.device))
        examples = Examples(batches, config.batch, config.augment, (config.seed, ranks.rank))
        run = Healing(Networks(model, teacher, accelerator), examples, Examples(held, config.batch), ranks)
        run.show = progress
        enter(run.undone_by_errors())
        both = {"examples": batches, "held_out": held}
        counts = {name: ranks.total(sum(map(count_examples, each))) for name, each in both.items()}
        store = _store(config, counts, ranks, accelerator)
        # of the start, also where a checkpoint goes on
        rates = {} if config.lr else _rates(run.trained(None), min(_TURN, _REACH * run.damage()))
        typical = config.lr or statistics.median(rates.values() or [1e-3])  # for vectors such as biases, too
        saved = run.resume(store) if store else {}
        resumed = run.at.step
        run.at.stages = run.at.stages or _stages(run, config, typical, time.monotonic() - start)
        run.run(saved, {name: rate / typical for name, rate in rates.items()})
        at, lr = run.at, max(stage.lr for stage in run.at.stages)
        facts = at.history[0][1], at.best, lr, at.step, time.monotonic() - start, run.pair.features
        return HealResult(model, *facts, **counts, history=tuple(at.history), resumed=resumed)


def _store(config: Heal, counts: Mapping[str, int], ranks: Team, accelerator: Any) -> Store | None:
    """The checkpoint of a run, with the settings that a resumed run must share."""
    if config.checkpoint is None:
        return None
    names = ("epochs", "steps", "time", "lr", "augment", "blocks", "batch", "seed")
    precision = accelerator.mixed_precision if accelerator else "no"
    settings = {name: comparable(getattr(config, name)) for name in names}
    settings |= {"mixed_precision": precision, **counts, "processes": ranks.size}
    return Store(Path(config.checkpoint), "heal", settings, config.checkpoint_every)


def _stages(run: Healing, config: Heal, typical: float, spent: float) -> list[Stage]:
    """Two cycles of the learning rate for all parameters, the second one careful; or one cycle for each block."""
    steps = config.limit(run.ranks.total(run.examples.steps_per_epoch) / run.ranks.size)
    seconds = math.inf if config.time is None else config.time - spent
    blocks: list[int | None] = [*run.blocks()] if config.blocks else [None, None]
    shares = [1 / len(blocks)] * len(blocks) if config.blocks else _SHARES
    stages, left = [], steps
    for number, (block, share) in enumerate(zip(blocks, shares, strict=True)):
        length = left - round(steps * sum(shares[number + 1 :])) if math.isfinite(steps) else steps
        left -= length if math.isfinite(steps) else 0
        lr = typical * (1.0 if config.lr else min(1.0, math.sqrt((length if config.blocks else steps) / _SHORT)))
        if length:
            stages.append(Stage(block, lr if config.blocks else lr / _CAREFUL**number, length, share * seconds))
    return stages


@torch.no_grad()
def _rates(parameters: Mapping[str, Tensor], turn: float) -> dict[str, float]:
    """The learning rate at which a step of Adam changes each weight matrix by at most about `turn`, relatively.

    A step changes every entry by about the rate. If the signs agree, the largest singular value of the change is rate x
    sqrt(rows x columns), while that of weights with root mean square w is about w x (sqrt(rows) + sqrt(columns)).
    One rate for all matrices would change some by a quarter: the rates of MobileNetV2 differ by a factor of 90.

    >>> {name: round(rate, 4) for name, rate in _rates({"w": torch.ones(4, 9), "b": torch.ones(4)}, 0.03).items()}
    {'w': 0.03}
    """
    matrices = {name: p.float() for name, p in parameters.items() if p.ndim > 1 and p.numel()}
    rates = {
        name: turn * float(p.square().mean().sqrt()) * 2 / math.sqrt(min(p.shape[0], p[0].numel()))
        for name, p in matrices.items()
    }
    return {name: rate for name, rate in rates.items() if rate > 0}


def check_student(model: nn.Module, teacher: nn.Module | None) -> None:
    """Raise unless the model can be trained towards the teacher."""
    if model is teacher:
        raise InputError("the teacher is the model itself: pass the dense model, or a copy made before pruning")
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(f"{type(model).__name__} has no trainable parameter: call model.requires_grad_(True) first")


def _check(model: nn.Module, teacher: nn.Module, batches: Sequence[Batch], held: Sequence[Batch]) -> None:
    check_student(model, teacher)
    places = [next((p.device for p in each.parameters()), None) for each in (model, teacher)]
    if places[0] != places[1]:
        raise InputError(f"model and teacher are on {places[0]} and {places[1]}: move both to one device")
    if not held or not batches:
        raise InputError(f"no held-out examples are left to judge by: pass {ENOUGH} or more examples")
