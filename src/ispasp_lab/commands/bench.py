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
Part = Annotated[int, typer.Option(help="Examples that the reference is timed on; its time is scaled to all.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of weights and data.")]
Draw = Annotated[int, typer.Option(help="Seed of which images are taken.")]
Iterations = Annotated[int, typer.Option(help="T, iterations of i-SpaSP.", min=1)]
Repeats = Annotated[int, typer.Option(help="Rounds of interleaved runs; medians are shown.", min=1)]
Methods = Annotated[str, typer.Option(help="Names from ispasp.methods(), comma-separated.")]


def _show(experiment: Any, rows: list[Any], as_json: bool, *settings: Any) -> None:
    """Print rows as JSON, or as a table with the settings in its note."""
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
    names: Annotated[str, typer.Option("--methods", help="Comma-separated. Default: all but gfs.")] = "",
    keep: Annotated[float, typer.Option(help="Fraction of units to keep.")] = 0.4,
    repeats: Repeats = 3,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Time of each method's choice, without that of the statistics."""
    from ispasp_lab.benchmarks import methods as experiment

    rows = experiment.run(_names(names), keep, repeats, seed)
    _show(experiment, rows, as_json, keep, repeats)


@bench.command()
def coverage(
    group: Annotated[
        list[str] | None, typer.Option(help="plain, torchvision, timm or transformers; may be repeated. Default: all.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only networks whose name starts with this, e.g. resnet.")] = "",
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
        list[str] | None,
        typer.Option(help="resnet50, mobilenet_v2, bert_base or smollm2; may be repeated. Default: all."),
    ] = None,
    keep: Annotated[float, typer.Option(help="Fraction of units to keep.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Time and memory of survey and surgery, side by side with torch-pruning where that is installed."""
    from ispasp_lab.benchmarks import surgery as experiment

    rows = experiment.run(model or tuple(experiment.NETWORKS), keep)
    _show(experiment, rows, as_json, keep)


@bench.command()
def runtimes(
    network: Annotated[
        list[str] | None, typer.Option(help="A name of the zoo, such as torchvision/resnet18; may be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A runtime, such as OpenVINO; may be repeated. Default: all.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, e.g. docs/results/runtimes.md.")] = None,
    as_json: Json = False,
) -> None:
    """Pruned networks in torch.compile, torch.export, ONNX Runtime, llama.cpp, OpenVINO and ExecuTorch."""
    from ispasp_lab.benchmarks import runtimes as experiment

    rows = experiment.run(network or experiment.NETWORKS, only or tuple(experiment.RUNTIMES))
    if out is not None:
        out.write_text(experiment.as_markdown(rows))
    _show(experiment, rows, as_json)


@bench.command()
def families(
    only: Annotated[list[str] | None, typer.Option(help="A family, such as llama; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, e.g. docs/results/families.md.")] = None,
    as_json: Json = False,
) -> None:
    """How saved transformers of many families open without ispasp."""
    from ispasp_lab.benchmarks import families as experiment

    rows = list(experiment.run(only or ()))
    if out is not None:
        experiment.write(rows, out)
    _show(experiment, rows, as_json)


@bench.command()
def recipes(as_json: Json = False) -> None:
    """Count MACs of the paper's recipes, beside the printed numbers and for other readings of its text."""
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
    batches: Annotated[
        list[int] | None, typer.Option(help="Numbers of batches; may be repeated. Default: 4 and 64.")
    ] = None,
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


@bench.command()
def healing(
    only: Annotated[str, typer.Option(help="resnet56, resnet20, mobilenet_v2, minilm or smollm2.")] = "resnet20",
    keep: Annotated[float, typer.Option(help="Fraction of units to keep.")] = 0.25,
    method: Annotated[str, typer.Option(help="A name from ispasp.methods().")] = "auto",
    steps: Annotated[int, typer.Option(help="Steps end to end; 0: the default.", min=0)] = 0,
    block_steps: Annotated[int, typer.Option(help="Steps block by block; 0: the default.", min=0)] = 0,
    test: Annotated[int, typer.Option(help="Test examples.", min=1)] = 1000,
    examples: Annotated[
        list[int] | None,
        typer.Option(help="Examples to heal on; resnet20 and resnet56 have 50,000. May be repeated.", min=32),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of healing.csv and healing.md; resumes there.")] = None,
    as_json: Json = False,
) -> None:
    """Healing end to end and block by block, from the same pruned network. Needs ISPASP_DATA."""
    from ispasp_lab.benchmarks import healing as experiment

    rows = list(experiment.run(only, keep, method, steps, block_steps, test, examples or (), out))
    if out is not None:
        experiment.write(out)
    _show(experiment, rows, as_json)


@bench.command()
def accuracy(
    only: Annotated[
        list[str] | None,
        typer.Option(help="resnet56, resnet20, mobilenet_v2, minilm or smollm2; may be repeated. Default: all."),
    ] = None,
    size: Annotated[list[float] | None, typer.Option(help="0.75, 0.5 or 0.25; may be repeated. Default: all.")] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="How the size is given: keep, macs, matched (the MACs of keep) or recipe; may be repeated. "
            "Default: all."
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="May be repeated. Default: auto, ispasp, l1, obs, random.")
    ] = None,
    heal: Annotated[bool | None, typer.Option("--heal/--no-heal", help="Only with or without. Default: both.")] = None,
    heal_time: Annotated[float | None, typer.Option(help="Seconds of healing, instead of the task's epochs.")] = None,
    test: Annotated[int, typer.Option(help="Test examples. Default: all of the task's.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder of accuracy.csv and accuracy.md.")] = Path("docs/results"),
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Write the page from the rows that are there.")
    ] = False,
) -> None:
    """Accuracy of pruned and healed networks beside the targets. Resumes where it stopped. Needs ISPASP_DATA."""
    from ispasp_lab.benchmarks import accuracy as experiment
    from ispasp_lab.benchmarks.accuracy_tasks import NETWORKS

    heals = (experiment.PLAIN, experiment.HEALED)
    choice = experiment.Choice(
        tuple(size or ()),
        tuple(way or ()),
        tuple(method or experiment.METHODS),
        heals if heal is None else (heals[heal],),
        test,
        heal_time,
    )
    for task in [] if page_only else only or NETWORKS:
        absent = experiment.missing(task)
        if absent:
            typer.echo(f"{task} is skipped: {absent}")
            continue
        for row in experiment.run(task, out, choice):
            typer.echo(experiment.described(row))
            experiment.write(out)
    typer.echo(f"wrote {experiment.write(out)}")


