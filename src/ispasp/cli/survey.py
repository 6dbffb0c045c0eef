"""`ispasp survey`: what can be removed from a model, and what cannot."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.data import load_sample
from ispasp.cli.models import ModelOptions


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
