"""`ispasp evaluate`: how good a model is, dense or pruned."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ispasp.cli import options as o
from ispasp.cli.alive import LOG
from ispasp.cli.checks import warn
from ispasp.cli.grouped import grouped
from ispasp.cli.pruning import move
from ispasp.cli.scoring import scorer
from ispasp.cli.sources import load_data


@grouped
def evaluate(
    model: o.ModelOptions,
    data: Annotated[
        str,
        typer.Option(
            help="Data with labels (image folder with one sub-folder per class, .npz, table, hf-dataset:NAME), or a "
            "text file for a causal language model.",
            rich_help_panel=o.DATA,
        ),
    ],
    reading: o.ReadingOptions,
    examples: Annotated[
        int | None, typer.Option(help="Examples, spread over the data. Default: all.", min=1, rich_help_panel=o.DATA)
    ] = None,
    batch_size: o.BatchSize = 32,
    labels: o.Labels = "",
    seed: o.Seed = 0,
    device: o.Device = "",
    as_json: o.Json = False,
) -> None:
    """Print a model's score: top-1 accuracy of a classifier, perplexity of a causal language model."""
    wanted = reading.wanted(labels=labels, seed=seed)
    loaded = model.load(seed)
    found = load_data(data, loaded, wanted)
    LOG.debug("scoring %s on %s", loaded.spec, found.text)
    judge = scorer(loaded, found, batch_size, examples=examples)
    warn((*loaded.warnings, *found.warnings))
    move(loaded, device)
    scores = judge(loaded.model)
    if as_json:
        prepare = found.preprocessing.to_dict() if found.preprocessing else None
        told = {"model": model.model, "data": data, "scored_on": judge.text, "preprocessing": prepare, "scores": scores}
        typer.echo(json.dumps(told, indent=2))
        return
    shown = f"{100 * scores['accuracy']:.2f} %" if judge.name == "accuracy" else f"{scores[judge.name]:.2f}"
    typer.echo(f"{judge.name} {shown} on {judge.text}")
    if found.preprocessing is not None:
        typer.echo(f"images: {found.preprocessing}")
