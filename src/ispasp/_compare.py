"""`ispasp.compare`: a dense model beside its pruned version. `ispasp.compare_methods`: one model, several methods."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from ispasp._evaluate import Evaluate, Judge, divergences, first_examples, number
from ispasp._latency import LatencyResult, timed_pair
from ispasp._prune import prune
from ispasp.budget.latency import Latency, Runtime
from ispasp.engine.batches import Replayed, batches_in, first_of, inputs_in, tensors_of
from ispasp.engine.team import Team
from ispasp.errors import InputError, IspaspError, failing_as
from ispasp.files import write_page
from ispasp.graph.analyse import analyse, cost_model
from ispasp.graph.state import one_at_a_time, plain, unwrapped
from ispasp.graph.trace import check_model, evaluating, named_tensors, run_and_restore
from ispasp.report import Column, Printed, Sheet, change, figures, told, track
from ispasp.report.html import comparison
from ispasp.result import Result
from ispasp.select import Selector, methods as all_methods, selector
from ispasp.train.mimic import pair
from ispasp.types.dimension import Cost, distinct

_WORST = 8  # examples that are listed


@dataclass(frozen=True, eq=False)
class Versus(Printed):
    """A dense model beside its pruned version. Print it, show it in a notebook, or write its `report`.

    `agreement` is the fraction of equal predictions, None without classes. `divergence` is the mean over examples of
    the KL divergence of logits, or the relative squared error of other outputs. `worst` maps the number of an example
    to its divergence, `layers` the module that makes a feature to its relative error; `note` says why there are none.
    """

    model: str
    cost: Cost
    bytes: tuple[int, int]
    latency: LatencyResult
    examples: int
    agreement: float | None
    divergence: float
    worst: Mapping[int, float]
    layers: Mapping[str, float]
    note: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """Plain records of totals, then features, then examples: `pandas.DataFrame(compared.rows())`."""
        pairs = {**self._counts(), "milliseconds": (self.latency.dense, self.latency.pruned)}
        blank = dict.fromkeys(("dense", "pruned", "error"))
        rows = [{"what": "total", "name": name, **blank, "dense": a, "pruned": b} for name, (a, b) in pairs.items()]
        rows += [{"what": "layer", "name": name, **blank, "error": e} for name, e in self.layers.items()]
        return rows + [{"what": "example", "name": str(n), **blank, "error": e} for n, e in self.worst.items()]

    def to_json(self) -> str:
        return json.dumps({"format": "ispasp-compare", **asdict(self)})

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML page that opens offline. Returns its path."""
        return write_page(path, comparison(json.loads(self.to_json()), self.latency.advice()))

    def _counts(self) -> dict[str, tuple[int, int]]:
        c = self.cost
        return {"parameters": (c.dense_params, c.params), "bytes": self.bytes, "MACs": (c.dense_macs, c.macs)}

    def _sheet(self) -> Sheet:
        facts = [
            *((name, change(*pair)) for name, pair in self._counts().items()),
            ("latency", str(self.latency)),
            ("agreement", "-" if self.agreement is None else f"{self.agreement:.1%} of predictions"),
            ("divergence", f"{self.divergence:.4g} on {self.examples:,} examples"),
        ]
        rows = [{"name": name, "error": error} for name, error in self.layers.items()]
        columns = [Column("name", "feature after", shorten=True), Column("error", "error", "{:.1%}".format)]
        worst = ", ".join(f"{n} ({e:.3g})" for n, e in self.worst.items())
        told = [("worst examples (divergence)", [worst]), ("no features", [self.note] * bool(self.note))]
        told.append(("advice", self.latency.advice()))
        return Sheet(f"{self.model}: dense and pruned", facts, columns, rows, told)


