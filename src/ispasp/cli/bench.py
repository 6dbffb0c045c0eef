"""`ispasp bench`: ratios measured in one run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure the library against its baselines in one run.")


@bench.callback()
def _bench() -> None:
    """Keep `selection` a sub-command while it is the only one."""


@bench.command()
def selection(
    examples: Annotated[int, typer.Option(help="Calibration examples.", min=1)] = 1280,
    reference_examples: Annotated[
        int, typer.Option(help="Examples the reference is timed on; its time is scaled to all of them.", min=1)
    ] = 128,
    iterations: Annotated[int, typer.Option(help="T, iterations of i-SpaSP.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
) -> None:
    """i-SpaSP from first moments against the paper's autodiff procedure, ResNet34 blocks 2 and 15."""
    from ispasp.experiments.bench import selection as experiment

    rows = experiment.run(examples, min(reference_examples, examples), T=iterations, seed=seed)
    typer.echo(json.dumps(experiment.as_json(rows), indent=2) if as_json else experiment.as_table(rows, iterations))
