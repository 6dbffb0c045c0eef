"""`ispasp.prune`: calibrate, select, compensate, remove, prove."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from ispasp.api.between import pruned_between
from ispasp.api.budgets import budget_widths, error_curves
from ispasp.api.copying import copied
from ispasp.api.everywhere import ranked_together
from ispasp.api.job import Compensate, Job, Refitted
from ispasp.api.oneshot import collect, compensate_locally
from ispasp.api.proof import Proof
from ispasp.api.recalibrate import recalibrate_
from ispasp.api.result import Layer, Result
from ispasp.api.sequential import sequential
from ispasp.api.survey import KINDS, Survey, survey
from ispasp.api.task import check_loss, with_sensitivities, with_task
from ispasp.api.widths import Widths, check_round, prunable, widths
from ispasp.budget import Budget, Curve
from ispasp.calibrate.batches import InputOf, first_examples, prepared
from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.forms import ALWAYS
from ispasp.calibrate.gradients import Loss
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.team import Team, team
from ispasp.calibrate.traces import Circuits
from ispasp.compensate.solve import RIDGE
from ispasp.errors import InputError, SurgeryError, TraceError
from ispasp.graph.trace import Batch, evaluating, run
from ispasp.integrations.offload import materialised
from ispasp.select import Selector, selector
from ispasp.surgery.remove import Undo, all_or_nothing, remove_, set_data
from ispasp.types import Selection
from ispasp.types.checks import is_integer
from ispasp.types.dimension import FrozenAxis
from ispasp.types.layout import kept_mask, names_in
from ispasp.types.plan import Plan, TensorLayout

Order = Literal["sequential", "oneshot", "global"]


@dataclass(frozen=True)
class Options:
    """All that may be said about pruning beside the model and the data; see `prune`."""

    keep: Any = 0.5
    method: str | Selector = "ispasp"
    compensate: Compensate = "dense"
    order: Order = "sequential"
    kinds: Collection[str] = KINDS
    scope: str = "blocks"
    skip: Collection[str] = ()
    round_to: int | None = None
    input_of: InputOf | None = None
    recalibrate: bool = False
    finetune_between: Callable[[nn.Module], Any] | None = None
    curves: bool = False
    loss: Loss | None = None
    memory: int | None = None
    ridge: float = RIDGE
    refit: Refitted = "consumers"
    timeout: float = 600.0
    optimizer: torch.optim.Optimizer | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.compensate not in (None, "local", "dense"):
            raise InputError(f"compensate={self.compensate!r}: choose None, 'local' or 'dense'")
        if self.order not in ("sequential", "oneshot", "global"):
            raise InputError(f"order={self.order!r}: choose 'sequential' (as the paper), 'oneshot' or 'global'")
        if self.refit not in ("consumers", "all") or (self.refit == "all" and self.compensate != "dense"):
            raise InputError(f"refit={self.refit!r}: choose 'consumers', or 'all' with compensate='dense'")
        if not self.ridge > 0:
            raise InputError(f"ridge={self.ridge!r}: pass a positive number, such as {RIDGE}")
        if self.memory is not None and not self.memory > 0:
            raise InputError(f"memory={self.memory!r}: pass a number of bytes, or None for no limit")
        check_round(self.round_to)
        selector(self.method)

    def described(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        named = ("compensate", "order", "scope", "round_to", "recalibrate", "memory", "ridge", "refit")
        keep = self.keep if isinstance(self.keep, (int, float)) else str(self.keep)
        plain = {name: int(v) if is_integer(v := getattr(self, name)) else v for name in named}  # numpy's numbers too
        return {"method": str(self.method), "keep": keep, **plain}


def prune(model: nn.Module, batches: Iterable[Any], keep: Any = 0.5, **options: Any) -> Result:
    """A smaller copy of a trained model; the model given is not changed.

    `batches`: calibration data without labels, an iterable of Tensor, tuple or dict, passed as model(x), model(*x),
    model(**x); `input_of` picks the input out of what a DataLoader yields, e.g. `lambda batch: batch[0]`.
    `keep`: the fraction or number of units that stay in every hidden dimension, a mapping from name glob to fraction,
    number or units, a budget such as `ispasp.Macs(0.5)`, or a recipe such as `ispasp.recipes["resnet34-2.69G"]`.

    Options, by keyword:
      method       a name from `ispasp.methods()` or a selector such as `ispasp.ISpaSP(iterations=20)`
      compensate   "dense" refits each consumer to what the dense network has there, "local" to what it gave with all
                   units, None leaves weights alone
      order        "sequential": from first to last layer, each seeing the pruned ones; "oneshot": all in the dense
                   network; "global": as one-shot, units of all hidden dimensions ranked together by their scores
      kinds, scope which hidden dimensions, as in `ispasp.survey`; skip: globs of those that stay whole
      round_to     widths become multiples of this, e.g. 8
      recalibrate  estimate BatchNorm statistics anew from the batches afterwards
      finetune_between   called with the model after each hidden dimension, e.g. to train it for an epoch, as the paper
      loss         loss(output, batch), a mean over the batch, for methods that look at the task
      curves       take error-versus-kept curves, `result.curves`, from the first batch (a budget has them anyway)
      memory       bytes that waiting activations may take; beyond, batches are run again for every layer
      refit        "consumers" of what is pruned, or "all" layers from the first pruned one on (slower, a little better)
      ridge        of compensation, relative to the mean variance of the inputs
      timeout      seconds that a machine waits for the others (torch.distributed)
      progress     show a bar

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> result = prune(net, [torch.rand(16, 4)], keep=0.5, progress=False)
    >>> result.model[0], result.layers[0].kept, net[0].out_features
    (Linear(in_features=4, out_features=4, bias=True), 4, 8)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    chosen = Options(keep, **options)  # wrong options are told before a large model is copied
    with torch.inference_mode(False):  # what is made in inference mode could never be trained
        return _prune_(copied(model), batches, chosen)


