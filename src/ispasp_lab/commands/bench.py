"""`ispasp bench`: ratios measured in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure the library against its baselines in one run.")

Json = Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")]
Batch = Annotated[int, typer.Option(help="Images in one batch.", min=1)]
Images = Annotated[int, typer.Option(help="Calibration images, without labels.", min=1)]
Part = Annotated[int, typer.Option(help="The reference is timed on so many; its time is scaled to all.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of weights and data.")]
Draw = Annotated[int, typer.Option(help="Seed of which images are taken.")]
Iterations = Annotated[int, typer.Option(help="T, iterations of i-SpaSP.", min=1)]
Repeats = Annotated[int, typer.Option(help="Rounds of interleaved runs; medians are shown.", min=1)]
Methods = Annotated[str, typer.Option(help="Names from ispasp.methods(), with commas between them.")]


def _show(experiment: Any, rows: list[Any], as_json: bool, *settings: Any) -> None:
    """Print rows as JSON or as a table, whose note tells the settings."""
    typer.echo(json.dumps(experiment.as_json(rows), indent=2) if as_json else experiment.as_table(rows, *settings))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@bench.command()
def selection(
    examples: Annotated[int, typer.Option(help="Calibration examples.", min=1)] = 1280,
    reference_examples: Part = 128,
    iterations: Iterations = 20,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """i-SpaSP from first moments against the paper's autodiff procedure, ResNet34 blocks 2 and 15."""
    from ispasp_lab.benchmarks import selection as experiment

    rows = experiment.run(examples, min(reference_examples, examples), T=iterations, seed=seed)
    _show(experiment, rows, as_json, iterations)


@bench.command()
def methods(
    names: Annotated[str, typer.Option("--methods", help="With commas between them. Default: all but gfs.")] = "",
    keep: Annotated[float, typer.Option(help="Fraction of units to keep.")] = 0.4,
    repeats: Repeats = 3,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """How long each method takes to choose, once the statistics are there."""
    from ispasp_lab.benchmarks import methods as experiment

    rows = experiment.run(_names(names), keep, repeats, seed)
    _show(experiment, rows, as_json, keep, repeats)


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
    as_json: Json = False,
) -> None:
    """Survey and prune every network of the zoo, and compare removal with masking."""
    from ispasp_lab.zoo import coverage as experiment

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
    as_json: Json = False,
) -> None:
    """Time and memory of survey and surgery, side by side with torch-pruning where that is installed."""
    from ispasp_lab.benchmarks import surgery as experiment

    rows = experiment.run(model or tuple(experiment.NETWORKS), keep)
    _show(experiment, rows, as_json, keep)


@bench.command()
def recipes(as_json: Json = False) -> None:
    """What the paper's recipes yield beside what it prints, with the other readings of its text."""
    from ispasp_lab.benchmarks import recipes as experiment

    rows = experiment.run()
    _show(experiment, rows, as_json)


@bench.command()
def prune(
    images: Images = 128,
    batch: Batch = 16,
    repeats: Repeats = 3,
    iterations: Iterations = 20,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Sequential pruning of ResNet34 by the 2.69 G recipe against one dense forward pass over the same images."""
    from ispasp_lab.benchmarks import prune as experiment

    rows = experiment.run(images, batch, repeats, iterations, seed)
    _show(experiment, rows, as_json, images, batch, iterations)


@bench.command()
def paper(
    images: Images = 128,
    reference_images: Part = 16,
    batch: Batch = 16,
    repeats: Repeats = 3,
    iterations: Iterations = 20,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """The same job by the paper's procedure: autodiff importance, and the network run again for every block."""
    from ispasp_lab.benchmarks import paper as experiment

    rows = experiment.run(images, min(reference_images, images), batch, repeats, iterations, seed)
    _show(experiment, rows, as_json, iterations)


@bench.command()
def memory(
    batches: Annotated[list[int] | None, typer.Option(help="How many; may be repeated. Default: 4 and 64.")] = None,
    batch: Batch = 16,
    size: Annotated[int, typer.Option(help="Height and width of the images.", min=32)] = 64,
    as_json: Json = False,
) -> None:
    """Peak memory of one-shot pruning with few and many batches, each in a process of its own."""
    from ispasp_lab.benchmarks import memory as experiment

    _show(experiment, experiment.run(batches or (4, 64), batch, size), as_json, batch, size)


@bench.command()
def cifar(
    images: Images = 1280,
    test: Annotated[int, typer.Option(help="Test images.", min=1)] = 10_000,
    keep: Annotated[float, typer.Option(help="Fraction of the units of every block to keep.")] = 0.5,
    methods: Methods = "ispasp,l1",
    network: Annotated[str, typer.Option(help="resnet20 or resnet56.")] = "resnet56",
    batch: Batch = 128,
    seed: Draw = 0,
    as_json: Json = False,
) -> None:
    """CIFAR-10 ResNet56 pruned with and without compensation, no fine-tuning. Needs ISPASP_DATA."""
    from ispasp_lab.benchmarks import cifar as experiment

    rows = experiment.run(images, test, keep, _names(methods), network=network, batch=batch, seed=seed)
    _show(experiment, rows, as_json, images, test, keep, network)


@bench.command()
def mobilenet(
    images: Images = 1000,
    test: Annotated[int, typer.Option(help="Validation images.", min=1)] = 1000,
    methods: Methods = "ispasp,l1",
    batch: Batch = 50,
    seed: Draw = 0,
    as_json: Json = False,
) -> None:
    """MobileNetV2 with its ImageNet weights by the 260 M recipe, no fine-tuning. Needs ISPASP_DATA."""
    from ispasp_lab.benchmarks import mobilenet as experiment

    rows = experiment.run(images, test, _names(methods), batch=batch, seed=seed)
    _show(experiment, rows, as_json, images, test)
