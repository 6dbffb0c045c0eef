"""`ispasp reproduce`: the paper's experiments."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from ispasp.cli.options import writable

reproduce = typer.Typer(no_args_is_help=True, help="Run the paper's experiments.")


@reproduce.command()
def synthetic(
    out: Annotated[Path, typer.Option(help="Folder for synthetic.csv, .png and .md.")] = Path("results"),
    matrices: Annotated[int, typer.Option(help="Random matrices per setting (paper: 3).", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
) -> None:
    """Error against size on hidden representations of known decay (Section 6.1, Appendix A.1)."""
    from ispasp_lab.experiments import synthetic as experiment

    writable(out)
    points = experiment.run(matrices=matrices, seed=seed)
    paths = experiment.write(points, out)
    typer.echo(experiment.summary(points))
    typer.echo("wrote " + ", ".join(map(str, paths)))


@reproduce.command()
def mnist(
    out: Annotated[
        Path, typer.Option(help="Folder for mnist.csv, .png and .md; an interrupted run resumes there.")
    ] = Path("results"),
    trials: Annotated[int, typer.Option(help="Trials, each with its own dense network (paper: 3).", min=1)] = 3,
    epochs: Annotated[int, typer.Option(help="Epochs of training (paper: 200).", min=1)] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate of training (paper: 0.001).")] = 1e-3,
    finetune_epochs: Annotated[int, typer.Option(help="Epochs of fine-tuning (the paper does not say).", min=1)] = 5,
    size: Annotated[
        list[int] | None, typer.Option(help="Units to keep; may be repeated. Default: 50 100 200 400.", min=1)
    ] = None,
    same_batch: Annotated[
        bool, typer.Option("--same-batch", help="One mini-batch for all iterations of i-SpaSP, not a new one in each.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the first trial.", min=0)] = 0,
    bf16: Annotated[
        bool,
        typer.Option("--bf16", help="Train the dense networks in mixed precision, for --epochs 200."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version in under two minutes; only --out and --seed count.")
    ] = False,
) -> None:
    """Two-layer networks on MNIST: i-SpaSP, GFS and Top-K before and after fine-tuning (Section 6.2, Appendix A.2)."""
    from dataclasses import replace

    from ispasp_lab.experiments import mnist as experiment, mnist_report
    from ispasp_lab.experiments.mnist_network import Settings

    writable(out)
    if quick:
        settings, trials, options = replace(experiment.QUICK, seed=seed), 2, "--quick"
        sizes = experiment.QUICK_SIZES
    else:
        settings = Settings(epochs=epochs, lr=lr, finetune_epochs=finetune_epochs, fresh=not same_batch, seed=seed)
        settings = replace(settings, precision="bf16" if bf16 else "no")
        sizes = tuple(size) if size else experiment.SIZES
        options = f"--trials {trials} --epochs {epochs} --lr {lr:g} --finetune-epochs {finetune_epochs}"
        options += "".join(f" --size {s}" for s in sizes) + (" --same-batch" if same_batch else "")
        options += " --bf16" if bf16 else ""
    rows = experiment.run(settings, out, sizes, trials=trials)
    paths = mnist_report.write(rows, settings, out, f"ispasp reproduce mnist {options} --seed {seed}")
    typer.echo(paths[-1].read_text(encoding="utf-8"))
    typer.echo("wrote " + ", ".join(map(str, paths)))


@reproduce.command()
def runtime(
    out: Annotated[Path, typer.Option(help="Folder for runtime.csv, .png and .md.")] = Path("results"),
    seed: Annotated[int, typer.Option(help="Seed of weights and data.", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="On fewer examples, in under two minutes.")] = False,
) -> None:
    """Seconds to prune ResNet34 blocks 2 and 15 with i-SpaSP and the variants of GFS (Section 4.2)."""
    from dataclasses import replace

    from ispasp_lab.experiments import runtime as experiment, runtime_report

    writable(out)
    settings = replace(experiment.QUICK if quick else experiment.Settings(), seed=seed)
    rows = experiment.run(settings)
    command = f"ispasp reproduce runtime {'--quick ' if quick else ''}--seed {seed}"
    paths = runtime_report.write(rows, settings, out, command)
    typer.echo(paths[-1].read_text(encoding="utf-8"))
    typer.echo("wrote " + ", ".join(map(str, paths)))


@reproduce.command()
def cnn(
    model: Annotated[
        str, typer.Option(help="resnet34, mobilenet_v2, cifar_resnet56 (any depth 6 n + 2).")
    ] = "cifar_resnet56",
    data: Annotated[
        str, typer.Option(help="cifar10, imagenet-mini, or a folder with train/ and val/ of one sub-folder per class.")
    ] = "cifar10",
    out: Annotated[
        Path, typer.Option(help="Folder for CSV, figure and Markdown; an interrupted run resumes there.")
    ] = Path("results"),
    method: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: all but gfs.")] = None,
    keep: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: 0.25 0.4 0.5 0.75.")] = None,
    compensate: Annotated[
        list[str] | None, typer.Option(help="none, local, dense; may be repeated. Default: all; pipeline: none.")
    ] = None,
    examples: Annotated[int, typer.Option(help="Calibration images (paper: 1,280).", min=1)] = 1280,
    tested: Annotated[int, typer.Option(help="Test images; 0 for all.", min=0)] = 0,
    weights: Annotated[Path | None, typer.Option(help="State dict, .safetensors or .pth.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB that waiting activations may take.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small version in under two minutes.")] = False,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Table 1: block by block, an epoch after each, then 90 epochs.")
    ] = False,
    finetune: Annotated[
        bool, typer.Option("--finetune", help="The pipeline with many methods, for Table 1; one row each, resumable.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="For --finetune: runs of each, from --seed on.", min=1)] = 2,
    recipe: Annotated[str | None, typer.Option(help="For --pipeline: a recipe such as resnet34-2.69G.")] = None,
    epochs: Annotated[float, typer.Option(help="When training: epochs at the end.", min=0)] = 90,
    epochs_between: Annotated[float, typer.Option(help="When training: epochs after each block.", min=0)] = 1,
    batch: Annotated[int, typer.Option(help="When training: images of a step.", min=1)] = 256,
    workers: Annotated[int, typer.Option(help="When training: data loader workers.", min=0)] = 0,
    bf16: Annotated[bool, typer.Option("--bf16", help="When training: in mixed precision.")] = False,
) -> None:
    """Convolutional networks: all methods without fine-tuning, or the paper's pipeline (Section 6.3, Appendix A.3)."""
    from ispasp_lab.experiments import cnn_commands
    from ispasp_lab.experiments.cnn import Settings
    from ispasp_lab.experiments.cnn_pipeline import Training

    writable(out)
    room = None if memory is None else int(memory * 1e9)
    settings = Settings(model, data, examples, tested, seed, weights=weights, memory=room)
    training = Training(epochs_between, epochs, batch=batch, workers=workers, precision="bf16" if bf16 else "no")
    if finetune:
        lines = cnn_commands.finetuned(settings, training, out, method or [], keep or [], seeds, quick=quick)
    elif pipeline:
        lines = cnn_commands.pipeline(settings, training, out, recipe, keep or [], compensate or [], quick=quick)
    else:
        lines = cnn_commands.sweep(settings, out, method or [], keep or [], compensate or [], quick=quick)
    for line in lines:
        typer.echo(line)


