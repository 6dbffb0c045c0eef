"""`ispasp survey`: what can be removed from a model, and what cannot."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer

import ispasp
from ispasp.api.survey import KINDS
from ispasp.cli import options as o
from ispasp.cli.alive import LOG
from ispasp.cli.checks import some_of
from ispasp.cli.choices import Scope
from ispasp.cli.grouped import grouped


@grouped
def survey(
    model: o.ModelOptions,
    reading: o.ReadingOptions,
    data: o.Data = "random",
    input_size: o.InputSize = "",
    scope: o.Scope = Scope.blocks,
    kinds: o.Kinds = o.ALL_KINDS,
    as_json: o.Json = False,
) -> None:
    """Print every hidden dimension of a model, and what is frozen and why. Changes nothing, needs no data."""
    chosen: dict[str, Any] = {"scope": scope.value, "kinds": some_of("--kinds", kinds, *KINDS)}
    loaded = model.load()
    LOG.debug("surveying %s", model.model)
    batch = o.one_batch(loaded, data, reading.wanted(input_size=input_size))
    found = ispasp.survey(loaded.model, batch, **chosen)
    if not as_json:
        typer.echo(str(found))
        return
    told = {
        "model": model.model,
        "cost": asdict(found.cost()),
        "dimensions": [asdict(row) for row in found.dimensions],
        "frozen": [asdict(row) for row in found.frozen],
    }
    typer.echo(json.dumps(told, indent=2))
