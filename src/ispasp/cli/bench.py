"""`ispasp bench`: ratios measured in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure the library against its baselines in one run.")


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


@bench.command()
def coverage(
    group: Annotated[
        list[str] | None, typer.Option(help="plain, torchvision, timm or transformers; may be repeated. Default: all.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only networks whose name starts so, e.g. resnet.")] = "",
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, e.g. docs/coverage.md.")] = None,
    keep: Annotated[float, typer.Option(help="Fraction of units to keep.")] = 0.5,
    limit: Annotated[int, typer.Option(help="Seconds for one network.", min=1)] = 120,
    workers: Annotated[int, typer.Option(help="Processes, of one thread each.", min=1)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
) -> None:
    """Survey and prune every network of the zoo, and compare removal with masking."""
    from ispasp.experiments.zoo import coverage as experiment

    rows = experiment.run(group or (), only, keep=keep, limit=limit, workers=workers)
    if out is not None:
        experiment.write(rows, out, keep)
    if as_json:
        typer.echo(json.dumps(experiment.as_json(rows), indent=2))
    elif out is not None:
        typer.echo(f"{experiment.summary(rows)}\nwrote {out}")
    else:
        typer.echo(experiment.as_markdown(rows, keep))


@bench.command()
def surgery(
    model: Annotated[
        list[str] | None, typer.Option(help="resnet50, mobilenet_v2 or bert_base; may be repeated. Default: all.")
    ] = None,
    keep: Annotated[float, typer.Option(help="Fraction of units to keep.")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
) -> None:
    """Time and memory of survey and surgery, side by side with torch-pruning where that is installed."""
    from ispasp.experiments.bench import surgery as experiment

    rows = experiment.run(model or tuple(experiment.NETWORKS), keep)
    typer.echo(json.dumps(experiment.as_json(rows), indent=2) if as_json else experiment.as_table(rows, keep))


@bench.command()
def recipes(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False) -> None:
    """What the paper's recipes yield beside what it prints, with the other readings of its text."""
    from ispasp.experiments.bench import recipes as experiment

    rows = experiment.run()
    typer.echo(json.dumps(experiment.as_json(rows), indent=2) if as_json else experiment.as_table(rows))