@reproduce.command()
def heads(
    model: Annotated[
        str, typer.Option(help="Folder of a pretrained Hugging Face model (paper: mBERT), or its name in ISPASP_DATA.")
    ] = "all-MiniLM-L6-v2",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="sst2, snli, xnli, or a folder with train.tsv and test.tsv; may be repeated. Default: sst2 snli."
        ),
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="Files of one language only: en for dev-en.tsv; may be repeated.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for heads.csv, .png and .md; an interrupted run resumes there.")
    ] = Path("results"),
    train: Annotated[int, typer.Option(help="Sentences to train on; 0 for all.", min=0)] = 6000,
    tested: Annotated[int, typer.Option(help="Sentences to test on; 0 for all.", min=0)] = 2000,
    trials: Annotated[int, typer.Option(help="Trials from one dense network.", min=1)] = 3,
    length: Annotated[int, typer.Option(help="Longest text, in tokens; longer ones are cut.", min=4)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small version in under two minutes.")] = False,
) -> None:
    """Attention heads of a BERT: i-SpaSP, random, sensitivities; pruned and fine-tuned (Section 6.4, Appendix A.4)."""
    from ispasp_lab.experiments import heads as experiment, heads_report
    from ispasp_lab.experiments.heads_network import Settings

    writable(out)
    keeps, names = list(experiment.KEEPS), data or ["sst2", "snli"]
    languages: list[str | None] = [*language] if language else [None]
    if quick:
        keeps, names, trials = keeps[:1], names[:1], 1
    for name, spoken in product(names, languages):
        settings = Settings(model, name, spoken, train, tested, length=length, seed=seed)
        settings = experiment.quick(settings) if quick else settings
        for row in experiment.run(settings, out, keeps, trials=trials):
            right = [f"{value:.2f} %" for value in (row.accuracy, row.finetuned) if value is not None]
            typer.echo(f"{row.data}, {row.method}, compensate {row.compensate}, keep {row.keep:g}, trial {row.trial}: "
                       + (", then ".join(right) or row.note))  # fmt: skip
    shown = "".join(f" --data {Path(name).name}" for name in names)
    shown += "".join(f" --language {spoken}" for spoken in language or ())
    command = f"ispasp reproduce heads --model {Path(model).name}{shown} --trials {trials}{' --quick' if quick else ''}"
    paths = heads_report.write(out, command)
    typer.echo(paths[-1].read_text(encoding="utf-8"))
    typer.echo("wrote " + ", ".join(map(str, paths)))
