"""`ispasp demo`: see it work in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ispasp.cli.models import check_out


def demo(
    keep: Annotated[float, typer.Option(help="Fraction of units that stay in each hidden layer.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of training and pruning.", min=0, max=2**32 - 1)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the pruned network and report.html.")] = Path("results/demo"),
) -> None:
    """Train a small network on handwritten digits, prune it with every method, print a table, write a report."""
    from ispasp_lab import demo as experiment

    check_out(out, force=True)
    done = experiment.run(keep, seed)
    typer.echo(experiment.as_table(done.rows, keep))
    if keep >= 0.5:
        typer.echo("At keep >= 0.5 i-SpaSP is Top-K: all units are among the 2s most important.")
    report = experiment.write(done, out, f"ispasp demo --keep {keep} --seed {seed}")
    typer.echo(f"the report, to open in a browser: {report}")
