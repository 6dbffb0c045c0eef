"""`ispasp survey`: what can be removed from a model, and what cannot."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.sources import load_model


def survey(
    model: o.Model,
    weights: o.Weights = "",
    dense: o.Dense = "",
    data: o.Data = "random",
    input_size: o.InputSize = "",
    size: o.ImageSize = None,
    length: o.Length = 128,
    scope: o.Scope = "blocks",
    kinds: o.Kinds = "neuron,filter,head",
    as_json: o.Json = False,
) -> None:
    """Print every hidden dimension of a model, and what is frozen and why. Changes nothing, needs no data."""
    loaded = load_model(model, weights, dense=dense)
    examples = o.one_batch(loaded, data, input_size, size, length)
    found = ispasp.survey(loaded.model, examples.read(examples.some(2)), scope=scope, kinds=o.listed(kinds))
    if not as_json:
        typer.echo(str(found))
        return
    told = {
        "model": model,
        "cost": asdict(found.cost()),
        "dimensions": [asdict(row) for row in found.dimensions],
        "frozen": [asdict(row) for row in found.frozen],
    }
    typer.echo(json.dumps(told, indent=2))
