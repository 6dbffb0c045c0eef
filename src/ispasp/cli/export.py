"""`ispasp export`: ONNX, checked with onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.sources import load_model


def export(
    model: o.Model,
    path: Annotated[Path, typer.Argument(help="File to write, such as model.onnx.")],
    weights: o.Weights = "",
    dense: o.Dense = "",
    data: o.Data = "random",
    input_size: o.InputSize = "",
    size: o.ImageSize = None,
    length: o.Length = 128,
    opset: Annotated[int | None, typer.Option(help="ONNX opset. Default: the exporter's.", min=1)] = None,
    tolerance: Annotated[float, typer.Option(help="Largest relative error of onnxruntime's output.")] = 1e-4,
) -> None:
    """Write a model, dense or pruned, as ONNX, and check that onnxruntime computes the same."""
    loaded = load_model(model, weights, dense=dense)
    o.warn(loaded.warnings)
    examples = o.one_batch(loaded, data, input_size, size, length)
    batch = examples.read(examples.some(2))
    error = ispasp.export_onnx(loaded.model, batch, path, opset=opset, tolerance=tolerance)
    typer.echo(f"wrote {path} ({path.stat().st_size:,} bytes); onnxruntime differs from torch by {error:.0e}")
