"""Layer by layer with training in between, as the paper does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from ispasp.api.copying import copied
from ispasp.api.result import Layer, Result
from ispasp.types.plan import Plan

Prune = Callable[[nn.Module, Iterable[Any], Any], Result]


def pruned_between(model: nn.Module, batches: Iterable[Any], options: Any, prune_: Prune) -> Result:
    """Prune one hidden dimension at a time, in order, and let `finetune_between(model)` train the model after each.

    Every dimension is pruned with what the model then is; the plan says what has become of the dense model. Training
    cannot be taken back: after a failure the model is as far as it has come.
    """
    train = options.finetune_between
    batches = list(batches) if iter(batches) is batches else batches
    whole = replace(options, finetune_between=None)
    trial = prune_(copied(model), batches, replace(whole, compensate=None, recalibrate=False))  # widths, structure
    kept: dict[str, tuple[int, ...]] = {}
    layers: list[Layer] = []
    results: list[Result] = []
    for layer in trial.layers:
        part = replace(whole, keep={layer.name: layer.kept}, skip=(), round_to=None, curves=False)
        result = prune_(model, batches, part)
        results.append(result)
        kept |= result.plan.kept
        layers += result.layers
        train(model)
    structure = trial.plan.structure
    extra = {n: t for r in results for n, t in r.plan.structure.tensors.items() if n not in structure.tensors}
    biases = tuple(dict.fromkeys(b for r in results for b in r.plan.structure.biases))
    structure = replace(structure, tensors={**structure.tensors, **extra}, biases=biases)
    verified = max((r.verified for r in results), default=trial.verified)
    plan, settings = Plan(kept, structure), options.described()
    return Result(model, plan, tuple(layers), trial.cost, trial.frozen, verified, settings, trial.curves)
