"""Scores: how good a model is on labelled data, or on text that it predicts itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ispasp.cli.sources import Examples, Loaded, is_causal, matched, runs
from ispasp.cli.task import input_of
from ispasp.errors import InputError
from ispasp.graph.trace import evaluating, run
from ispasp.report.progress import track
from ispasp.train.batch import labels_of
from ispasp.train.objective import logits_of


@dataclass(frozen=True, eq=False)
class Scorer:
    """Calls `score` on a model and labelled batches; `ispasp.prune(evaluate=...)` takes it."""

    name: str
    score: Callable[[nn.Module, Iterable[Any]], float]
    batches: Sequence[Any] | Any
    text: str  # what the examples are

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The score under its name."""
        return {self.name: self.score(model, track(self.batches, f"scoring on {self.text}", len(self.batches)))}


def scorer(
    loaded: Loaded, found: Examples, batch_size: int, *, examples: int | None = None, names: Sequence[str] = ()
) -> Scorer:
    """Perplexity for a causal language model, top-1 accuracy for a classifier; `names` of classes, where known."""
    numbers = found.some(examples or found.count)
    output = runs(loaded, found)
    text = found.text if len(numbers) == found.count else f"{len(numbers):,} of {found.text}"
    if is_causal(loaded.model):
        return Scorer("perplexity", perplexity, found.loader(batch_size, numbers=numbers), text)
    try:
        logits = logits_of(output)
    except InputError:
        logits = torch.empty(0)
    if logits.ndim != 2 or logits.shape[1] < 2:
        gives = tuple(logits.shape) if logits.numel() else f"a {type(output).__name__}"
        raise InputError(
            f"{loaded.spec} gives {gives}, no classes and no next tokens: pass a classifier or a causal language "
            "model, or score it from Python, ispasp.prune(..., evaluate=...)"
        )
    found = matched(found, logits.shape[1], names or loaded.names)
    return Scorer("accuracy", accuracy, found.loader(batch_size, numbers=numbers, labelled=True), text)


def accuracy(model: nn.Module, batches: Iterable[Any]) -> float:
    """Fraction of the examples whose largest output is that of their label.

    >>> accuracy(nn.Identity(), [(torch.eye(2), torch.tensor([0, 0]))])
    0.5
    """
    right = total = 0
    with evaluating(model), torch.no_grad():
        for batch in batches:
            labels = labels_of(batch)
            right += int((_logits(model, input_of(batch)).argmax(1).cpu() == labels).sum())
            total += len(labels)
    return right / max(total, 1)


def perplexity(model: nn.Module, batches: Iterable[Any]) -> float:
    """exp of the mean cross entropy of every token after the first of its text; padding does not count.

    >>> even = nn.Embedding.from_pretrained(torch.zeros(4, 4))  # every token is as likely as any other
    >>> perplexity(even, [{"input": torch.tensor([[0, 1, 2]])}])
    4.0
    """
    loss, tokens = 0.0, 0
    with evaluating(model), torch.no_grad():
        for batch in batches:
            logits = _logits(model, batch).cpu()
            ids, mask = _tokens(batch)
            for row, targets, counted in zip(logits, ids, mask, strict=True):  # one at a time: vocabularies are large
                counts = counted[1:] & counted[:-1]
                losses = functional.cross_entropy(row[:-1].float(), targets[1:], reduction="none")
                loss += float(losses[counts].double().sum())
                tokens += int(counts.sum())
    if not tokens:
        raise InputError("no text has two tokens: pass longer ones")
    return round(math.exp(min(loss / tokens, 700.0)), 6)


def _logits(model: nn.Module, inputs: Any) -> Tensor:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return logits_of(run(model, pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)))


def _tokens(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    ids = batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()))
    mask = batch.get("attention_mask")
    return ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