def compare(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    *,
    batch: int = 1,
    runtime: Runtime = "eager",
    repeats: int = 7,
) -> Versus:
    """Compare a model with its pruned version: size, MACs, latency, predictions, outputs and features on the way.

    `batches` are as in `prune`; at most 256 examples are taken. `batch`, `runtime` and `repeats` are those of
    `ispasp.Latency`. Neither model is changed.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> result = prune(net, [torch.rand(16, 4)], keep=0.5, progress=False)
    >>> found = compare(net, result.model, [torch.rand(16, 4)], runtime=lambda model, batch: 1e-3)
    >>> found.cost.dense_params, found.cost.params, len(found.worst)
    (58, 30, 8)
    """
    for each in (dense, pruned):
        check_model(each)
    how = Latency(1.0, batch=batch, runtime=runtime, repeats=repeats)  # checks them
    with one_at_a_time(), plain(dense) as a, plain(pruned) as b, evaluating(a), evaluating(b):
        taken = first_examples(inputs_in(batches, a))
        outputs = [_pair(a, b, each) for each in taken]
        spread = [d for x, (y, z) in zip(taken, outputs, strict=True) for d in divergences(z, y, x)]
        agreement = Judge(a, taken, taken[0]).agreement(b, Team())
        few = first_of(taken[0], 2)
        costs = [cost_model(analyse(each, few), each, few).cost({}) for each in (a, b)]
        size = [sum(t.nbytes for t in {id(t): t for t in named_tensors(m).values()}.values()) for m in (a, b)]
        timed = timed_pair(a, b, first_of(taken[0], how.batch), runtime, repeats)
        layers, note = _features(a, b, taken[0])
    worst = sorted(range(len(spread)), key=lambda k: -spread[k])[:_WORST]
    cost = replace(costs[1], dense_params=costs[0].params, dense_macs=costs[0].macs)
    outputs_apart = sum(spread) / len(spread), {k: spread[k] for k in worst}
    sizes, examples, name = (size[0], size[1]), len(spread), type(a).__name__
    return Versus(name, cost, sizes, timed, examples, agreement.rate, *outputs_apart, layers, note)


def _pair(dense: nn.Module, pruned: nn.Module, batch: Any) -> tuple[Any, Any]:
    """The outputs of both models, which must have the same shapes."""
    outputs = []
    for name, model in (("dense", dense), ("pruned", pruned)):
        with failing_as(InputError, f"the {name} model does not run on a batch", "pass batches that both models take"):
            outputs.append(run_and_restore(model, batch))
    shapes = [[tuple(t.shape) for t in tensors_of(output)] for output in outputs]
    if shapes[0] != shapes[1]:
        wrong = f"on the same batch the dense one returns shapes {shapes[0][:4]}, the pruned one {shapes[1][:4]}"
        remedy = "pass a model and the one that was pruned from it"
        raise InputError(f"the models do not fit each other: {wrong}; {remedy}")
    return outputs[0], outputs[1]


def _features(dense: nn.Module, pruned: nn.Module, batch: Any) -> tuple[dict[str, float], str]:
    """Relative errors of the features that both models have, or why there are none."""
    try:
        found = pair(pruned, dense, batch).errors(pruned, dense, batch)
        return found, "" if found else "the graphs have no feature of equal shape before the outputs"
    except IspaspError as error:
        return {}, str(error)


# Several methods ------------------------------------------------------------------------------------------------
Method = str | Selector | Callable[..., Any]
_COLUMNS = (
    Column("method", "method", shorten=True),
    Column("keep", "keep", right=True),
    Column("params", "parameters", "{:,}".format, drop=2),
    Column("macs", "MACs", "{:,}".format, drop=1),
    Column("error", "error", "{:.1%}".format, drop=5),
    Column("held_out_error", "held out", "{:.1%}".format, drop=3),
    Column("agreement", "agreement", "{:.1%}".format),
    Column("difference", "outputs differ", "{:.1%}".format, drop=4),
)
_SECONDS = Column("seconds", "seconds", "{:.1f}".format)
_BLANK: Mapping[str, Any] = {**dict.fromkeys((c.key for c in _COLUMNS), None), "seconds": None, "failure": ""}


