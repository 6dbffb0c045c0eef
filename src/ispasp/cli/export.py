"""`ispasp export`: ONNX, checked with onnxruntime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.data import load_sample
from ispasp.cli.models import ModelOptions
from ispasp.errors import InputError


@o.grouped
def export(
    model: ModelOptions,
    path: Annotated[Path, typer.Argument(help="File to write, such as model.onnx.")],
    sample: o.Sample,
    opset: Annotated[int | None, o.option(None, "ONNX opset. Default: the exporter's.", min=1)] = None,
    tolerance: Annotated[float, o.option(None, "Largest relative error of onnxruntime's output.")] = 1e-4,
    force: Annotated[bool, o.option(None, "Overwrite an existing file.", "--force")] = False,
) -> None:
    """Write a model, dense or pruned, as ONNX, and check that onnxruntime computes the same."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: pass a file in it, such as {path / 'model.onnx'}")
    if path.exists() and not force:
        raise InputError(f"{path} exists: pass another file, or --force to overwrite it")
    o.writable(path.parent, name="")
    loaded = model.load()
    o.warn(loaded.warnings)
    o.LOG.debug("exporting %s", model.model)
    batch = load_sample(loaded, sample)
    error = ispasp.export_onnx(loaded.model, batch, path, opset=opset, tolerance=tolerance)
    onnx = importlib.import_module("onnx")
    written = next(s.version for s in onnx.load(path, load_external_data=False).opset_import if not s.domain)
    if opset not in (None, written):
        o.warn([f"the exporter cannot write opset {opset}: {path} has opset {written}."])
    typer.echo(f"wrote {path} ({path.stat().st_size:,} bytes); onnxruntime differs from torch by {error:.0e}")
