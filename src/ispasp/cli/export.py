"""`ispasp export`: ONNX, checked with onnxruntime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.alive import LOG
from ispasp.cli.checks import warn, writable
from ispasp.cli.grouped import grouped
from ispasp.errors import InputError


@grouped
def export(
    model: o.ModelOptions,
    path: Annotated[Path, typer.Argument(help="File to write, such as model.onnx.")],
    reading: o.ReadingOptions,
    data: o.Data = "random",
    input_size: o.InputSize = "",
    opset: Annotated[int | None, typer.Option(help="ONNX opset. Default: the exporter's.", min=1)] = None,
    tolerance: Annotated[float, typer.Option(help="Largest relative error of onnxruntime's output.")] = 1e-4,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write a model, dense or pruned, as ONNX, and check that onnxruntime computes the same."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: pass a file in it, such as {path / 'model.onnx'}")
    if path.exists() and not force:
        raise InputError(f"{path} exists: pass another file, or --force to write over it")
    writable(path.parent, option="")
    loaded = model.load()
    warn(loaded.warnings)
    LOG.debug("exporting %s", model.model)
    batch = o.one_batch(loaded, data, reading.wanted(input_size=input_size))
    error = ispasp.export_onnx(loaded.model, batch, path, opset=opset, tolerance=tolerance)
    _check_opset(path, opset)
    typer.echo(f"wrote {path} ({path.stat().st_size:,} bytes); onnxruntime differs from torch by {error:.0e}")


def _check_opset(path: Path, wanted: int | None) -> None:
    """The exporter takes another opset where it cannot write the one asked for, and does not say so."""
    onnx = importlib.import_module("onnx")
    written = next(s.version for s in onnx.load(path, load_external_data=False).opset_import if not s.domain)
    if wanted is not None and written != wanted:
        warn([f"the exporter cannot write opset {wanted}: {path} has opset {written}."])
