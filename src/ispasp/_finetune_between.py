"""Prune layer by layer with training in between, as the paper does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from ispasp._evaluate import Judge, Scores, scored
from ispasp._keep import names_units
from ispasp._options import Inputs, Options
from ispasp.engine.batches import batches_in
from ispasp.engine.team import Team, weights_alike
from ispasp.graph.state import copied
from ispasp.graph.trace import evaluating
from ispasp.result import Result
from ispasp.surgery.remove import Undo, plans_of, record_
from ispasp.types.dimension import Extent, Structure, TensorLayout, full_length
from ispasp.types.plan import Plan

Train = Callable[[nn.Module], Any]
Prune = Callable[[nn.Module, Iterable[Any], Options, Team], Result]


def pruned_between(
    model: nn.Module, batches: Iterable[Any], options: Options, train: Train, ranks: Team, prune_: Prune
) -> Result:
    """Prune one hidden dimension at a time, in order, and let `train(model)` train the model after each.

    Each step prunes the model as trained so far; the plan refers to the dense model. Training cannot be undone: after a
    failure the model stays as far as it has come. Ranks must train together, so that their weights stay the same.
    """
    batches = batches_in(batches, model)
    with ranks.together("the predictions of the dense model"), evaluating(model):
        inputs = Inputs(model, batches, options)
        judge = Judge(model, inputs.held_out(), inputs.first)
    before = scored(options.evaluate, model, ranks)
    plans = plans_of(model)
    whole = replace(options, finetune_between=None, evaluate=None)
    on_trial = replace(whole, compensate=None, refit="consumers", recalibrate=False, optimizer=None)
    trial = prune_(copied(model), batches, on_trial, ranks)  # widths, and the structure of the dense model
    results: list[Result] = []
    for layer in trial.layers:
        keep = trial.plan.kept[layer.name] if names_units(options.keep, layer.name) else layer.kept
        part = replace(whole, keep={layer.name: keep}, skip=(), round_to=None, curves=False)
        results.append(prune_(model, batches, part, ranks))
        with ranks.together(f"the training after {layer.name!r}"):
            train(model)
        weights_alike(ranks, model)  # ranks that train apart end with different models
    structure = _with_biases(trial.plan.structure, results)
    folded = dict.fromkeys(path for r in (trial, *results) for path in r.plan.structure.folded)
    structure = replace(structure, folded=tuple(folded))
    gained = sum(len(model.get_parameter(f"{path}.bias")) for path in structure.biases)
    plan = Plan({name: kept for r in results for name, kept in r.plan.kept.items()}, structure)
    record_(model, (*plans, plan), Undo())  # one plan instead of one per layer
    return replace(
        trial,
        model=model,
        plan=plan,
        layers=tuple(layer for r in results for layer in r.layers),
        cost=replace(trial.cost, params=trial.cost.params + gained),
        evidence=max((r.evidence for r in results), key=lambda e: e.error, default=trial.evidence),
        settings={**options.described(), **inputs.described(ranks)},
        advice=tuple(dict.fromkeys(line for r in results for line in r.advice)),
        scores=Scores(before, scored(options.evaluate, model, ranks)) if options.evaluate else None,
        agreement=judge.agreement(model, ranks),
    )


def _with_biases(dense: Structure, results: Iterable[Result]) -> Structure:
    """The dense structure with the biases that compensation has added on the way.

    A result describes the model at its step: extents over already pruned dimensions get their dense units back.
    """

    def whole(extent: Extent) -> Extent:
        return tuple(tuple((n, dense.units.get(n, size) if n else size) for n, size in part) for part in extent)

    tensors = dict(dense.tensors)
    biases: list[str] = []
    for result in results:
        for path in result.plan.structure.biases:
            found = result.plan.structure.tensors[f"{path}.bias"]
            axes = {axis: whole(extent) for axis, extent in found.axes.items()}
            shape = tuple(full_length(axes[i]) if i in axes else size for i, size in enumerate(found.shape))
            tensors[f"{path}.bias"] = TensorLayout(shape, axes)
            biases.append(path)
    return replace(dense, tensors=tensors, biases=tuple(biases))
