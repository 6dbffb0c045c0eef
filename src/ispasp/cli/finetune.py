"""`ispasp finetune`: train a pruned model on, so that it wins back accuracy."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.sources import RESULT, Examples, Loaded, Wanted, is_saved, load_data, load_model, runs
from ispasp.cli.task import accuracy
from ispasp.errors import InputError
from ispasp.train.objective import logits_of


def finetune(
    folder: Annotated[Path, typer.Argument(help="Folder that `ispasp prune` wrote.")],
    data: Annotated[
        str,
        typer.Option(help="Image folder with one sub-folder per class, or .npz with labels.", rich_help_panel=o.DATA),
    ],
    dense: o.Dense = "",
    epochs: Annotated[float, typer.Option(help="Passes over the data; 0.5 for half of one.")] = 1.0,
    optimizer: Annotated[str, typer.Option(help="sgd (momentum, cosine) or adamw (linear decay).")] = "sgd",
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: 0.01 for sgd, 5e-5 for adamw.")] = None,
    label_smoothing: Annotated[float, typer.Option(help="Smoothing of the labels.")] = 0.0,
    teacher: Annotated[str, typer.Option(help="A dense model from whose outputs to learn as well; as MODEL.")] = "",
    teacher_weights: Annotated[str, typer.Option(help="Its weights.")] = "",
    val: Annotated[
        str, typer.Option(help="Data to measure accuracy on, before and after; as --data.", rich_help_panel=o.DATA)
    ] = "",
    batch_size: o.BatchSize = 64,
    accumulate: Annotated[int, typer.Option(help="Batches per step.", min=1)] = 1,
    mixed_precision: Annotated[str, typer.Option(help="bf16 or fp16 (GPU). Default: full precision.")] = "",
    size: o.ImageSize = None,
    key: o.Key = "",
    labels: o.Labels = "",
    length: o.Length = 128,
    seed: o.Seed = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder; an interrupted run goes on from there.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: FOLDER-finetuned.")] = None,
) -> None:
    """Fine-tune a pruned model on labelled data, and save it with its plan."""
    if not is_saved(folder):
        raise InputError(f"{folder} holds no pruned model: pass a folder that `ispasp prune` wrote")
    beside = folder if folder.name else folder.resolve()
    target = o.writable(out or beside.with_name(f"{beside.name}-finetuned"), model=True)
    taught = load_model(teacher, teacher_weights, seed=seed) if teacher else None
    chosen: dict[str, Any] = {
        "epochs": epochs,
        "recipe": _recipe(optimizer, lr),
        "label_smoothing": label_smoothing,
        "teacher": taught.model if taught else None,
        "mixed_precision": mixed_precision or None,
        "accumulate": accumulate,
        "checkpoint": checkpoint,
        "seed": seed,
    }
    loaded = load_model(f"ispasp:{folder}", dense=dense, seed=seed)
    wanted = Wanted(size=size, key=key, labels=labels, length=length, seed=seed)
    found = load_data(data, loaded, wanted)
    _check(loaded, found)
    if taught:
        runs(taught, found)
        o.warn(taught.warnings)
    held = _held(val, loaded, found, wanted).loader(batch_size, labelled=True) if val else None
    before = accuracy(loaded.model, held) if held else 0.0
    result = ispasp.finetune(loaded.model, found.loader(batch_size, labelled=True, shuffle=True), **chosen)
    typer.echo(str(result))
    if held:
        typer.echo(f"accuracy on {val}: {before:.1f} % before, {accuracy(loaded.model, held):.1f} % after")
    if os.environ.get("RANK", "0") == "0":  # of several processes one writes
        _save(loaded, folder, target)


def _recipe(optimizer: str, lr: float | None) -> ispasp.train.Sgd | ispasp.train.AdamW:
    o.one_of("--optimizer", optimizer, "sgd", "adamw")
    recipe = ispasp.train.Sgd() if optimizer == "sgd" else ispasp.train.AdamW()
    return recipe if lr is None else replace(recipe, lr=lr)


def _held(val: str, loaded: Loaded, found: Examples, wanted: Wanted) -> Examples:
    """Labels of a folder are numbers in the order of its sub-folders, so both must have the same ones."""
    held = load_data(val, loaded, wanted)
    if found.classes and held.classes and found.classes != held.classes:
        odd = sorted(set(found.classes) ^ set(held.classes))
        raise InputError(
            f"--data and --val have different classes, such as {odd[0]!r}: pass folders with the same sub-folders"
        )
    _check(loaded, held)
    return held


def _check(loaded: Loaded, found: Examples) -> None:
    """Inputs of another size and labels beyond the model's outputs fail deep inside torch; say it here."""
    highest = int(found.needed_labels().max())
    scores = logits_of(runs(loaded, found))
    if scores.ndim == 2 and highest >= scores.shape[1]:
        raise InputError(
            f"{found.text} have labels up to {highest}, the model has {scores.shape[1]} outputs: pass data of its "
            "classes"
        )


def _save(loaded: Loaded, folder: Path, target: Path) -> None:
    ispasp.save(loaded.model, target, plan=loaded.plan)
    if target.resolve() != folder.resolve():
        for path in (folder / RESULT, *folder.glob("*token*"), *folder.glob("vocab*"), *folder.glob("merges.txt")):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
    typer.echo(f"wrote {target}")
