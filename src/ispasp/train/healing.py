"""Training without labels: a student towards its teacher, in stages that can be interrupted and resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.engine.batches import signature
from ispasp.engine.team import Team
from ispasp.errors import InputError
from ispasp.graph.state import uninterrupted
from ispasp.graph.trace import Batch
from ispasp.report import track
from ispasp.train.checkpoint import Parts, Store, check_fits, model_tensors, optimizer_tensors, restore_optimizer
from ispasp.train.loader import Examples
from ispasp.train.mimic import Distance, Pair, pair
from ispasp.train.recipe import SCHEDULES

Values = dict[str, Tensor]  # parameters by name
_WARMUP, _FIRST = 0.2, 0.05  # fraction of a stage in which the learning rate rises, and its first value
_CHECKS = 4  # evaluations on held-out examples in a stage
_JUDGES = 512  # most held-out examples to evaluate on
_BETAS = (0.9, 0.99)  # of Adam: a short memory for short stages
_PRECISE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Stage:
    """One rise and fall of the learning rate, for all parameters or those of one block. Limits may be infinite."""

    block: int | None
    lr: float
    steps: float
    seconds: float

    def lr_at(self, position: float) -> float:
        """The learning rate at a position of the stage, in [0, 1).

        >>> [round(Stage(None, 1.0, 8, 1).lr_at(position), 2) for position in (0, 0.1, 0.2, 0.6)]
        [0.05, 0.53, 1.0, 0.5]
        """
        rising = min(1.0, _FIRST + (1 - _FIRST) * position / _WARMUP)
        return self.lr * rising * SCHEDULES["cosine"](max(0.0, position - _WARMUP) / (1 - _WARMUP))


@dataclass
class Place:
    """Progress of a run, as a checkpoint stores it."""

    step: int = 0
    stage: int = 0
    done: int = 0  # steps of the stage
    spent: float = 0.0  # seconds of the stage
    goal: float = math.inf  # the lowest distance at the end of the stage's block
    best: float = math.inf  # the lowest divergence of the outputs
    history: list[tuple[int, float]] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)


class Networks:
    """Student and teacher, and their distance on a batch: at the outputs or at the end of a block."""

    def __init__(self, student: nn.Module, teacher: nn.Module, accelerator: Any = None) -> None:
        self.student, self.teacher = student, teacher
        self._device = accelerator.device if accelerator else next(student.parameters()).device
        self._autocast = accelerator.autocast if accelerator else nullcontext
        self.scaler = accelerator.scaler if accelerator else None  # for fp16
        self._pairs: dict[Any, Pair] = {}

    def pair(self, batch: Batch, block: int | None = None) -> Pair:
        """The graphs for batches of that shape, whole or up to the end of a block."""
        key = signature(batch), block
        if key not in self._pairs:
            whole = pair(self.student, self.teacher, batch) if block is None else self.pair(batch)
            self._pairs[key] = whole if block is None else whole.upto(block)
        return self._pairs[key]

    def distance(self, batch: Batch, block: int | None = None) -> Distance:
        """Compare both networks. Gradients reach all parameters, or those of the block."""
        batch = pytree.tree_map_only(Tensor, lambda t: t.to(self._device), batch)
        found = self.pair(batch, block)
        with self._autocast():
            return found.distance(self.student, self.teacher, batch, None if block is None else found.blocks[block])


class Healing:
    """A run: its progress, and the parameters at the start, best by output, and best of the stage."""

    def __init__(self, networks: Networks, examples: Examples, judges: Examples, ranks: Team) -> None:
        self.networks, self.examples, self.ranks = networks, examples, ranks
        self.store: Store | None = None
        self.show = True
        self._judges = judges.first(_JUDGES)
        named = networks.student.named_parameters()
        self._parameters = {name: p for name, p in named if p.requires_grad and p.is_floating_point()}
        self._start = self._kept = self._good = self._values(self._parameters)
        self.at, self._clock = Place(best=self._divergence(None)), time.monotonic()
        self.at.history.append((0, self.at.best))
        if not math.isfinite(self.at.best):
            raise InputError("model or teacher gives NaN or Inf: look for them in the weights and the batches")

    @property
    def pair(self) -> Pair:
        """The graphs of both networks."""
        return self.networks.pair(self._judges[0])

    def blocks(self) -> list[int]:
        """The blocks with parameters to train, from the first one at whose end the networks differ."""
        found = [k for k in range(self.pair.features + 1) if self.trained(k)]
        while len(found) > 1 and self._divergence(found[0]) == 0:
            del found[0]
        return found

    def trained(self, block: int | None) -> dict[str, nn.Parameter]:
        """The parameters of a block, or all."""
        names: Iterable[str] = self._parameters if block is None else self.pair.blocks[block]
        return {name: p for name, p in self._parameters.items() if name in names}

    # Training ---------------------------------------------------------------------------------------------------
    def run(self, saved: Parts, scales: Mapping[str, float]) -> None:
        """Train through all stages, from the `saved` state of a checkpoint. The student ends in its best state.

        `scales` of the learning rate, by parameter; 1 for the others.
        """
        at = self.at
        while at.stage < len(at.stages):
            stage, now = at.stages[at.stage], saved.get("now", {})
            # Half precision cannot hold small steps: the optimizer changes float32 copies.
            precise = {
                name: p.detach() if p.dtype in _PRECISE else now.get(name, p.detach()).float()
                for name, p in self.trained(stage.block).items()
            }
            groups = [{"params": [value], "scale": scales.get(name, 1.0)} for name, value in precise.items()]
            optimizer = torch.optim.Adam(groups, betas=_BETAS)
            restore_optimizer(optimizer, saved.get("optimizer", {}))
            saved = {}
            self._stage(stage, precise, optimizer)
            at.stage, at.done, at.spent = at.stage + 1, 0, 0.0
            self._save({}, None, last=at.stage == len(at.stages))
        self._set(self._kept)

    def _stage(self, stage: Stage, precise: Values, optimizer: torch.optim.Optimizer) -> None:
        """Train one stage, and keep its best state by the distance at its end."""
        at, whole = self.at, stage.block is None
        self._clock = time.monotonic()
        if at.done == 0:
            at.goal = at.best if whole else self._divergence(stage.block)
            self._good = self._kept if whole else self._values(precise)
        while (position := self._position(stage)) < 1:
            end = (math.floor(position * _CHECKS) + 1) / _CHECKS
            total = None if math.isinf(stage.steps) else math.ceil((end - position) * stage.steps)
            what = f"healing{'' if stage.block is None else f' block {stage.block + 1}'}, {at.goal:.4g} apart"
            for finite in track(self._leg(stage, precise, optimizer, end), what, total, show=self.show):
                if not finite:
                    self._set(self._good)
                    return
            self._look(stage, precise)
            self._save(precise, optimizer)
        self._set(self._good)
        if not whole:
            self._judge(self._divergence(None))

    def _leg(self, stage: Stage, precise: Values, optimizer: torch.optim.Optimizer, end: float) -> Iterator[bool]:
        """Take steps up to a position in the stage. Yields after each whether the loss was finite."""
        position = self._position(stage)
        while position < end:
            for group in optimizer.param_groups:
                group["lr"] = group["scale"] * stage.lr_at(position)
            yield self._step(stage.block, precise, optimizer)
            position = self._position(stage)
            if position < end:
                self._save(precise, optimizer)

    def _position(self, stage: Stage) -> float:
        """Fraction of the stage that is done, the same on all ranks. The first step is always taken."""
        now = time.monotonic()
        self.at.spent, self._clock = self.at.spent + now - self._clock, now
        spent = 0.0 if math.isinf(stage.seconds) else self.ranks.total(self.at.spent) / self.ranks.size
        return max(self.at.done / stage.steps, spent / max(stage.seconds, 1e-9)) if self.at.done else 0.0

    def _step(self, block: int | None, precise: Values, optimizer: torch.optim.Optimizer) -> bool:
        """Take one optimizer step, by the mean gradient over ranks. False if the loss is not finite."""
        ranks, scaler, parameters = self.ranks, self.networks.scaler, [*self.trained(block).values()]
        batch = self.examples.batch(self.at.step)
        loss = self.networks.distance(batch, block).loss
        if not loss.requires_grad:
            raise InputError("no parameter that can change reaches the outputs: call model.requires_grad_(True) first")
        if not math.isfinite(ranks.total(float(loss.detach()))):
            self._check(batch, block)
            return False
        scaled = loss if scaler is None else scaler.scale(loss)
        found = torch.autograd.grad(scaled, parameters, materialize_grads=True, allow_unused=True)
        if ranks.size > 1:
            summed = ranks.sum_tensors({"gradients": torch.cat([g.flatten() for g in found])})["gradients"]
            found = torch.split(summed / ranks.size, [g.numel() for g in found])
        for value, gradient in zip(precise.values(), found, strict=True):
            value.grad = gradient.reshape(value.shape).to(value)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        self._set(precise)
        self.at.step, self.at.done = self.at.step + 1, self.at.done + 1
        return True

    @torch.no_grad()
    def _check(self, batch: Batch, block: int | None) -> None:
        """Raise if the loss is not finite in the best state either: then it comes from the batch."""
        self._set(self._good)
        if not math.isfinite(self.ranks.total(float(self.networks.distance(batch, block).output))):
            raise InputError("the loss is NaN or Inf on a training batch: look for NaN and Inf in the batches")

    # States -----------------------------------------------------------------------------------------------------
    def _look(self, stage: Stage, trained: Values) -> None:
        """Keep the present state if it is the best of the stage."""
        apart = self._divergence(stage.block)
        if apart < self.at.goal:
            with uninterrupted():
                self.at.goal, self._good = apart, self._values(trained)
        if stage.block is None:
            self._judge(apart)

    def _judge(self, apart: float) -> None:
        """Keep the present state if its outputs are the best so far."""
        self.at.history.append((self.at.step, apart))
        if apart < self.at.best:
            with uninterrupted():
                self.at.best, self._kept = apart, self._values(self._parameters)

    @torch.no_grad()
    def _divergence(self, block: int | None) -> float:
        """Mean divergence over the held-out batches of all ranks; infinite if it is not a number."""
        mine = sum(float(self.networks.distance(batch, block).output) for batch in self._judges)
        value = self.ranks.total(mine) / self.ranks.total(len(self._judges))
        return max(value, 0.0) if math.isfinite(value) else math.inf

    @torch.no_grad()
    def damage(self) -> float:
        """Mean squared error of the features on held-out examples, relative to their variance; without any, of outputs.

        A network that is nearly right loses by large steps what it has. One that is far off needs them.
        """
        found = [self.networks.distance(batch) for batch in self._judges]
        mine = sum(float(each.features if self.pair.features else each.output) for each in found)
        return float(self.ranks.total(mine)) / self.ranks.total(len(found))

    @contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """Restore the student after an error; after Ctrl-C keep the best state so far."""
        try:
            yield
        except BaseException as error:
            self._set(self._start if isinstance(error, Exception) else self._kept)
            raise

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        with uninterrupted():
            for name, value in values.items():
                if value.data_ptr() != self._parameters[name].data_ptr():
                    self._parameters[name].copy_(value)

    def _values(self, names: Iterable[str]) -> Values:
        return {name: self._parameters[name].detach().clone() for name in names}

    def _save(self, precise: Values, optimizer: torch.optim.Optimizer | None, *, last: bool = False) -> None:
        """Write a checkpoint, every `store.every` steps and at the end."""
        store = self.store
        if store is None or self.ranks.rank or not (last or self.at.step % store.every == 0):
            return
        parts: Parts = {
            "model": {**model_tensors(self.networks.student), **self._kept},
            "now": {**self._parameters, **precise},
            "good": self._good,
            "optimizer": {} if optimizer is None else optimizer_tensors(optimizer),
        }
        store.write(asdict(self.at) | {"stages": list(map(astuple, self.at.stages))}, parts)

    def resume(self, store: Store) -> Parts:
        """Write checkpoints to a store, and restore the state of the one in it, if any. Returns its tensors."""
        self.store, tensors = store, model_tensors(self.networks.student)
        found = store.read(self.ranks, self.networks.student, math.inf, _restored)
        if found is None:
            return {}
        self.at, parts = found
        saved, now = parts["model"], parts["now"]
        check_fits(tensors, saved)
        fixed = tensors.keys() - self._parameters.keys()
        shapes = {name: p.shape for name, p in self._parameters.items()}
        same = all(torch.equal(tensors[name].cpu(), saved[name]) for name in fixed)
        known = {name: value.shape for name, value in now.items()} == shapes and parts["good"].keys() <= shapes.keys()
        if not (same and known):
            raise InputError("the checkpoint is of another model or parameters: pass that run's, or another folder")
        self._kept, self._good = {name: saved[name] for name in shapes}, dict(parts["good"])
        self._set(now)
        return parts


def _restored(about: Mapping[str, Any], parts: Parts) -> tuple[Place, Parts]:
    """Read what `_save` wrote."""
    history = [(int(step), float(apart)) for step, apart in about["history"]]
    place = Place(history=history, stages=[Stage(*stage) for stage in about["stages"]])
    for name in ("step", "stage", "done", "spent", "goal", "best"):
        setattr(place, name, type(getattr(place, name))(about[name]))
    if min(place.stage, place.done, place.spent) < 0 or not history:
        raise ValueError(f"step {place.done} of stage {place.stage}")
    return place, {part: parts.get(part, {}) for part in ("model", "now", "good", "optimizer")}
