"""`ispasp.compare_methods`: one model pruned by several methods, side by side."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn

from ispasp._evaluate import Evaluate, number
from ispasp._prune import prune
from ispasp.engine.batches import Replayed, batches_in
from ispasp.errors import InputError
from ispasp.graph.state import unwrapped
from ispasp.report import Column, Sheet, figures, told, track
from ispasp.result import Result
from ispasp.select import Selector, selector
from ispasp.select import methods as all_methods

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
class Comparison:
    """One row for every method and `keep`. Print it, show it in a notebook, or `plot()` it."""

    model: str
    records: tuple[Mapping[str, Any], ...]
    scores: tuple[str, ...] = ()
    """Names of the scores that `evaluate` returned; each is a column."""

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

    def __str__(self) -> str:
        return str(self._sheet())

    def _repr_html_(self) -> str:
        return self._sheet().html()

    def _sheet(self) -> Sheet:
        rows = self.rows()
        columns = [*_COLUMNS, *(Column(name, name, number) for name in self.scores), _SECONDS]
        columns = [c for c in columns if any(row[c.key] is not None for row in rows)]
        failed = told((f"{row['method']}, keep={row['keep']}", row["failure"]) for row in rows if row["failure"])
        return Sheet(f"{self.model}: methods compared", (), columns, rows, [("failed", failed)] if failed else ())


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
    chosen = _labelled(_default(options) if methods is None else methods)
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
                rows.insert(0, _dense(result))
            row |= _measured(result)
        except Exception as error:  # compare the others
            row["failure"] = f"{type(error).__name__}: {error}"
            failures.append(error)
        rows.append(row | {"seconds": time.perf_counter() - start})
    if len(rows) == len(failures) and len({str(error) for error in failures}) == 1:
        raise failures[0]  # all fail alike: the method is not to blame
    return _comparison(type(unwrapped(model)).__name__, rows)


def _default(options: Mapping[str, Any]) -> list[str]:
    """All methods; without a loss, those that need none."""
    labelled = set() if options.get("loss") is not None else {"sensitivity", "task"}
    return [name for name in all_methods() if not labelled & set(selector(name).needs)]


def _labelled(methods: Sequence[Any]) -> dict[str, Any]:
    """Methods by distinct names; an unknown one is an error."""
    if isinstance(methods, (str, Selector)) or not isinstance(methods, Sequence):
        raise InputError(f"methods={methods!r}: pass a list, such as ['ispasp', 'l1']")
    found: dict[str, Any] = {}
    for method in methods:
        selector(method)
        called = method if isinstance(method, str) else getattr(method, "__name__", str(method))
        label, number = called, 2
        while label in found:
            label, number = f"{called} ({number})", number + 1
        found[label] = method
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


def _dense(result: Result) -> dict[str, Any]:
    scores = result.scores.before if result.scores else {}
    counts = {"params": result.cost.dense_params, "macs": result.cost.dense_macs}
    return {"method": "dense", "keep": 1.0, **counts, "scores": scores}


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
