"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.engine.team import SAME_OPTIONS, Team, alike, team, weights_alike
from ispasp.errors import InputError
from ispasp.graph.state import random_numbers_kept
from ispasp.graph.trace import evaluating
from ispasp.report import track
from ispasp.train.checkpoint import Parts, Store, check_fits, model_tensors, optimizer_tensors, restore_optimizer
from ispasp.train.devices import accelerated, draws_alone, placed, shared, wrapped
from ispasp.train.loader import STEP, Group, StepLoader, seed_everything
from ispasp.train.objective import Autocast, Batch
from ispasp.train.recipe import Recipe

NO_SCORE = object()  # what `evaluate` may return to give none


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that decides a training run, except the model and the loader.

    `loss` is the mean over the examples of a batch; other models than its first argument run under the autocast. The
    `teachers` are models that it runs: put on the same device, in eval mode. `facts` are its settings, for checkpoints,
    which are written to `folder` every `every` steps.
    """

    recipe: Recipe
    loss: Callable[[nn.Module, Batch, Autocast], Tensor]
    epochs: float
    accumulate: int = 1
    seed: int = 0
    mixed_precision: str | None = None
    folder: Path | None = None
    every: int = 100
    progress: bool = True
    evaluate: Callable[[nn.Module], Any] | None = None
    teachers: tuple[nn.Module, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def steps(self, batches: int) -> int:
        """Number of optimizer steps, for a loader of that many batches."""
        return max(1, round(self.epochs * -(-batches // self.accumulate)))

    def settings(self, batches: int, precision: str) -> dict[str, Any]:
        """Settings that must be equal to resume a checkpoint."""
        own = {name: getattr(self, name) for name in ("epochs", "accumulate", "seed")}
        return {"recipe": repr(self.recipe), **own, "batches": batches, **self.facts, "mixed_precision": precision}


def train(run: Run, model: nn.Module, loader: Any) -> tuple[tuple[float, ...], int, Mapping[int, float]]:
    """Train the model in place.

    Returns the loss of every step, how many steps came from a checkpoint, and `evaluate` by number of steps done.
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(torch.inference_mode(False))
        enter(torch.enable_grad())
        enter(random_numbers_kept())
        accelerator = enter(accelerated(run.mixed_precision))
        several = accelerator.num_processes > 1
        ranks = enter(team() if several else Team())
        settings = run.settings(len(loader), accelerator.mixed_precision)
        _check_alike(ranks, run, settings, model)
        for each in (model, *run.teachers):
            enter(placed(each, accelerator.device))
            each.train(each is model)
        seed_everything(run.seed)  # before `shared`, which may give the sampler a generator
        part = enter(shared(accelerator, loader))
        rank = accelerator.process_index if draws_alone(loader) else 0
        batches = StepLoader(part, len(loader), run.accumulate, run.seed, rank, shared=several)
        optimizer = run.recipe.optimizer([p for p in model.parameters() if p.requires_grad])
        store = None if run.folder is None else Store(run.folder, "finetune", settings, run.every)
        found = store.read(ranks, model, run.steps(len(loader)), _saved) if store else None
        losses, scores = (found.losses, found.scores) if found else ([], {})
        if found:
            found.restore(model, optimizer, batches, accelerator.scaler)
        whole = enter(wrapped(accelerator, model))
        stepper = optimizer if accelerator.scaler is None else accelerator.prepare_optimizer(optimizer)
        return _Loop(run, store, accelerator, model, whole, optimizer, stepper, batches, losses, scores).train()


def _check_alike(ranks: Team, run: Run, settings: Mapping[str, Any], model: nn.Module) -> None:
    """Raise if ranks differ in settings or weights: DistributedDataParallel would overwrite them silently."""
    trained = {"trainable parameters": [name for name, p in model.named_parameters() if p.requires_grad]}
    facts = {"evaluate": run.evaluate, "checkpoint": run.folder is not None, "checkpoint_every": run.every}
    alike(ranks, "the settings of finetune", lambda: {**settings, **facts, **trained}, SAME_OPTIONS)
    weights_alike(ranks, model)
    for teacher in run.teachers:
        weights_alike(ranks, teacher, of="the teacher")


@dataclass(frozen=True, eq=False)
class _Saved:
    """Everything that decides how a run goes on after `step` steps."""

    step: int
    parts: Parts
    losses: list[float]
    scaler: dict[str, float]
    scores: dict[int, float]

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: StepLoader, scaler: Any) -> None:
        """Restore the saved state, the model last: a checkpoint that does not fit leaves it as it was."""
        saved, states = self.parts.get("model", {}), self.parts.get("loader", {})
        check_fits(model_tensors(model), saved)
        restore_optimizer(optimizer, self.parts.get("optimizer", {}))
        if scaler is not None:
            scaler.load_state_dict(self.scaler)
        loader.resume([states[str(number)] for number in range(len(states))])
        for name, tensor in model_tensors(model).items():
            tensor.copy_(saved[name])


