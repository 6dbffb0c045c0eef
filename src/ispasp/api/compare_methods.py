"""`ispasp.compare_methods`: one model pruned by several methods, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn

from ispasp.api.evaluation import Evaluate, number
from ispasp.api.prune import prune
from ispasp.api.result import Result
from ispasp.calibrate.batches import Kept, batches_in
from ispasp.errors import InputError
from ispasp.graph.wrappers import unwrapped
from ispasp.report import Column, Sheet, figures, told, track
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
    """Names of what `evaluate` gave; each is a column."""

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
        """A table, then why methods failed."""
        return str(self._sheet())

    def _repr_html_(self) -> str:
        """The same for notebooks."""
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
    given: Iterable[Any] = found if isinstance(found, Sequence) else Kept(found)  # a loader may shuffle
    runs = [(label, method, amount) for label, method in chosen.items() for amount in amounts]
    before: dict[str, Any] = {}
    dense: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    failures: list[Exception] = []
    for label, method, amount in track(runs, "comparing methods", len(runs), show=progress):
        row = {"method": label, "keep": amount if isinstance(amount, (int, float)) else str(amount)}
        start = time.perf_counter()
        try:
            scoring = _scoring(evaluate, before) if evaluate else None
            result = prune(model, given, amount, method=method, evaluate=scoring, progress=False, **options)
            row |= _measured(result)
            dense = dense or _dense(result)
        except Exception as error:  # whatever one method does, the others are compared
            row["failure"] = f"{type(error).__name__}: {error}"
            failures.append(error)
        rows.append({**row, "seconds": time.perf_counter() - start})
    if not dense and len({str(error) for error in failures}) == 1:
        raise failures[0]  # all fail alike: it is not the method
    return _comparison(type(unwrapped(model)).__name__, [dense, *rows] if dense else rows)


def _default(options: Mapping[str, Any]) -> list[str]:
    """All methods that can run: with a loss, those that look at the task too."""
    labelled = set() if options.get("loss") is not None else {"sensitivity", "task"}
    return [name for name in all_methods() if not labelled & set(selector(name).needs)]


def _labelled(methods: Sequence[Any]) -> dict[str, Any]:
    """Methods by what they are called, each name once; an unknown one is an error at once."""
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
    """`evaluate` for one call of `prune`, which scores the dense model first: that is done once for all calls."""
    first = True

    @wraps(evaluate)
    def scored(model: nn.Module) -> Any:
        nonlocal first
        if not first:
            return evaluate(model)
        first = False
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
        "scores": dict(result.scores.after) if result.scores else {},
    }


def _dense(result: Result) -> dict[str, Any]:
    return {
        "method": "dense",
        "keep": 1.0,
        "params": result.cost.dense_params,
        "macs": result.cost.dense_macs,
        "scores": dict(result.scores.before) if result.scores else {},
    }


def _mean(errors: Iterable[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def _comparison(model: str, rows: Sequence[Mapping[str, Any]]) -> Comparison:
    """Rows with the same keys; scores stand behind the other columns, under names of their own."""
    names = dict.fromkeys(name for row in rows for name in row.get("scores", ()))
    columns = {name: f"{name} (score)" if name in _BLANK else name for name in names}
    records = []
    for row in rows:
        scores = row.get("scores", {})
        known = {key: value for key, value in row.items() if key != "scores"}
        records.append({**_BLANK, **known, **{column: scores.get(name) for name, column in columns.items()}})
    return Comparison(model, tuple(records), tuple(columns.values()))