@bench.command()
def latency(
    network: Annotated[
        list[str] | None,
        typer.Option(
            help="resnet50, mobilenet_v2, vit_small, bert_base, smollm2-prefill or smollm2-token; may be repeated. "
            "Default: all."
        ),
    ] = None,
    runtime: Annotated[
        list[str] | None, typer.Option(help="eager, compile or onnx; may be repeated. Default: all.")
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="Macs(0.5), Latency(0.5), 'keep 0.5' or 'torch-pruning 0.5'; may be repeated. Default: all."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of latency.csv and latency.md.")] = Path("docs/results"),
) -> None:
    """Predicted and measured speed-ups at half the MACs, half the time and half the units. Resumes where it stopped."""
    from ispasp.budget.latency import RUNTIMES
    from ispasp_lab.benchmarks import latency as experiment

    names = network or tuple(experiment.NETWORKS), runtime or RUNTIMES, way or tuple(experiment.WAYS)
    for row in experiment.run(*names, out):
        typer.echo(f"{row.network}, {row.runtime}, {row.way}: {row.failure or f'{row.measured:.2f}x'}")
    typer.echo(f"wrote {experiment.write(out)}")


@bench.command()
def search(
    macs: Annotated[
        list[float] | None, typer.Option(help="Budgets, as parts of the MACs; may be repeated. Default: 0.5.")
    ] = None,
    candidates: Annotated[int, typer.Option(help="Networks that each search tries.", min=1)] = 100,
    only: Annotated[
        list[str] | None,
        typer.Option(help="uniform, allocation, exchanges, legr, amc or meta; may be repeated. Default: all."),
    ] = None,
    images: Images = 1024,
    tested: Annotated[int, typer.Option(help="Test images, 0 for all.", min=0)] = 0,
    seed: Draw = 0,
    out: Annotated[Path, typer.Option(help="Folder of search.csv and search.md.")] = Path("docs/results"),
) -> None:
    """Searches of widths at the same budget: LeGR, AMC and MetaPruning beside our own. Resumes. Needs ISPASP_DATA."""
    from ispasp_lab.benchmarks import search as experiment

    settings = experiment.Settings(images, tested, seed)
    budgets = macs or [0.5]
    for row in experiment.run(settings, out, budgets, candidates, only or ()):
        typer.echo(f"{row.search} at {row.macs:g}: divergence {row.divergence:.4f}, {row.accuracy:.2f} %")
    amounts = " ".join(f"--macs {amount:g}" for amount in budgets)
    command = (
        f"ispasp bench search {amounts} --candidates {candidates} --images {images} --tested {tested} --seed {seed}"
    )
    typer.echo(f"wrote {experiment.write(out, command)}")


@bench.command()
def bounds(
    network: Annotated[
        list[str] | None,
        typer.Option(
            help="two layers, four layers, eight layers, resnet20 or resnet56; may be repeated. Default: all."
        ),
    ] = None,
    keep: Annotated[float, typer.Option(help="Fraction of units to keep.")] = 0.75,
    images: Annotated[int, typer.Option(help="Test images.", min=1)] = 16,
    zoo: Annotated[
        list[str] | None,
        typer.Option(help="Instead, all networks of plain, torchvision, timm or transformers; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Upper bounds on the change of the output from layer errors, beside the measured change."""
    from ispasp_lab.benchmarks import bounds as experiment, bounds_zoo

    if zoo:
        _show(bounds_zoo, list(bounds_zoo.run(zoo, keep)), as_json)
    else:
        _show(experiment, experiment.run(network or (), keep, images), as_json)
