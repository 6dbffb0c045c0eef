"""`ispasp reproduce`: the paper's experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

reproduce = typer.Typer(no_args_is_help=True, help="Run the paper's experiments.")


@reproduce.callback()
def _reproduce() -> None:
    """Keep `synthetic` a sub-command while it is the only one."""


@reproduce.command()
def synthetic(
    out: Annotated[Path, typer.Option(help="Folder for synthetic.csv, .png and .md.")] = Path("results"),
    matrices: Annotated[int, typer.Option(help="Random matrices per setting (paper: 3).", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
) -> None:
    """Error against size on hidden representations of known decay (Section 6.1, Appendix A.1)."""
    from ispasp.experiments import synthetic as experiment

    points = experiment.run(matrices=matrices, seed=seed)
    paths = experiment.write(points, out)
    typer.echo(experiment.summary(points))
    typer.echo("wrote " + ", ".join(map(str, paths)))
