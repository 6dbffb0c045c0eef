"""`ispasp.prune`: calibrate, select, compensate, remove, prove."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ispasp.api.between import pruned_between
from ispasp.api.copying import copied
from ispasp.api.evaluation import Evaluate
from ispasp.api.job import Compensate, Refitted
from ispasp.api.names import suggest_names
from ispasp.api.options import Options, Order, options_for, positive
from ispasp.api.result import Result
from ispasp.api.run import Run
from ispasp.api.survey import KINDS, Kinds, Scope
from ispasp.api.widths import Keep
from ispasp.calibrate.alike import SAME_OPTIONS, alike
from ispasp.calibrate.batches import InputOf
from ispasp.calibrate.gradients import Loss
from ispasp.calibrate.limit import Limit
from ispasp.calibrate.team import Team, team
from ispasp.graph.process import one_at_a_time
from ispasp.graph.trace import check_model, evaluating
from ispasp.graph.wrappers import plain
from ispasp.integrations.offload import materialised
from ispasp.select import Score, Selector
from ispasp.surgery.fold import folding


@suggest_names
def prune(
    model: nn.Module,
    batches: Iterable[Any],
    keep: Keep = 0.5,
    *,
    method: str | Selector | Score = "ispasp",
    compensate: Compensate = "dense",
    order: Order = "sequential",
    kinds: Kinds = KINDS,
    scope: Scope = "blocks",
    skip: str | nn.Module | Collection[str | nn.Module] = (),
    round_to: int | None = None,
    input_of: InputOf | None = None,
    examples: Limit = "auto",
    recalibrate: bool = False,
    finetune_between: Callable[[nn.Module], Any] | None = None,
    curves: bool = False,
    loss: Loss | None = None,
    memory: int | None = None,
    ridge: float | None = None,
    refit: Refitted = "consumers",
    evaluate: Evaluate | None = None,
    hold_out: bool = True,
    timeout: float = 600.0,
    progress: bool = True,
) -> Result:
    """A smaller copy of a trained model; the model given is not changed.

    A model inside `torch.compile`, DataParallel or DistributedDataParallel is unwrapped: `result.model` is plain.

    `batches`: calibration data, a DataLoader, a list or generator of batches, or one batch. A batch is a Tensor for
    model(x), a tuple or list for model(*x), a dict or other mapping for model(**x). Labels are not needed: those in
    (inputs, labels) and in a dict with "labels" or "label" are left out. `input_of=lambda batch: ...` picks the inputs
    out of anything else.
    `keep`: the fraction or number of units that stay in every hidden dimension, a mapping from name glob to fraction,
    number or units, a budget such as `ispasp.Macs(0.5)`, a recipe such as `ispasp.recipes["resnet34-2.69G"]`, a plan.

    Options, by keyword:
      method       a name from `ispasp.methods()`, a selector such as `ispasp.select.ISpaSP(iterations=20)`, or a
                   function: statistics of a hidden dimension -> a score per unit; the units with the largest stay
      compensate   "dense" refits each consumer to what the dense network has there, "local" to what it gave with all
                   units, None leaves weights alone (but for the scale that `thinet` has of its own)
      order        "sequential": from first to last layer, each seeing the pruned ones; "oneshot": all in the dense
                   network; "global": as one-shot, units of all hidden dimensions ranked together by their scores
      kinds, scope which hidden dimensions, as in `ispasp.survey`
      skip         hidden dimensions that stay whole: names, globs, or modules that make them
      examples     how many are taken of the batches, by each process, None for all. "auto": 1,024, and fewer where
                   examples are large (65,536 tokens, or 256 images of 3 x 224 x 224): beyond that little is gained, at
                   a cost that grows
      round_to     widths become multiples of this, e.g. 8
      recalibrate  estimate BatchNorm statistics anew from the batches afterwards
      finetune_between   called with the model after each hidden dimension, e.g. to train it for an epoch, as the paper
      loss         loss(output, batch), a mean over the batch, for methods that look at the task; or, with batches
                   (inputs, labels), a loss of output and labels such as nn.CrossEntropyLoss()
      curves       take error-versus-kept curves, `result.curves`, from the first batch (a budget has them anyway)
      evaluate     called with the model before and after, e.g. `lambda model: accuracy(model, loader)`; what it returns
                   (a number, or a dict of them) is in `result.scores`
      hold_out     keep about the last eighth of 32 or more examples out of calibration, to judge the pruned model by
      memory       bytes that waiting activations may take; beyond, batches are run again for every layer
      refit        "consumers" of what is pruned, or "all" layers from the first pruned one on (slower, a little better)
      ridge        of compensation, relative to the mean variance of the inputs; None takes for each consumer the one
                   that does best on held-out examples, which are half of every batch
      timeout      seconds that a machine waits for the others (torch.distributed)
      progress     show a bar

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> result = prune(net, [torch.rand(16, 4)], keep=0.5, progress=False)
    >>> result.model[0], result.layers[0].kept, net[0].out_features
    (Linear(in_features=4, out_features=4, bias=True), 4, 8)
    """
    return _started(locals(), copy=True)


@suggest_names
def prune_(
    model: nn.Module,
    batches: Iterable[Any],
    keep: Keep = 0.5,
    *,
    method: str | Selector | Score = "ispasp",
    compensate: Compensate = "dense",
    order: Order = "sequential",
    kinds: Kinds = KINDS,
    scope: Scope = "blocks",
    skip: str | nn.Module | Collection[str | nn.Module] = (),
    round_to: int | None = None,
    input_of: InputOf | None = None,
    examples: Limit = "auto",
    recalibrate: bool = False,
    finetune_between: Callable[[nn.Module], Any] | None = None,
    curves: bool = False,
    loss: Loss | None = None,
    memory: int | None = None,
    ridge: float | None = None,
    refit: Refitted = "consumers",
    evaluate: Evaluate | None = None,
    hold_out: bool = True,
    timeout: float = 600.0,
    optimizer: torch.optim.Optimizer | None = None,
    progress: bool = True,
) -> Result:
    """Make a model smaller in place; options as in `prune`, and `optimizer`, whose state is cut alike.

    On any failure, Ctrl-C included, the model is exactly as before. Inside a wrapper the plain model is changed: what
    `torch.compile` returned compiles itself again when it is called. Wrap in DistributedDataParallel again to train.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> prune_(net, [torch.rand(16, 4)], keep=2, progress=False).model is net, net[0].out_features
    (True, 2)
    """
    return _started(locals(), copy=False)


def _started(arguments: dict[str, Any], *, copy: bool) -> Result:
    """What is wrong on one machine is an error on all of them, from the options on."""
    model, batches = arguments.pop("model"), arguments.pop("batches")
    with torch.inference_mode(False), team(_timeout(arguments)) as ranks:  # inference tensors could never be trained
        with ranks.together("the check of the arguments"):
            check_model(model)
            with one_at_a_time(), plain(model) as inner:  # no other thread has fake tensors in this very model now
                chosen = options_for(inner, arguments)  # wrong options are told before a large model is copied
                model = copied(inner) if copy else model
        alike(ranks, "the options of prune", chosen.deciding, SAME_OPTIONS)
        with plain(model) as inner:
            return _prune_(inner, batches, chosen, ranks)


def _timeout(arguments: Mapping[str, Any]) -> float:
    """Needed before the options are checked, since ranks must meet to hear that some are wrong."""
    given = arguments["timeout"]
    return float(given) if positive(given) else Options.timeout


def _prune_(model: nn.Module, batches: Iterable[Any], options: Options, ranks: Team) -> Result:
    if options.finetune_between is not None:
        return pruned_between(model, batches, options, ranks, _prune_)
    with one_at_a_time(), ExitStack() as stack:
        with ranks.together("the loading of offloaded weights"):
            stack.enter_context(materialised(model))
        stack.enter_context(evaluating(model))
        layers = stack.enter_context(folding(model))
        return Run(model, batches, options, ranks, layers).result()