@dataclass(frozen=True)
class Comparison(Printed):
    """One row for every method and `keep`. Print it, show it in a notebook, or `plot()` it.

    `scores` are the names of those that `evaluate` returned; each is a column.
    """

    model: str
    records: tuple[Mapping[str, Any], ...]
    scores: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Plain records, the dense model first: `pandas.DataFrame(comparison.rows())`.

        `error` and `held_out_error` are means over the pruned layers, `agreement` is the fraction of predictions that
        are the dense model's, `difference` the relative difference of the outputs. `failure` says why a method failed.
        """
        return [dict(row) for row in self.records]

    def plot(self) -> Any:
        """A matplotlib Figure: scores and agreement (or the difference of outputs) against the MACs that stay."""
        rows = self.rows()
        classes = any(row["agreement"] is not None for row in rows)
        last = {"agreement": "agreement with the dense model"} if classes else {"difference": "outputs differ by"}
        return figures.tradeoffs(rows, {**{name: name for name in self.scores}, **last})

    def _sheet(self) -> Sheet:
        rows = self.rows()
        columns = [*_COLUMNS, *(Column(name, name, number) for name in self.scores), _SECONDS]
        columns = [c for c in columns if any(row[c.key] is not None for row in rows)]
        failed = told((f"{row['method']}, keep={row['keep']}", row["failure"]) for row in rows if row["failure"])
        return Sheet(f"{self.model}: methods compared", (), columns, rows, [("failed", failed)])


def compare_methods(
    model: nn.Module,
    batches: Iterable[Any],
    methods: Sequence[Method] | None = None,
    keep: Any = 0.5,
    *,
    evaluate: Evaluate | None = None,
    progress: bool = True,
    **options: Any,
) -> Comparison:
    """Prune a model by several methods and compare. The model is not changed; pruned models are not kept.

    Model and batches are as in `prune`, and all methods get the same batches. `methods`: names, selectors or
    functions; by default all that need no loss. `keep`: one value, or a list of them, each as in `prune`. Other
    options go to `prune`. A method that fails is a row with its `failure`.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = compare_methods(net, [torch.rand(64, 4)], ["l1", "topk"], keep=[0.25, 0.5], progress=False)
    >>> [(row["method"], row["keep"], row["params"]) for row in found.rows()]
    [('dense', 1.0, 58), ('l1', 0.25, 16), ('l1', 0.5, 30), ('topk', 0.25, 16), ('topk', 0.5, 30)]
    """
    if methods is None:  # those that need no loss, or all if there is one
        task = set() if options.get("loss") is not None else {"sensitivity", "task"}
        methods = [name for name in all_methods() if not task & set(selector(name).needs)]
    chosen = _labelled(methods)
    amounts = list(keep) if isinstance(keep, (list, tuple)) else [keep]
    if not chosen or not amounts:
        raise InputError("nothing to compare: pass at least one method and one keep, such as keep=[0.25, 0.5]")
    found = batches_in(batches, model)
    given: Iterable[Any] = found if isinstance(found, Sequence) else Replayed(found)  # a loader may shuffle
    runs = [(label, method, amount) for label, method in chosen.items() for amount in amounts]
    before: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    failures: list[Exception] = []
    for label, method, amount in track(runs, "comparing methods", len(runs), show=progress):
        row: dict[str, Any] = {"method": label, "keep": amount if isinstance(amount, (int, float)) else str(amount)}
        start = time.perf_counter()
        try:
            scoring = _scoring(evaluate, before) if evaluate else None
            result = prune(model, given, amount, method=method, evaluate=scoring, progress=False, **options)
            if len(rows) == len(failures):  # the first that works knows the dense model as well
                counts = {"params": result.cost.dense_params, "macs": result.cost.dense_macs}
                scores = result.scores.before if result.scores else {}
                rows.insert(0, {"method": "dense", "keep": 1.0, **counts, "scores": scores})
            row |= _measured(result)
        except Exception as error:  # compare the others
            row["failure"] = f"{type(error).__name__}: {error}"
            failures.append(error)
        rows.append(row | {"seconds": time.perf_counter() - start})
    if len(rows) == len(failures) and len({str(error) for error in failures}) == 1:
        raise failures[0]  # all fail alike: the method is not to blame
    return _comparison(type(unwrapped(model)).__name__, rows)


def _labelled(methods: Sequence[Any]) -> dict[str, Any]:
    """Methods by distinct names; an unknown one is an error."""
    if isinstance(methods, (str, Selector)) or not isinstance(methods, Sequence):
        raise InputError(f"methods={methods!r}: pass a list, such as ['ispasp', 'l1']")
    found: dict[str, Any] = {}
    for method in methods:
        selector(method)
        called = method if isinstance(method, str) else getattr(method, "__name__", str(method))
        found[distinct(called, found, "{} ({})")] = method
    return found


def _scoring(evaluate: Evaluate, before: dict[str, Any]) -> Evaluate:
    """`evaluate` for one call of `prune`. The dense model, which `prune` scores first, is scored once for all calls."""
    calls = itertools.count()

    @wraps(evaluate)
    def scored(model: nn.Module) -> Any:
        if next(calls):
            return evaluate(model)
        if "dense" not in before:
            before["dense"] = evaluate(model)
        return before["dense"]

    return scored


def _measured(result: Result) -> dict[str, Any]:
    agreement = result.agreement
    return {
        "params": result.cost.params,
        "macs": result.cost.macs,
        "error": _mean(layer.relative_error for layer in result.layers),
        "held_out_error": _mean(layer.held_out_error for layer in result.layers),
        "agreement": agreement.rate if agreement else None,
        "difference": agreement.difference if agreement else None,
        "scores": result.scores.after if result.scores else {},
    }


def _mean(errors: Iterable[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def _comparison(model: str, rows: Sequence[dict[str, Any]]) -> Comparison:
    """Give all rows the same keys, scores last."""
    scores = [row.pop("scores", {}) for row in rows]
    columns = {name: f"{name} (score)" if name in _BLANK else name for each in scores for name in each}
    named = [{column: each.get(name) for name, column in columns.items()} for each in scores]
    records = tuple({**_BLANK, **row, **values} for row, values in zip(rows, named, strict=True))
    return Comparison(model, records, tuple(columns.values()))
