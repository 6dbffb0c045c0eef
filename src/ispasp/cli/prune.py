"""`ispasp prune`: a smaller model, its plan, and a report to open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import ispasp
from ispasp.api.options import Options
from ispasp.api.survey import KINDS
from ispasp.cli import checks, choices, pruning
from ispasp.cli import options as o
from ispasp.cli.amounts import amount, bytes_of, looks_at_the_task, method_of
from ispasp.cli.grouped import grouped
from ispasp.cli.scoring import Scorer, scorer
from ispasp.cli.sources import Loaded, Wanted, dense_spec, load_data, runs

_AMOUNT = "How much stays"
_HOW = "How"


@dataclass(frozen=True, kw_only=True)
class AmountOptions:
    """How much stays."""

    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Fraction or number of units that stay in every hidden dimension (default 0.5), or GLOB=0.5; may be "
            "repeated, the first glob that fits counts.",
            rich_help_panel=_AMOUNT,
        ),
    ] = None
    macs: Annotated[str, typer.Option(help="Fraction or number of MACs that stay.", rich_help_panel=_AMOUNT)] = ""
    params: Annotated[str, typer.Option(help="Same for parameters.", rich_help_panel=_AMOUNT)] = ""
    recipe: Annotated[
        str,
        typer.Option(
            help=f"A network of the paper: {', '.join(ispasp.recipes)}.",
            autocompletion=choices.complete_recipe,
            rich_help_panel=_AMOUNT,
        ),
    ] = ""
    round_to: Annotated[
        int | None, typer.Option(help="Widths become multiples of this, such as 8.", min=1, rich_help_panel=_AMOUNT)
    ] = None

    def chosen(self) -> dict[str, Any]:
        """As options of `ispasp.prune`."""
        return {"keep": amount(self.keep or (), self.macs, self.params, self.recipe), "round_to": self.round_to}


@dataclass(frozen=True, kw_only=True)
class HowOptions:
    """How units are chosen and the others refitted."""

    method: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(ispasp.methods())}; with options as in ispasp:iterations=40,minibatches=true.",
            autocompletion=choices.complete_method,
            rich_help_panel=_HOW,
        ),
    ] = "ispasp"
    compensate: Annotated[
        choices.Compensate,
        typer.Option(help="Refit consumers towards the dense network, or layer by layer.", rich_help_panel=_HOW),
    ] = choices.Compensate.dense
    order: Annotated[
        choices.Order,
        typer.Option(
            help="From first to last layer, all in the dense network, or ranked together.", rich_help_panel=_HOW
        ),
    ] = choices.Order.sequential
    refit: Annotated[
        choices.Refit,
        typer.Option(
            help="What compensation refits: consumers of what is pruned, or all layers from there on.",
            rich_help_panel=_HOW,
        ),
    ] = choices.Refit.consumers
    ridge: Annotated[
        float | None,
        typer.Option(
            help="Of compensation, relative to the variance of its inputs. Default: found on held-out examples.",
            rich_help_panel=_HOW,
        ),
    ] = None
    memory: Annotated[
        str,
        typer.Option(
            help="Bytes that waiting activations may take, such as 500M or 2G; beyond, batches are run again for every "
            "layer. Default: no limit.",
            rich_help_panel=_HOW,
        ),
    ] = ""
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Estimate BatchNorm statistics anew.", rich_help_panel=_HOW)
    ] = False
    curves: Annotated[
        bool,
        typer.Option(
            "--curves/--no-curves", help="Predict the error at other widths, for the report.", rich_help_panel=_HOW
        ),
    ] = True

    def chosen(self) -> dict[str, Any]:
        """As options of `ispasp.prune`."""
        return {
            "method": method_of(self.method),
            "compensate": None if self.compensate is choices.Compensate.none else self.compensate.value,
            "order": self.order.value,
            "refit": self.refit.value,
            "ridge": None if self.ridge is None else checks.finite("--ridge", self.ridge),
            "memory": bytes_of("--memory", self.memory) if self.memory else None,
            "recalibrate": self.recalibrate,
        }

    def without_curves(self) -> str:
        """Why there are no curves; empty if there are."""
        if looks_at_the_task(method_of(self.method)):
            return f"{self.method} looks at the task, so every width would take the loss anew: no curves were taken."
        return "" if self.curves else "No curves were taken: --no-curves was passed."


@dataclass(frozen=True, kw_only=True)
class WhatOptions:
    """Which hidden dimensions."""

    scope: o.Scope = choices.Scope.blocks
    kinds: o.Kinds = o.ALL_KINDS
    skip: Annotated[
        list[str] | None, typer.Option(help="Glob of what stays whole; may be repeated.", rich_help_panel=o.WHAT)
    ] = None

    def chosen(self) -> dict[str, Any]:
        """As options of `ispasp.prune`."""
        kinds = checks.some_of("--kinds", self.kinds, *KINDS)
        return {"scope": self.scope.value, "kinds": kinds, "skip": tuple(self.skip or ())}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What to calibrate with, and what to judge with."""

    data: o.Data
    examples: o.ExampleCount = 256
    batch_size: o.BatchSize = 32
    input_size: o.InputSize = ""
    labels: o.Labels = ""
    val: Annotated[
        str,
        typer.Option(
            help="Data to score on before and after, as --data: top-1 accuracy of classifiers (with labels), "
            "perplexity of causal language models (text).",
            rich_help_panel=o.DATA,
        ),
    ] = ""
    val_examples: Annotated[
        int | None, typer.Option(help="Examples of --val, spread over it. Default: all.", min=1, rich_help_panel=o.DATA)
    ] = None

    def scorer(self, loaded: Loaded, wanted: Wanted) -> Scorer | None:
        """What scores the model on --val, if that is given."""
        if not self.val:
            return None
        held = load_data(self.val, loaded, wanted)
        return scorer(loaded, held, self.batch_size, examples=self.val_examples)


@grouped
def prune(
    model: o.ModelOptions,
    data: DataOptions,
    amounts: AmountOptions,
    how: HowOptions,
    what: WhatOptions,
    reading: o.ReadingOptions,
    seed: o.Seed = 0,
    device: o.Device = "",
    out: o.Out = Path("pruned"),
    force: o.Force = False,
    as_json: o.Json = False,
) -> None:
    """Prune a model with unlabelled data; write the model, plan.json, result.json and report.html."""
    chosen = {**amounts.chosen(), **how.chosen(), **what.chosen()}
    Options(**chosen)  # tells what does not go together before anything is loaded
    wanted = reading.wanted(data.examples, input_size=data.input_size, labels=data.labels, seed=seed)
    checks.writable(out, model=True, force=force)
    loaded = model.load(seed)
    found = load_data(data.data, loaded, wanted)
    found = pruning.with_labels(loaded, found, chosen["method"], runs(loaded, found))
    job = pruning.Job(loaded, found, chosen, data.examples, data.batch_size, data.scorer(loaded, wanted))
    checks.warn((*loaded.warnings, *found.warnings))
    without = how.without_curves()
    result = job.run(device, curves=not without)
    typed = {
        "model": dense_spec(model.model, model.dense),
        "weights": model.weights,
        "data": data.data,
        "val": data.val,
        "seed": seed,
    }
    told = pruning.described(job, result, typed, without)
    pruning.write(result, told, found, out)
    pruning.tell(job, result, told, out, as_json=as_json)
