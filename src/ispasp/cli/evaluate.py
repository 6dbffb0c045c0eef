"""`ispasp evaluate`: the accuracy of a classifier, or the perplexity of a causal language model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ispasp.cli import options as o
from ispasp.cli.data import load_data
from ispasp.cli.huggingface import is_causal
from ispasp.cli.loaded import Examples, Loaded, matched, runs
from ispasp.cli.models import ModelOptions
from ispasp.engine.batches import placed
from ispasp.errors import InputError
from ispasp.graph.trace import evaluating, run
from ispasp.report.progress import track
from ispasp.train.objective import labels_of, logits_of


@o.grouped
def evaluate(
    model: ModelOptions,
    data: o.Labelled,
    number: Annotated[int | None, o.option(o.DATA, "Examples, spread out. Default: all.", "--examples", min=1)] = None,
    batch_size: o.BatchSize = 32,
    device: o.Device = "",
    as_json: o.Json = False,
) -> None:
    """Print a model's score: top-1 accuracy of a classifier (labelled data), perplexity of a causal language model."""
    loaded = model.load(data.seed)
    found = load_data(data.data, loaded, data)
    o.LOG.debug("scoring %s on %s", loaded.spec, found.text)
    judge = scorer(loaded, found, batch_size, examples=number)
    o.warn((*loaded.warnings, *found.warnings))
    o.move(loaded.model, device)
    scores = judge(loaded.model)
    prepare = found.preprocessing
    if as_json:
        told = {"model": model.model, "data": data.data, "scored_on": judge.text, "scores": scores}
        typer.echo(json.dumps({**told, "preprocessing": prepare}, indent=2, default=asdict))
        return
    shown = f"{100 * scores['accuracy']:.2f} %" if judge.name == "accuracy" else f"{scores[judge.name]:.2f}"
    typer.echo(f"{judge.name} {shown} on {judge.text}" + (f"\nimages: {prepare}" if prepare else ""))


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores a model on fixed batches; `ispasp.prune(evaluate=...)` takes it."""

    name: str
    score: Callable[[nn.Module, Iterable[Any]], float]
    batches: DataLoader[Any]
    text: str  # names the examples

    def __call__(self, model: nn.Module) -> dict[str, float]:
        return {self.name: self.score(model, track(self.batches, f"scoring on {self.text}", len(self.batches)))}


def scorer(loaded: Loaded, found: Examples, batch_size: int, *, examples: int | None = None) -> Scorer:
    """Perplexity for a causal language model, accuracy for a classifier."""
    numbers = found.some(examples or found.count)
    output = runs(loaded, found)
    text = found.text if len(numbers) == found.count else f"{len(numbers):,} of {found.text}"
    if is_causal(loaded.model):
        return Scorer("perplexity", perplexity, found.loader(batch_size, numbers=numbers), text)
    logits = torch.empty(0)
    with suppress(InputError):
        logits = logits_of(output)
    if logits.ndim != 2 or logits.shape[1] < 2:
        gives = tuple(logits.shape) if logits.numel() else f"a {type(output).__name__}"
        remedy = (
            "pass a classifier or a causal language model, or score it from Python, ispasp.prune(..., evaluate=...)"
        )
        raise InputError(f"{loaded.spec} gives {gives}, no classes and no next tokens: {remedy}")
    found = matched(found, logits.shape[1], loaded.names)
    return Scorer("accuracy", accuracy, found.loader(batch_size, numbers=numbers, labelled=True), text)


def accuracy(model: nn.Module, batches: Iterable[Any]) -> float:
    """Fraction of examples whose largest output is that of their label."""
    right = total = 0
    with evaluating(model), torch.no_grad():
        for batch in batches:
            labels = labels_of(batch)
            inputs = {k: v for k, v in batch.items() if k != "labels"} if isinstance(batch, Mapping) else batch[0]
            right += int((_logits(model, inputs).argmax(1).cpu() == labels).sum())
            total += len(labels)
    return right / max(total, 1)


def perplexity(model: nn.Module, batches: Iterable[Any]) -> float:
    """exp of the mean cross entropy of every token after the first of its text, padding excluded."""
    loss, tokens = 0.0, 0
    with evaluating(model), torch.no_grad():
        for batch in batches:
            logits = _logits(model, batch).cpu()
            ids = batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()))
            mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
            for row, targets, counted in zip(logits, ids, mask, strict=True):  # one at a time: vocabularies are large
                counts = counted[1:] & counted[:-1]
                losses = functional.cross_entropy(row[:-1].float(), targets[1:], reduction="none")
                loss += float(losses[counts].double().sum())
                tokens += int(counts.sum())
    if not tokens:
        raise InputError("no text has two tokens: pass longer texts")
    return round(math.exp(min(loss / tokens, 700.0)), 6)


def _logits(model: nn.Module, inputs: Any) -> Tensor:
    return logits_of(run(model, placed(inputs, model)))
