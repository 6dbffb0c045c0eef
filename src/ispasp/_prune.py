"""`ispasp.prune`: survey, then for each consumer measure, select, compensate, then plan, apply, verify."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from ispasp._evaluate import Evaluate, Judge, Scores, check_runs, recalibrate_, scored
from ispasp._finetune_between import pruned_between
from ispasp._heal import Heal, HealResult, healed
from ispasp._keep import Keep, Widths, prunable, widths
from ispasp._latency import Stopwatch
from ispasp._options import Bias, Compensate, Inputs, Options, Order, Refitted, options_for, positive, suggest_names
from ispasp._proof import Expected, MaskedNetwork, compared, expect, look_closer
from ispasp._steps import Decisions, Work, decide
from ispasp._survey import KINDS, Kinds, Scope, survey_kinds
from ispasp._widths import budget_widths, error_curves, narrowest, output_curves, sample_of, uniform_widths
from ispasp.budget import Budget, Latency
from ispasp.budget.search import WidthSearch
from ispasp.engine.batches import InputOf, Limit, signature
from ispasp.engine.graphs import TracedGraphs
from ispasp.engine.task import Loss
from ispasp.engine.team import SAME_OPTIONS, Team, alike, graphs_alike, team, weights_alike
from ispasp.errors import InputError, NothingToPruneError, SurgeryError, TraceError
from ispasp.graph.ops import op_of
from ispasp.graph.state import copied, one_at_a_time, plain
from ispasp.graph.trace import check_model, evaluating, named_tensors
from ispasp.integrations.offload import materialised
from ispasp.result import Evidence, Result, result_of
from ispasp.select import Score, Selector
from ispasp.surgery.fold import Folding, folding
from ispasp.surgery.remove import Undo, all_or_nothing, kept_part, remove_, set_data
from ispasp.surgery.trial import Trial
from ispasp.surgery.verify import zeros_replaced
from ispasp.train.objective import LabelLoss
from ispasp.types import Selection
from ispasp.types.dimension import TensorLayout, names_in
from ispasp.types.plan import Plan


@suggest_names
def prune(
    model: nn.Module,
    batches: Iterable[Any],
    keep: Keep = 0.5,
    *,
    method: str | Selector | Score = "auto",
    compensate: Compensate = "dense",
    order: Order = "sequential",
    kinds: Kinds = KINDS,
    scope: Scope = "blocks",
    skip: str | nn.Module | Collection[str | nn.Module] = (),
    round_to: int | None = None,
    input_of: InputOf | None = None,
    examples: Limit = "auto",
    positions: Limit = "auto",
    recalibrate: bool = False,
    finetune_between: Callable[[nn.Module], Any] | None = None,
    heal: bool | Heal | None = None,
    search: int | str | WidthSearch = 0,
    least: int = 1,
    curves: bool = False,
    loss: Loss | None = None,
    memory: int | None = None,
    ridge: float | Literal["auto"] = "auto",
    refit: Refitted = "auto",
    bias: Bias = "auto",
    uniform: bool = False,
    evaluate: Evaluate | None = None,
    hold_out: bool = True,
    timeout: float = 600.0,
    progress: bool = True,
) -> Result:
    """Return a smaller copy of a trained model. `model` itself is not changed.

    A model inside `torch.compile`, DataParallel or DistributedDataParallel is unwrapped: `result.model` is plain.

    `batches`: calibration data, a DataLoader, a list or generator of batches, or one batch. A batch is a Tensor for
    model(x), a tuple or list for model(*x), a dict or other mapping for model(**x). Labels are not needed: those in
    (inputs, labels) and in a dict with "labels" or "label" are left out. `input_of=lambda batch: ...` picks the inputs
    out of anything else.
    `keep`: the fraction or number of units that stay in every hidden dimension, a mapping from name glob to fraction,
    number or units, a budget such as `ispasp.Macs(0.5)`, a recipe such as `ispasp.recipes["resnet34-2.69G"]`, a plan.

    Options, by keyword:
      method       "auto": `obs`, or `l1` with order="global", the best measured without labels (docs/methods.md);
                   "ispasp" is the paper's; any name from `ispasp.methods()`, a selector such as
                   `ispasp.select.ISpaSP(iterations=20)`, or a function: statistics -> a score per unit
      compensate   "dense": refit each consumer to the dense network's output there; "local": to its own output with
                   all units; None: leave the weights alone (`thinet` still applies its own scale)
      order        "sequential": layer by layer, each sees the layers pruned before it; "oneshot": decide everything in
                   the dense network; "global": one-shot, the units of all hidden dimensions in one ranking
      kinds, scope which hidden dimensions to prune, as in `ispasp.survey`
      skip         hidden dimensions to leave alone: names, globs, or the modules that make them
      examples     examples to calibrate with, per process; None for all. "auto": 1,024, fewer if they are large
                   (65,536 tokens, or 256 images of 3 x 224 x 224)
      positions    output positions of each example (pixels, tokens) that second moments are taken at; None for all.
                   "auto": enough for 200 rows per column of a layer, over all examples, so large maps take no longer
      round_to     make widths multiples of this, e.g. 8
      search       extra candidate networks that a budget tries; each costs a few passes of a sample. Or another search
                   of widths: a name of `ispasp.budget.register_search`, or a function of a `WidthProblem`
      least        fewest units that a budget leaves in a hidden dimension; 0 may remove whole residual branches
      recalibrate  re-estimate BatchNorm statistics afterwards
      finetune_between   called with the model after each hidden dimension, e.g. to train it for an epoch, as the paper
      heal         True or `ispasp.Heal(...)`: train the pruned model towards the dense one afterwards, without labels;
                   held-out examples decide, and it never gets worse on them
      loss         for methods that use a task loss: loss(output, batch), a mean over the batch; or, for batches
                   (inputs, labels), a loss of output and labels such as nn.CrossEntropyLoss(). Without one `taylor`
                   draws labels from the model's own predictions
      curves       measure error against kept units on the first batch, in `result.curves` (a budget always does)
      evaluate     called with the model before and after, e.g. `lambda model: accuracy(model, loader)`; returns a
                   number or a dict of them, which are in `result.scores`
      hold_out     hold out about an eighth of the examples, if there are 32 or more, to judge the pruned model by
      memory       bytes that waiting activations may take; beyond that, batches are run again for every layer
      refit        "consumers" of pruned units, or "all" layers from the first of them on (slower, better); "auto" is
                   "all" with compensate="dense", else "consumers"
      bias         "add" lets compensation give layers a bias that they did not have; "keep" does not; "auto" keeps
                   with uniform=True, else adds where a layer reads pruned units
      uniform      a budget keeps the same fraction of every hidden dimension, so that a Hugging Face config can say the
                   widths and plain `from_pretrained` opens the saved model
      ridge        of the refit, relative to the mean variance of the inputs; "auto" chooses it for each layer by the
                   error on held-out examples, half of every batch
      timeout      seconds to wait for other ranks (torch.distributed)
      progress     show a bar

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> result = prune(net, [torch.rand(16, 4)], keep=0.5, progress=False)
    >>> result.model[0], result.layers[0].kept, net[0].out_features
    (Linear(in_features=4, out_features=4, bias=True), 4, 8)
    """
    return _checked_prune(locals(), copy=True)


@suggest_names
def prune_(
    model: nn.Module,
    batches: Iterable[Any],
    keep: Keep = 0.5,
    *,
    method: str | Selector | Score = "auto",
    compensate: Compensate = "dense",
    order: Order = "sequential",
    kinds: Kinds = KINDS,
    scope: Scope = "blocks",
    skip: str | nn.Module | Collection[str | nn.Module] = (),
    round_to: int | None = None,
    input_of: InputOf | None = None,
    examples: Limit = "auto",
    positions: Limit = "auto",
    recalibrate: bool = False,
    finetune_between: Callable[[nn.Module], Any] | None = None,
    heal: bool | Heal | None = None,
    search: int | str | WidthSearch = 0,
    least: int = 1,
    curves: bool = False,
    loss: Loss | None = None,
    memory: int | None = None,
    ridge: float | Literal["auto"] = "auto",
    refit: Refitted = "auto",
    bias: Bias = "auto",
    uniform: bool = False,
    evaluate: Evaluate | None = None,
    hold_out: bool = True,
    timeout: float = 600.0,
    optimizer: torch.optim.Optimizer | None = None,
    progress: bool = True,
) -> Result:
    """Prune a model in place. Options as in `prune`; the state of `optimizer` is cut as well.

    After any failure, Ctrl-C included, the model is exactly as before. A wrapped model is changed inside its wrapper:
    `torch.compile` recompiles on the next call. Wrap it in DistributedDataParallel again before training.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> prune_(net, [torch.rand(16, 4)], keep=2, progress=False).model is net, net[0].out_features
    (True, 2)
    """
    return _checked_prune(locals(), copy=False)


def _checked_prune(arguments: dict[str, Any], *, copy: bool) -> Result:
    """Validate the arguments, then prune. An error on one rank is raised on all of them."""
    model, batches, timeout = arguments.pop("model"), arguments.pop("batches"), arguments["timeout"]
    # Ranks exchange errors even if the timeout itself is wrong.
    waiting = team(float(timeout) if positive(timeout) else Options.timeout)
    with torch.inference_mode(False), waiting as ranks:  # inference tensors could never be trained
        with ranks.together("the check of the arguments"):
            check_model(model)
            with one_at_a_time(), plain(model) as inner:  # no other thread traces this model meanwhile
                chosen = options_for(inner, arguments)  # before a large model is copied
                model = copied(inner) if copy else model
        alike(ranks, "the options of prune", chosen.deciding, SAME_OPTIONS)
        with plain(model) as inner:
            return _prune_(inner, batches, chosen, ranks)


def _prune_(model: nn.Module, batches: Iterable[Any], options: Options, ranks: Team) -> Result:
    if options.finetune_between is not None:
        return pruned_between(model, batches, options, options.finetune_between, ranks, _prune_)
    with one_at_a_time(), ExitStack() as stack:
        with ranks.together("the loading of offloaded weights"):
            if any(hasattr(module, "_hf_hook") for module in model.modules()):  # accelerate's
                stack.enter_context(materialised(model))
        stack.enter_context(evaluating(model))
        folds = stack.enter_context(folding(model))
        return _pipeline(model, batches, options, ranks, folds)


def _pipeline(model: nn.Module, batches: Iterable[Any], options: Options, ranks: Team, folds: Folding) -> Result:
    """Survey, then for each consumer measure, select, compensate, then plan, apply, verify."""
    work = _survey(model, batches, options, ranks, folds)
    with ranks.together("the predictions of the dense model"):
        judge = Judge(model, work.inputs.held_out(), work.inputs.first)
    before = scored(options.evaluate, model, ranks)
    teacher = copied(model) if options.heal else None
    clock = Stopwatch(work, options.keep) if isinstance(options.keep, Latency) else None
    chosen = _widths(work, clock)
    work = work.keeping(chosen.counts)
    with ranks.together("the check of the optimizer"):
        folds.check(options.optimizer, work.survey.structure.folding(work.counts).folded)
    given = {name: Selection(kept) for name, kept in chosen.given.items() if name in work.counts}
    given |= {name: Selection(()) for name, count in work.counts.items() if count == 0}
    done = decide(work, given)  # for each consumer: measure, select, compensate
    plan, expected = _plan(work, done)
    with all_or_nothing() as undo:  # up to the result: Ctrl-C before that undoes all
        evidence = _verify(work, done, plan, expected, undo)
        if options.recalibrate:
            recalibrate_(model, work.inputs.again(), ranks, undo)
        gain = None if teacher is None else _heal(work, teacher, undo)
        agreement = judge.agreement(model, ranks)
        scores = Scores(before, scored(options.evaluate, model, ranks)) if options.evaluate else None
        latency = clock.result(model, {**work.counts}) if clock else None
        found = result_of(work, chosen, done, plan, evidence, folds)
        advice = (*found.advice, *(latency.advice() if latency else ()))
        result = replace(found, advice=advice, scores=scores, agreement=agreement, healed=gain, latency=latency)
        folds.restore(but=plan.structure.folded)
        return result


# Survey ---------------------------------------------------------------------------------------------------------
def _survey(model: nn.Module, batches: Iterable[Any], options: Options, ranks: Team, folds: Folding) -> Work:
    """Survey the model on two examples, or a whole batch if it needs more, and on a batch of every other kind."""
    weights_alike(ranks, model)
    with ranks.together("the survey"):
        inputs = Inputs(model, batches, options)
        if isinstance(options.loss, LabelLoss):
            options.loss.check(next(inputs.pairs())[1])
        try:
            work = _surveyed_on(inputs.example, model, inputs, options, ranks, folds)
        except TraceError:
            inputs.check_kinds()
            if inputs.example is inputs.first:
                raise
            work = _surveyed_on(inputs.first, model, inputs, options, ranks, folds)
        work = replace(work, unread=_unread(work), must_stay=_must_stay(work))
        _check_keep(work)
    graphs_alike(ranks, work.survey.analysis.trace, signature(work.example))
    alike(ranks, "the survey", lambda: _facts_of_survey(work), "calibrate with batches of one shape on all ranks")
    return work


def _surveyed_on(example: Any, model: nn.Module, inputs: Inputs, options: Options, ranks: Team, folds: Folding) -> Work:
    also = inputs.other_kinds(example)
    found = survey_kinds(model, example, also, scope=options.scope, kinds=options.kinds, folds=folds)
    graphs = TracedGraphs(model, found.analysis, example, also)
    return Work(model, found, graphs, example, inputs, options, ranks, {d.name: d.units for d in found.dimensions})


def _check_keep(work: Work) -> None:
    """Check, before calibration, that this model can be pruned to `keep`."""
    o, survey = work.options, work.survey
    if work.units.keys() <= work.unread.keys():
        reasons = "; ".join(f"{name}: {why}" for name, why in work.unread.items())
        raise NothingToPruneError(f"nothing can be pruned: {reasons}")
    if isinstance(o.keep, Latency):
        return  # takes measuring
    if isinstance(o.keep, Budget):
        least = {d.name: narrowest(work, d.name) for d in prunable(survey.dimensions, o.skip)}
        o.keep.check(survey.cost(), o.keep.count(survey.costs, least))
    elif work.must_stay:
        name, why = next(iter(work.must_stay.items()))
        raise InputError(f"hidden dimension {name!r} cannot go entirely: {why}; keep at least one of its units")


def _must_stay(work: Work) -> dict[str, str]:
    """Hidden dimensions that `keep` would remove entirely but that must stay, with the reason."""
    o, dimensions = work.options, work.survey.dimensions
    if isinstance(o.keep, Budget):
        wanted = [d.name for d in prunable(dimensions, o.skip)] if o.least == 0 else []
    else:
        wanted = [name for name, count in widths(dimensions, o.keep, o.skip, o.round_to).counts.items() if count == 0]
    if not wanted:
        return {}
    trial = Trial(work.model, work.example, work.survey.analysis, work.survey.structure)
    with zeros_replaced(work.model):
        trial.run_without(wanted)
    return trial.refused


def _unread(work: Work) -> dict[str, str]:
    """Hidden dimensions read by an op without a linear form, with the reason."""
    runner = work.runner(work.example)
    found: dict[str, str] = {}
    for site in work.sites:
        node = site.contraction.node
        op = op_of(node)
        if op is None or not op.total or node.meta["val"].is_complex():
            runner.advance(runner.graph.contractions[site.number])
            if not site.forms(runner.arguments(site.number)):
                why = f"{site.path} reads it by {node.target} in a way calibration cannot follow"
                found.update(dict.fromkeys(site.names, why))
    return found


def _facts_of_survey(work: Work) -> dict[str, Any]:
    """Facts that must agree on all ranks before statistics are added."""
    survey, structure = work.survey, work.survey.structure
    dimensions = {d.name: [d.kind, d.units, list(d.producers), list(d.consumers)] for d in survey.dimensions}
    return {
        **{f"hidden dimension {name!r}": facts for name, facts in dimensions.items()},
        **{f"the layout of {name!r}": layout for name, layout in structure.tensors.items()},
        "attributes": structure.attributes,
        "weight norms": structure.weight_norms,
        "consumers": [[c.kind, sorted(c.parameters)] for c in survey.analysis.tracker.contractions],
        "what calibration cannot follow": sorted(work.unread),
        "what cannot go entirely": sorted(work.must_stay),
    }


# Widths ---------------------------------------------------------------------------------------------------------
def _widths(work: Work, clock: Stopwatch | None) -> Widths:
    """Choose how many units stay: as `keep` says, or by spending a budget."""
    o, dimensions = work.options, work.survey.dimensions
    if isinstance(o.keep, Budget):
        whole = work.keeping({d.name: d.units for d in prunable(dimensions, o.skip)})
        if o.uniform:
            return Widths(uniform_widths(whole, o.keep), {})
        sample = sample_of(whole)
        found = output_curves(whole, error_curves(whole, sample.fitted), sample)
        counts = budget_widths(whole, found, clock.budget if clock else o.keep)
        if clock and clock.correct(counts):
            with suppress(InputError):  # out of reach: the result says by how much it misses the target
                counts = budget_widths(whole, found, clock.budget)
        return Widths(counts, {}, found, clock.budget.model if clock else None)
    chosen = widths(dimensions, o.keep, o.skip, o.round_to)
    if not o.curves:
        return chosen
    return replace(chosen, found=error_curves(work.keeping(chosen.counts), [work.inputs.first]))


# Plan, apply, verify --------------------------------------------------------------------------------------------
def _plan(work: Work, done: Decisions) -> tuple[Plan, Expected]:
    """Make the plan, and run the masked network that the pruned model must agree with."""
    analysis, structure = work.survey.analysis, work.survey.structure
    with work.team.together("the plan"):
        gained = {}
        for path, number in done.gained.items():
            extent = analysis.extent(analysis.tracker.contractions[number].made[0])
            axes = {0: extent} if names_in(extent) else {}
            gained[f"{path}.bias"] = TensorLayout((len(done.edits.biases[number]),), axes)
        structure = replace(structure, tensors={**structure.tensors, **gained}, biases=tuple(done.gained))
        plan = Plan(done.kept, structure.folding(done.kept, also=[*done.edits.tensors, *gained]))
        net = MaskedNetwork(work.model, analysis, work.graphs, work.example, work.sites, done.edits, done.kept)
        expected = expect(net)
    facts = {f"hidden dimension {name!r}": units for name, units in plan.kept.items()}
    others = {"the layers that gain a bias": plan.structure.biases, "the folded layers": plan.structure.folded}
    alike(work.team, "the plan", lambda: {**facts, **others}, "report this, and prune in one process")
    return plan, expected


def _apply(work: Work, done: Decisions, plan: Plan, undo: Undo) -> None:
    for name, value in done.edits.tensors.items():
        tensor = work.tensors[name]
        new = torch.empty_like(tensor).copy_(value)  # in the same memory format
        set_data(tensor, new, tensor.grad, undo)
    remove_(work.model, plan, undo, work.options.optimizer)
    for path, number in done.gained.items():
        bias = work.model.get_parameter(f"{path}.bias")  # surgery has just put it there
        bias.data = kept_part(f"{path}.bias", done.edits.biases[number], plan).to(bias)


def _verify(work: Work, done: Decisions, plan: Plan, expected: Expected, undo: Undo) -> Evidence:
    """Apply the plan and compare with masking, in float64 if the model's own precision cannot decide."""
    with work.team.together("the surgery"):
        _apply(work, done, plan, undo)
    with work.team.together("the proof"):
        evidence = compared(expected, work.model, plan)
        if not evidence.holds:
            undo.close()
            closer = look_closer(expected)
            if closer is not None:
                _apply(work, done, plan, undo)
                evidence = compared(closer, work.model, plan)
        if not evidence.holds:
            errors = ((name, error) for name, error in evidence.certificates.items() if error is not None)
            guilty = next((name for name, error in errors if not error <= evidence.limit), "unknown")
            raise SurgeryError(
                f"removing units does not equal masking them (relative error {evidence.error:.1e}, hidden dimension "
                f"{guilty!r} first): the model is as it was; pass skip=[{guilty!r}] and report this"
            )
    with work.team.together("the run on a whole batch"):
        if work.inputs.divided is not None:
            check_runs(work.model, work.inputs.divided)
    return evidence


def _heal(work: Work, teacher: nn.Module, undo: Undo) -> HealResult:
    """Train the pruned model towards the dense one. `undo` also restores tensors that surgery did not touch."""
    dense = named_tensors(teacher)

    def restore() -> None:
        with torch.no_grad():
            for name, tensor in named_tensors(work.model).items():
                if name in dense and dense[name].shape == tensor.shape:
                    tensor.copy_(dense[name])

    undo.callback(restore)
    batches, held = [*work.inputs.again()], work.inputs.held_out()
    config = work.options.heal if isinstance(work.options.heal, Heal) else Heal()
    return healed(work.model, teacher, batches, held, config, work.team, progress=work.options.progress)
