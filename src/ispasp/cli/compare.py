"""`ispasp compare`: a dense model beside its pruned version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.data import load_data
from ispasp.cli.models import ModelOptions, load_model


@o.grouped
def compare(
    model: ModelOptions,
    pruned: Annotated[str, typer.Argument(help="The pruned model: a folder that ispasp prune wrote, or as MODEL.")],
    data: o.Labelled,
    number: Annotated[int, o.option(o.DATA, "Examples, spread over the data; at most 256.", "--examples", min=1)] = 256,
    batch_size: o.BatchSize = 32,
    runtime: Annotated[Literal["eager", "compile", "onnx"], o.option(None, "What latency is measured in.")] = "eager",
    latency_batch: Annotated[int, o.option(None, "Examples in a call whose latency is measured.", min=1)] = 1,
    device: o.Device = "",
    out: Annotated[Path | None, o.option(None, "HTML page to write.")] = None,
    as_json: o.Json = False,
) -> None:
    """Print size, MACs, latency, agreement, divergence, worst examples and errors on the way of two models."""
    dense = model.load(data.seed)
    other = load_model(pruned, dense=model.dense or model.model, seed=data.seed)
    found = load_data(data.data, dense, data)
    o.warn((*dense.warnings, *other.warnings, *found.warnings))
    for each in (dense, other):
        o.move(each.model, device)
    o.LOG.debug("comparing %s and %s", model.model, pruned)
    batches = found.loader(batch_size, numbers=found.some(number))
    told = ispasp.compare(dense.model, other.model, batches, batch=latency_batch, runtime=runtime)
    typer.echo(told.to_json() if as_json else str(told))
    if out is not None:
        typer.echo(f"wrote {told.report(out)}", err=as_json)
