"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.calibrate.alike import SAME_OPTIONS, alike, weights_alike
from ispasp.calibrate.team import Alone, Team, team
from ispasp.errors import InputError
from ispasp.graph.trace import evaluating
from ispasp.report import track
from ispasp.train import checkpoint as files
from ispasp.train.checkpoint import Checkpoint
from ispasp.train.devices import accelerated, agreed, draws_alone, placed, sent, shared, wrapped
from ispasp.train.objective import Objective
from ispasp.train.order import Group, Order
from ispasp.train.randomness import STEP, left_alone, seed_everything
from ispasp.train.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Run:
    """What to do: together with the model and the loader it decides the result."""

    recipe: Recipe
    objective: Objective
    epochs: float
    accumulate: int
    seed: int
    mixed_precision: str | None
    folder: Path | None
    every: int
    progress: bool
    evaluate: Callable[[nn.Module], float] | None = None

    def steps(self, batches: int) -> int:
        """How many times the parameters change, for a loader of that many batches."""
        return max(1, round(self.epochs * -(-batches // self.accumulate)))

    def settings(self, batches: int, precision: str) -> dict[str, Any]:
        """What two runs must have in common for one to go on with the other's checkpoint."""
        teacher = self.objective.teacher
        return {
            "recipe": repr(self.recipe),
            "epochs": self.epochs,
            "batches": batches,
            "accumulate": self.accumulate,
            "label_smoothing": self.objective.label_smoothing,
            "own_loss": self.objective.loss is not None,
            "teacher": None if teacher is None else f"temperature {teacher.temperature}, weight {teacher.weight}",
            "mixed_precision": precision,
            "seed": self.seed,
        }


@dataclass(frozen=True, eq=False)
class Trained:
    """The loss of every step, how many steps came from a checkpoint, and what `evaluate` said after which step."""

    losses: list[float]
    resumed: int
    scores: dict[int, float]


def train(run: Run, model: nn.Module, loader: Any) -> Trained:
    """Train the model in place."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(left_alone())
        accelerator = stack.enter_context(accelerated(run.mixed_precision))
        ranks = stack.enter_context(team() if accelerator.num_processes > 1 else Alone())
        _alike(ranks, run, model, loader, accelerator.mixed_precision)
        stack.enter_context(placed(model, accelerator.device))
        if run.objective.teacher is not None:
            stack.enter_context(placed(run.objective.teacher.model, accelerator.device))
            run.objective.teacher.model.eval()
        seed_everything(run.seed)  # a sampler without a generator may be given one now
        part = stack.enter_context(shared(accelerator, loader))
        order = _order(run, accelerator, loader, part)
        model.train()
        optimizer = run.recipe.optimizer([p for p in model.parameters() if p.requires_grad])
        settings = run.settings(order.batches, accelerator.mixed_precision)
        with ranks.together("the reading of the checkpoint"):
            found = None
        if run.folder is not None:
            found = files.read(run.folder, settings, run.steps(order.batches), model)
        # The first process writes only when all have read.
        agreed(accelerator, found.step if found else -1, f"steps in the checkpoint of {run.folder} (-1: none)")
        if found is not None:
            files.check_model(model, found.model)
            files.restore_optimizer(optimizer, found.optimizer)
            if accelerator.scaler is not None:
                accelerator.scaler.load_state_dict(dict(found.scaler))
            order.resume(found.loader)
            files.restore_model(model, found.model)  # last: a checkpoint that does not fit leaves it as it was
        whole = stack.enter_context(wrapped(accelerator, model))
        loop = _Loop(run, accelerator, model, whole, optimizer, order, settings)
        if found is not None:
            loop.losses, loop.scores = list(found.losses), dict(found.scores)
        return loop.train(found.step if found else 0)


def _alike(ranks: Team, run: Run, model: nn.Module, loader: Any, precision: str) -> None:
    """Processes with other settings or other weights are refused; DistributedDataParallel overwrites without a word."""

    def settings() -> dict[str, Any]:
        return {
            **run.settings(len(loader), precision),
            "evaluate": run.evaluate,
            "checkpoint": run.folder is not None,
            "checkpoint_every": run.every,
            "trainable parameters": [name for name, p in model.named_parameters() if p.requires_grad],
        }

    alike(ranks, "the settings of finetune", settings, SAME_OPTIONS)
    weights_alike(ranks, model)
    if run.objective.teacher is not None:
        weights_alike(ranks, run.objective.teacher.model, of="the teacher")


def _order(run: Run, accelerator: Any, loader: Any, part: Any) -> Order:
    return Order(
        part,
        run.accumulate,
        run.seed,
        batches=len(loader),
        shared=accelerator.num_processes > 1,
        process=accelerator.process_index if draws_alone(loader) else 0,
    )


@dataclass(eq=False)
class _Loop:
    run: Run
    accelerator: Any
    model: nn.Module
    whole: nn.Module  # the model as accelerate wraps it
    optimizer: torch.optim.Optimizer
    order: Order
    settings: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    stepper: Any = field(init=False)  # the optimizer, for fp16 as accelerate wraps it

    def __post_init__(self) -> None:
        scaled = self.accelerator.scaler is not None
        self.stepper = self.accelerator.prepare_optimizer(self.optimizer) if scaled else self.optimizer
        self.steps = self.run.steps(self.order.batches)

    def train(self, start: int) -> Trained:
        if start == 0:
            self._save(0)
        show = self.run.progress and self.accelerator.is_main_process
        for step in track(range(start, self.steps), "fine-tuning", self.steps - start, show=show):
            group = self.order.group(step)
            seed_everything(self.run.seed, STEP, step, self.accelerator.process_index)
            self.losses.append(self._step(step, group))
            if (step + 1) % self.order.steps_per_epoch == 0 or step + 1 == self.steps:
                self._evaluate(step + 1)
            if (step + 1) % self.run.every == 0 or step + 1 == self.steps:
                self._save(step + 1)
        self._agree(self.model.buffers())
        self.optimizer.zero_grad()  # gradients take as much memory as the model
        return Trained(self.losses, start, self.scores)

    def _step(self, step: int, group: Group) -> float:
        """One change of the parameters; the loss is the mean over all examples of all batches and processes."""
        lr = self.run.recipe.lr_at(step, self.steps)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        accelerator = self.accelerator
        here = torch.tensor(float(sum(n for _, n in group)), dtype=torch.float32, device=accelerator.device)
        examples = float(accelerator.reduce(here, "sum"))
        total = torch.zeros((), dtype=torch.float32, device=accelerator.device)
        self.stepper.zero_grad()
        for number, (batch, count) in enumerate(group):
            last = number + 1 == len(group)
            with nullcontext() if last else accelerator.no_sync(self.whole):
                loss = self.run.objective(self.whole, sent(batch, accelerator.device), accelerator.autocast)
                if not loss.requires_grad:
                    raise InputError("the loss does not depend on what can change: compute it from the model's output")
                weight = count / examples
                accelerator.backward(loss * (weight * accelerator.num_processes))  # processes are averaged
                total += loss.detach() * weight
        value = float(accelerator.reduce(total, "sum"))
        if not math.isfinite(value):
            raise InputError(
                f"the loss is {value} at step {step}, learning rate {lr:.3g}: pass a lower lr in the recipe, or look "
                "for NaN and Inf in the batches and in the model"
            )
        self.stepper.step()
        return value

    def _save(self, step: int) -> None:
        folder, accelerator = self.run.folder, self.accelerator
        if folder is None:
            return
        if accelerator.is_main_process:
            Checkpoint(
                step,
                self.settings,
                files.model_tensors(self.model),
                files.optimizer_tensors(self.optimizer),
                self.order.states(step),
                self.losses,
                accelerator.scaler.state_dict() if accelerator.scaler is not None else {},
                self.scores,
            ).write(folder)
        accelerator.wait_for_everyone()

    def _evaluate(self, step: int) -> None:
        if self.run.evaluate is None:
            return
        self._agree(self.model.buffers())
        with evaluating(self.model):
            score = self.run.evaluate(self.model)
        try:
            value = torch.tensor(float(score), dtype=torch.float64, device=self.accelerator.device)
        except (TypeError, ValueError) as error:
            raise InputError(f"evaluate gave a {type(score).__name__}: return one number") from error
        self._agree([value])
        self.scores[step] = value.item()

    def _agree(self, tensors: Iterable[Tensor]) -> None:
        """Processes see different examples, so buffers differ; those of the first count."""
        if self.accelerator.num_processes > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor, 0)
