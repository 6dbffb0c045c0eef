"""`ispasp demo`: see it work in a minute."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    keep: Annotated[float, typer.Option(help="Fraction of units that stay in each hidden layer.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of training and pruning.")] = 0,
) -> None:
    """Train a small network on handwritten digits, prune it with three methods, print a table."""
    from ispasp.experiments import demo as experiment

    typer.echo(experiment.as_table(experiment.run(keep, seed), keep))
    if keep >= 0.5:
        typer.echo("At keep >= 0.5 i-SpaSP is Top-K: all units are among the 2s most important.")