def prune_(model: nn.Module, batches: Iterable[Any], keep: Any = 0.5, **options: Any) -> Result:
    """Make a model smaller in place; options as in `prune`, and `optimizer` whose state is cut alike.

    On any failure, Ctrl-C included, the model is exactly as before.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> prune_(net, [torch.rand(16, 4)], keep=2, progress=False).model is net, net[0].out_features
    (True, 2)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    with torch.inference_mode(False):
        return _prune_(model, batches, Options(keep, **options))


def _prune_(model: nn.Module, batches: Iterable[Any], options: Options) -> Result:
    if options.finetune_between is not None:
        return pruned_between(model, batches, options, _prune_)
    with materialised(model), _rng_restored(), evaluating(model), team(options.timeout) as ranks:
        return _Run(model, batches, options, ranks).result()


@contextmanager
def _rng_restored() -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


class _Run:
    """One call of `prune_`, step by step."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], options: Options, ranks: Team) -> None:
        self._model = model
        self._options = options
        self._team = ranks
        self._selector = selector(options.method)
        self._curves: dict[str, Curve] = {}
        check_loss(self._selector, options.loss)
        with ranks.together("the survey"):
            self._batches = _Batches(model, batches, options)
            self._survey, self._example = _surveyed(model, self._batches, options)
        self._circuits = Circuits(model, self._survey.analysis, self._example)
        self._unread = self._without_normal_form()

    def result(self) -> Result:
        """Decide, then act."""
        options = self._options
        chosen = self._widths()
        frozen = [FrozenAxis(name, why) for name, why in self._unread.items() if name in chosen.counts]
        job = self._job({name: n for name, n in chosen.counts.items() if name not in self._unread})
        if options.curves and not self._curves:
            self._curves = error_curves(job, [self._batches.first], self._batches.first)
        decided = {name: Selection(kept) for name, kept in chosen.given.items() if name in job.counts}
        self._decide(job, decided)
        self._share(job)
        plan = self._plan(job)
        proof = Proof(job, self._example)
        with all_or_nothing() as undo:
            _write(self._model, job, plan, undo, options.optimizer)
            verified, certificates = self._verified(proof)
            if options.recalibrate:
                recalibrate_(self._model, self._batches.again(), self._team, undo)
        gained = sum(len(self._model.get_parameter(f"{path}.bias")) for path in job.gained)
        cost = self._survey.cost(plan)
        cost = replace(cost, params=cost.params + gained)
        layers = tuple(self._layer(job, name, certificates[name]) for name in job.counts)
        curves = {name: (curve.kept, curve.error) for name, curve in self._curves.items()}
        rows = (*self._survey.frozen, *frozen)
        return Result(self._model, plan, layers, cost, rows, verified, options.described(), curves)

    def _without_normal_form(self) -> dict[str, str]:
        """Hidden dimensions that are read in a way calibration does not understand, with the reason."""
        job = self._job({d.name: d.units for d in self._survey.dimensions})
        passage = Passage(self._circuits.of(self._example), self._example, job.tensors, Edits())
        found: dict[str, str] = {}
        for reader in job.readers:
            if str(reader.contraction.node.target) not in ALWAYS:
                passage.advance(passage.circuit.contractions[reader.number])
                if not reader.forms(passage.arguments(reader.number)):
                    why = (
                        f"{reader.path} reads it by {reader.contraction.node.target} in a way calibration cannot follow"
                    )
                    found.update(dict.fromkeys(reader.names, why))
        return found

    def _job(self, counts: Mapping[str, int]) -> Job:
        o = self._options
        return Job(
            self._model,
            self._survey,
            self._circuits,
            counts,
            self._selector,
            self._team,
            o.compensate,
            o.ridge,
            o.memory,
            o.loss,
            self._batches.pairs,
            o.refit,
            o.progress,
        )

    def _widths(self) -> Widths:
        o = self._options
        if not isinstance(o.keep, Budget):
            return widths(self._survey, o.keep, o.skip, o.round_to)
        names = [d.name for d in prunable(self._survey, o.skip) if d.name not in self._unread]
        job = self._job({d.name: d.units for d in self._survey.dimensions if d.name in names})
        self._curves = error_curves(job, self._batches.again(), self._batches.first)
        return Widths(budget_widths(job, self._curves, o.keep, o.round_to), {})

    def _decide(self, job: Job, decided: dict[str, Selection]) -> None:
        if self._options.order == "sequential":
            sequential(job, self._batches.listed(), decided)
            return
        rest = {name for name in job.counts if name not in decided}
        if rest:
            found = collect(job, self._batches.again(), job.data_needs)
            found = with_sensitivities(job, found, Edits())
            whole = {name: with_task(job, name, found[name], Edits()) for name in job.counts if name in rest}
            if self._options.order == "global":
                decided = {**decided, **ranked_together(job, whole)}
            else:
                decided = {**decided, **{name: job.select(name, statistics) for name, statistics in whole.items()}}
        if job.compensate == "dense":
            sequential(job, self._batches.listed(), decided)
            return
        for name in job.counts:
            job.decide(name, decided[name])
        left = compensate_locally(job, self._batches.again()) if job.compensate == "local" else {}
        measured = replace(job, compensate=None, selections={}, refits={}, progress=False)
        sequential(measured, [self._batches.first], decided)
        for number, why in left.items():
            measured.refits[number] = replace(measured.refits[number], note=f"not compensated: {why}")
        job.refits = {**measured.refits, **job.refits}

    def _share(self, job: Job) -> None:
        """Machines that round otherwise must end with the same weights: rank 0's."""
        tensors = {f"t:{name}": value for name, value in job.edits.tensors.items()}
        tensors |= {f"b:{number}": value for number, value in job.edits.biases.items()}
        for key, value in self._team.same(tensors).items():
            kind, _, name = key.partition(":")
            if kind == "t":
                job.edits.tensors[name] = value
            else:
                job.edits.biases[int(name)] = value

    def _plan(self, job: Job) -> Plan:
        structure = self._survey.structure
        tensors = dict(structure.tensors)
        for path, number in job.gained.items():
            analysis = self._survey.analysis
            (made,) = analysis.tracker.contractions[number].made
            extent = analysis.extent(made)
            axes = {0: extent} if names_in(extent) else {}
            tensors[f"{path}.bias"] = TensorLayout((len(job.edits.biases[number]),), axes)
        return Plan(job.kept, replace(structure, tensors=tensors, biases=tuple(job.gained)))

    def _verified(self, proof: Proof) -> tuple[float, dict[str, float]]:
        with self._team.together("the proof"):
            error, limit, certificates = proof.compare(self._model)
            if not error <= limit:
                guilty = next((name for name, e in certificates.items() if not e <= limit), "unknown")
                raise SurgeryError(
                    f"removing units does not equal masking them (relative error {error:.1e}, hidden dimension "
                    f"{guilty!r} first): the model is as it was; pass skip=[{guilty!r}] and report this"
                )
        return error, certificates

    def _layer(self, job: Job, name: str, certificate: float) -> Layer:
        dimension = next(d for d in self._survey.dimensions if d.name == name)
        selection = job.selections[name]
        error, before = job.errors(name)
        return Layer(
            name,
            dimension.kind,
            dimension.units,
            len(selection.kept),
            selection.iterations,
            error,
            certificate,
            before if job.compensate else None,
            job.notes(name),
        )


