"""`ispasp prune`: a smaller model, its plan, and a report to open."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import ispasp
from ispasp.api.options import Options
from ispasp.api.survey import KINDS
from ispasp.cli import options as o
from ispasp.cli.amounts import amount, bytes_of, looks_at_the_task, method_of
from ispasp.cli.sources import (
    RESULT,
    Examples,
    Loaded,
    Wanted,
    load_data,
    load_model,
    runs,
    saved_folder,
    sizes,
)
from ispasp.cli.task import input_of, loss
from ispasp.errors import InputError, SaveError
from ispasp.report.html import html, roots
from ispasp.select import selector

_AMOUNT = "How much stays"
_HOW = "How"
_NO_CURVES = "{} looks at the task, so every width would take the loss anew: no curves were taken."


def prune(
    model: o.Model,
    data: o.Data,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Fraction or number of units that stay in every hidden dimension (default 0.5), or GLOB=0.5; may be "
            "repeated, the first glob that fits counts.",
            rich_help_panel=_AMOUNT,
        ),
    ] = None,
    macs: Annotated[str, typer.Option(help="Fraction or number of MACs that stay.", rich_help_panel=_AMOUNT)] = "",
    params: Annotated[str, typer.Option(help="Same for parameters.", rich_help_panel=_AMOUNT)] = "",
    recipe: Annotated[
        str, typer.Option(help=f"A network of the paper: {', '.join(ispasp.recipes)}.", rich_help_panel=_AMOUNT)
    ] = "",
    method: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(ispasp.methods())}; with options as in ispasp:iterations=40,minibatches=true.",
            rich_help_panel=_HOW,
        ),
    ] = "ispasp",
    compensate: Annotated[str, typer.Option(help="dense, local or none.", rich_help_panel=_HOW)] = "dense",
    order: Annotated[str, typer.Option(help="sequential, oneshot or global.", rich_help_panel=_HOW)] = "sequential",
    refit: Annotated[
        str,
        typer.Option(
            help="What compensation refits: consumers of what is pruned, or all layers from there on.",
            rich_help_panel=_HOW,
        ),
    ] = "consumers",
    ridge: Annotated[
        float | None,
        typer.Option(
            help="Of compensation, relative to the variance of its inputs. Default: found on held-out examples.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            help="Bytes that waiting activations may take, such as 500M or 2G; beyond, batches are run again for every "
            "layer. Default: no limit.",
            rich_help_panel=_HOW,
        ),
    ] = "",
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Estimate BatchNorm statistics anew.", rich_help_panel=_HOW)
    ] = False,
    scope: o.Scope = "blocks",
    kinds: o.Kinds = "neuron,filter,head",
    skip: Annotated[
        list[str] | None, typer.Option(help="Glob of what stays whole; may be repeated.", rich_help_panel=o.WHAT)
    ] = None,
    round_to: Annotated[
        int | None, typer.Option(help="Widths become multiples of this, such as 8.", min=1, rich_help_panel=_AMOUNT)
    ] = None,
    weights: o.Weights = "",
    examples: o.ExampleCount = 256,
    batch_size: o.BatchSize = 32,
    size: o.ImageSize = None,
    input_size: o.InputSize = "",
    key: o.Key = "",
    labels: o.Labels = "",
    length: o.Length = 128,
    seed: o.Seed = 0,
    device: o.Device = "",
    out: o.Out = Path("pruned"),
    as_json: o.Json = False,
) -> None:
    """Prune a model with unlabelled data; write the model, plan.json, result.json and report.html."""
    chosen: dict[str, Any] = {
        "keep": amount(keep or (), macs, params, recipe),
        "method": method_of(method),
        "compensate": None if o.one_of("--compensate", compensate, "dense", "local", "none") == "none" else compensate,
        "order": o.one_of("--order", order, "sequential", "oneshot", "global"),
        "refit": o.one_of("--refit", refit, "consumers", "all"),
        "ridge": None if ridge is None else o.finite("--ridge", ridge),
        "memory": bytes_of("--memory", memory) if memory else None,
        "recalibrate": recalibrate,
        "scope": o.one_of("--scope", scope, "blocks", "all"),
        "kinds": o.some_of("--kinds", kinds, *KINDS),
        "skip": skip or (),
        "round_to": round_to,
    }
    Options(**chosen)  # tells what does not go together before anything is loaded
    o.writable(out, model=True)
    if saved_folder(model) is not None:
        raise InputError(f"{model} is pruned already: prune the dense model again with another --keep")
    loaded = load_model(model, weights, seed=seed)
    wanted = Wanted(examples, size, sizes(input_size), key, labels, length, seed)
    found = load_data(data, loaded, wanted)
    runs(loaded, found)
    warnings = (*loaded.warnings, *found.warnings)
    o.warn(warnings)
    result = _pruned(loaded, found, examples, batch_size, device, chosen)
    if not result.layers:
        warnings += ("Nothing was removed: pass a smaller --keep, or fewer --skip.",)
    told = {**json.loads(result.to_json()), "model": model, "command": _command(), "warnings": warnings}
    if looks_at_the_task(chosen["method"]):
        told["no_curves"] = _NO_CURVES.format(method)
    _write(result, told, found, out)
    typer.echo(json.dumps(told, indent=2) if as_json else str(result))
    typer.echo(f"calibrated with {min(examples, found.count):,} of {found.text}", err=as_json)
    o.warn(warnings)
    typer.echo(f"wrote {out / 'report.html'}, plan.json, model.safetensors and {RESULT}", err=as_json)


def _pruned(
    loaded: Loaded, found: Examples, examples: int, batch_size: int, device: str, chosen: dict[str, Any]
) -> ispasp.Result:
    if device == "meta":
        raise InputError("--device meta has no numbers to calibrate with: pass --device cpu")
    try:
        loaded.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--device {device or 'cuda'} cannot be used ({reason}): pass --device cpu") from error
    if "sensitivity" in selector(chosen["method"]).needs:
        found.needed_labels()
    task_method = looks_at_the_task(chosen["method"])  # it has no curves: each point would take the task anew
    labelled = task_method and found.labels is not None
    batches = found.loader(batch_size, numbers=found.some(examples), labelled=labelled)
    task = {"loss": loss, "input_of": input_of} if labelled else {}
    return ispasp.prune_(loaded.model, batches, curves=not task_method, **task, **chosen)


def _write(result: ispasp.Result, told: dict[str, Any], found: Examples, out: Path) -> None:
    ispasp.save(result, out)
    try:
        (out / RESULT).write_text(json.dumps(told, indent=1), encoding="utf-8")
        (out / "report.html").write_text(html(told, roots(result.curves)), encoding="utf-8")
        if found.tokenizer is not None:
            found.tokenizer.save_pretrained(out)
    except OSError as error:
        raise SaveError(f"cannot write to {out}: {error}") from error


def _command() -> str:
    return shlex.join(["ispasp", *sys.argv[1:]])
