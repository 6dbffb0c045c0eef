"""The short commands: `ispasp survey`, `ispasp compare` and `ispasp export`."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.data import load_data, load_sample
from ispasp.cli.loaded import Loaded
from ispasp.cli.models import ModelOptions, load_model
from ispasp.errors import InputError


@o.grouped
def survey(
    model: ModelOptions,
    sample: o.Sample,
    scope: o.Scope = "blocks",
    kinds: o.Kinds = o.ALL_KINDS,
    as_json: o.Json = False,
) -> None:
    """Print every hidden dimension of a model, and what is frozen and why. Changes nothing, needs no data."""
    loaded = model.load()
    o.LOG.debug("surveying %s", model.model)
    found = ispasp.survey(loaded.model, load_sample(loaded, sample), scope=scope, kinds=kinds)
    told = {
        "model": model.model,
        "cost": asdict(found.cost()),
        "dimensions": [asdict(row) for row in found.dimensions],
        "frozen": [asdict(row) for row in found.frozen],
    }
    typer.echo(json.dumps(told, indent=2) if as_json else str(found))


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


@o.grouped
def export(
    model: ModelOptions,
    path: Annotated[Path, typer.Argument(help="File to write, such as model.onnx or model.gguf.")],
    sample: o.Sample,
    to: Annotated[
        Literal["onnx", "gguf"] | None, o.option(None, "Format. Default: gguf for a file named .gguf, else onnx.")
    ] = None,
    dtype: Annotated[Literal["f16", "f32"], o.option(None, "Numbers of a GGUF file.")] = "f16",
    static: Annotated[bool, o.option(None, "ONNX for the shapes of the sample only.", "--static")] = False,
    opset: Annotated[int | None, o.option(None, "ONNX opset. Default: the exporter's.", min=1)] = None,
    tolerance: Annotated[
        float | None, o.option(None, "Largest relative error. Default: 1e-4, for f16 2e-2.", show_default=False)
    ] = None,
    force: Annotated[bool, o.option(None, "Overwrite an existing file.", "--force")] = False,
) -> None:
    """Write a model, dense or pruned, as ONNX or GGUF, and check that the file computes the same."""
    kind = to or ("gguf" if path.suffix == ".gguf" else "onnx")
    if path.is_dir():
        raise InputError(f"{path} is a folder: pass a file in it, such as {path / f'model.{kind}'}")
    if path.exists() and not force:
        raise InputError(f"{path} exists: pass another file, or --force to overwrite it")
    o.writable(path.parent, name="")
    loaded = model.load()
    o.warn(loaded.warnings)
    o.LOG.debug("exporting %s", model.model)
    if kind == "gguf":
        told = loaded.tokenizer and (Path(loaded.tokenizer) / "tokenizer.json").is_file()
        if not told:
            o.warn([f"no tokenizer.json beside the model: {path} has no tokenizer."])
        words = loaded.tokenizer if told else None
        error = ispasp.export_gguf(loaded.model, path, tokenizer=words, dtype=dtype, tolerance=tolerance)
    else:
        error = _onnx(loaded, sample, path, opset, 1e-4 if tolerance is None else tolerance, dynamic=not static)
    typer.echo(f"wrote {path} ({path.stat().st_size:,} bytes); its output differs from torch's by {error:.0e}")


def _onnx(loaded: Loaded, sample: o.Sample, path: Path, opset: int | None, tolerance: float, *, dynamic: bool) -> float:
    batch = load_sample(loaded, sample)
    error = ispasp.export_onnx(loaded.model, batch, path, opset=opset, tolerance=tolerance, dynamic=dynamic)
    onnx = importlib.import_module("onnx")
    written = next(s.version for s in onnx.load(path, load_external_data=False).opset_import if not s.domain)
    if opset not in (None, written):
        o.warn([f"the exporter cannot write opset {opset}: {path} has opset {written}."])
    return error