class _Batches:
    """The user's batches, as often as they are needed; an iterator can be gone through once, so it is kept."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], options: Options) -> None:
        self._given = list(batches) if isinstance(batches, Iterator) else batches
        self._model = model
        self._input_of = options.input_of
        self._list: list[Batch] | None = None
        self.first: Batch = next(self.again())
        try:
            self.example = _try(model, self.first)
        except Exception as error:
            hint = (
                "" if self._input_of else "; a loader that yields (input, label) needs input_of=lambda batch: batch[0]"
            )
            raise InputError(
                f"the model does not run on the first batch: {type(error).__name__}: {error}{hint}"
            ) from error

    def again(self) -> Iterator[Batch]:
        """From the first batch on."""
        return iter(self._list) if self._list is not None else (batch for batch, _ in self.pairs())

    def pairs(self) -> Iterator[tuple[Batch, Any]]:
        """Each batch as the model takes it, and as it was given."""
        pair = None
        for pair in prepared(self._given, self._model, self._input_of):
            yield pair
        if pair is None:
            raise InputError("no calibration batches: pass at least one; an exhausted iterator counts as none")

    def listed(self) -> Sequence[Batch]:
        """All of them in memory: inputs only, not activations."""
        if self._list is None:
            self._list = list(self.again())
        return self._list


def _try(model: nn.Module, batch: Batch) -> Batch:
    """Run the model on two examples, or on all where it does not take so few; returns what it ran on."""
    small = first_examples(batch)
    if small is not None:
        with suppress(Exception):
            run(model, small)
            return small
    run(model, batch)
    return batch


def _surveyed(model: nn.Module, batches: _Batches, options: Options) -> tuple[Survey, Batch]:
    """Survey on two examples where the model takes them: that is enough to see its structure."""
    if batches.example is not batches.first:
        with suppress(TraceError):
            return survey(model, batches.example, scope=options.scope, kinds=options.kinds), batches.example
    return survey(model, batches.first, scope=options.scope, kinds=options.kinds), batches.first


def _write(model: nn.Module, job: Job, plan: Plan, undo: Undo, optimizer: torch.optim.Optimizer | None) -> None:
    """New weights, then surgery."""
    for name, value in job.edits.tensors.items():
        tensor = job.tensors[name]
        set_data(tensor, value.to(tensor), tensor.grad, undo)
    remove_(model, plan, undo, optimizer)
    for path, number in job.gained.items():
        bias = model.get_submodule(path).bias
        layout = plan.structure.tensors[f"{path}.bias"]
        small = _kept_part(job.edits.biases[number], layout, plan)
        assert isinstance(bias, torch.Tensor)  # noqa: S101  # surgery has just put it there
        bias.data = small.to(bias)


def _kept_part(value: torch.Tensor, layout: TensorLayout, plan: Plan) -> torch.Tensor:
    for axis, extent in layout.axes.items():
        value = value.index_select(axis, torch.nonzero(kept_mask(extent, plan.kept)).flatten().to(value.device))
    return value
