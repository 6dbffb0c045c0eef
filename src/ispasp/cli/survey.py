"""`ispasp survey`: what can be removed from a model, and what cannot."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

import ispasp
from ispasp.api.survey import KINDS
from ispasp.cli import options as o
from ispasp.cli.sources import load_model


def survey(
    model: o.Model,
    weights: o.Weights = "",
    dense: o.Dense = "",
    data: o.Data = "random",
    input_size: o.InputSize = "",
    size: o.ImageSize = None,
    key: o.Key = "",
    length: o.Length = 128,
    scope: o.Scope = "blocks",
    kinds: o.Kinds = "neuron,filter,head",
    as_json: o.Json = False,
) -> None:
    """Print every hidden dimension of a model, and what is frozen and why. Changes nothing, needs no data."""
    o.one_of("--scope", scope, "blocks", "all")
    chosen = o.some_of("--kinds", kinds, *KINDS)
    loaded = load_model(model, weights, dense=dense)
    batch = o.one_batch(loaded, data, o.wanted(input_size, size, key, length))
    found = ispasp.survey(loaded.model, batch, scope=scope, kinds=chosen)
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