def _saved(about: dict[str, Any], parts: Parts) -> _Saved:
    step, losses = about["step"], parts["losses"][""]
    if losses.dtype != torch.float64 or losses.shape != (step,):
        raise ValueError(f"{losses.numel()} losses of step {step!r:.80}")
    scores = {number: float(score) for number, score in about["scores"]}  # keys of JSON objects are text
    if any(type(number) is not int or not 0 < number <= step for number in scores):
        raise ValueError(f"scores of steps {list(scores)!r:.80}")
    if unknown := parts.keys() - {"losses", "model", "optimizer", "loader"}:
        raise ValueError(f"tensors {unknown!r:.80}")
    scaler = {str(name): float(value) for name, value in about["scaler"].items()}
    return _Saved(step, parts, losses.tolist(), scaler, scores)


@dataclass(frozen=True, eq=False)
class _Loop:
    run: Run
    store: Store | None
    accelerator: Any
    model: nn.Module
    whole: nn.Module  # the model as accelerate wraps it
    optimizer: torch.optim.Optimizer
    stepper: Any  # the optimizer; for fp16 as accelerate wraps it
    batches: StepLoader
    losses: list[float]  # of the steps done
    scores: dict[int, float]

    def train(self) -> tuple[tuple[float, ...], int, Mapping[int, float]]:
        run, start, steps = self.run, len(self.losses), self.run.steps(self.batches.batches)
        if start == 0:
            self._save(0)
        show = run.progress and self.accelerator.is_main_process
        for step in track(range(start, steps), "fine-tuning", steps - start, show=show):
            group = self.batches.group(step)
            seed_everything(run.seed, STEP, step, self.accelerator.process_index)
            self.losses.append(self._step(group, run.recipe.lr_at(step, steps), step))
            done = step + 1
            if done % self.batches.steps_per_epoch == 0 or done == steps:
                self._evaluate(done)
            if done % run.every == 0 or done == steps:
                self._save(done)
        self._copy_from_first(self.model.buffers())
        self.optimizer.zero_grad()  # gradients take as much memory as the model
        return tuple(self.losses), start, self.scores

    def _step(self, group: Group, lr: float, step: int) -> float:
        """Change the parameters once. Returns the mean loss over the examples of all batches and processes."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        accelerator = self.accelerator
        count_here = torch.tensor(float(sum(n for _, n in group)), dtype=torch.float32, device=accelerator.device)
        examples = float(accelerator.reduce(count_here, "sum"))
        total = torch.zeros((), dtype=torch.float32, device=accelerator.device)
        self.stepper.zero_grad()
        for number, (batch, count) in enumerate(group):
            last = number + 1 == len(group)
            with nullcontext() if last else accelerator.no_sync(self.whole):
                here = import_module("accelerate.utils").send_to_device(batch, accelerator.device)
                loss = self.run.loss(self.whole, here, accelerator.autocast)
                if not loss.requires_grad:
                    raise InputError("the loss has no gradient to a trainable parameter: compute it from the output")
                weight = count / examples
                accelerator.backward(loss * (weight * accelerator.num_processes))  # processes are averaged
                total += loss.detach() * weight
        value = float(accelerator.reduce(total, "sum"))
        if not math.isfinite(value):
            remedy = "pass a lower lr in the recipe, or look for NaN and Inf in the batches and in the model"
            raise InputError(f"the loss is {value} at step {step}, learning rate {lr:.3g}: {remedy}")
        self.stepper.step()
        return value

    def _save(self, step: int) -> None:
        if self.store is None:
            return
        if self.accelerator.is_main_process:
            scaler = {} if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()
            about = {"step": step, "scaler": scaler, "scores": list(self.scores.items())}
            parts = {
                "model": model_tensors(self.model),
                "optimizer": optimizer_tensors(self.optimizer),
                "loader": {str(number): state for number, state in enumerate(self.batches.states(step))},
                "losses": {"": torch.tensor(self.losses, dtype=torch.float64, device="cpu")},
            }
            self.store.write(about, parts)
        self.accelerator.wait_for_everyone()

    def _evaluate(self, step: int) -> None:
        if self.run.evaluate is None:
            return
        self._copy_from_first(self.model.buffers())
        with evaluating(self.model):
            score: Any = self.run.evaluate(self.model)
        if score is NO_SCORE:
            return
        try:
            value = torch.tensor(float(score), dtype=torch.float64, device=self.accelerator.device)
        except (TypeError, ValueError) as error:
            raise InputError(f"evaluate gave a {type(score).__name__}: return one number") from error
        self._copy_from_first([value])
        self.scores[step] = value.item()

    def _copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the tensors of the first. Buffers differ, because processes see different examples."""
        if self.accelerator.num_processes > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor, 0)
