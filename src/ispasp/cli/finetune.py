"""`ispasp finetune`: train a pruned model on, so that it wins back accuracy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import ispasp
from ispasp.cli import checks
from ispasp.cli import options as o
from ispasp.cli.alive import LOG
from ispasp.cli.choices import Optimizer, Precision
from ispasp.cli.grouped import grouped
from ispasp.cli.scoring import Scorer, scorer
from ispasp.cli.sources import (
    RESULT,
    Examples,
    Loaded,
    Wanted,
    is_saved,
    load_data,
    load_model,
    matched,
    runs,
)
from ispasp.errors import InputError, SaveError
from ispasp.files.reading import read_json
from ispasp.train import AdamW, Sgd
from ispasp.train.devices import need_accelerate
from ispasp.train.objective import logits_of


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train."""

    epochs: Annotated[float, typer.Option(help="Passes over the data; 0.5 for half of one.")] = 1.0
    optimizer: Annotated[
        Optimizer, typer.Option(help="sgd has momentum and a cosine schedule, adamw a linear decay.")
    ] = Optimizer.sgd
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: 0.01 for sgd, 5e-5 for adamw.")] = None
    label_smoothing: Annotated[float, typer.Option(help="Smoothing of the labels.")] = 0.0
    teacher: Annotated[str, typer.Option(help="A dense model from whose outputs to learn as well; as MODEL.")] = ""
    teacher_weights: Annotated[str, typer.Option(help="Its weights.")] = ""
    accumulate: Annotated[int, typer.Option(help="Batches per step.", min=1)] = 1
    mixed_precision: Annotated[Precision | None, typer.Option(help="fp16 needs a GPU. Default: full precision.")] = None
    checkpoint: Annotated[Path | None, typer.Option(help="Folder; an interrupted run goes on from there.")] = None

    def taught(self, seed: int) -> Loaded | None:
        """The teacher, where there is one."""
        return load_model(self.teacher, self.teacher_weights, seed=seed) if self.teacher else None

    def chosen(self, taught: Loaded | None, seed: int) -> dict[str, Any]:
        """As options of `ispasp.finetune`."""
        recipe = Sgd() if self.optimizer is Optimizer.sgd else AdamW()
        return {
            "epochs": self.epochs,
            "recipe": recipe if self.lr is None else replace(recipe, lr=self.lr),
            "label_smoothing": self.label_smoothing,
            "teacher": taught.model if taught else None,
            "mixed_precision": self.mixed_precision.value if self.mixed_precision else None,
            "accumulate": self.accumulate,
            "checkpoint": self.checkpoint,
            "seed": seed,
        }


@grouped
def finetune(
    folder: Annotated[Path, typer.Argument(help="Folder that `ispasp prune` wrote.")],
    data: o.Labelled,
    training: TrainingOptions,
    reading: o.ReadingOptions,
    dense: o.Dense = "",
    val: Annotated[
        str, typer.Option(help="Data to measure accuracy on, before and after; as --data.", rich_help_panel=o.DATA)
    ] = "",
    batch_size: o.BatchSize = 64,
    labels: o.Labels = "",
    seed: o.Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: FOLDER-finetuned.")] = None,
    force: o.Force = False,
) -> None:
    """Fine-tune a pruned model on labelled data, and save it with its plan."""
    need_accelerate()
    if not is_saved(folder):
        raise InputError(f"{folder} holds no pruned model: pass a folder that `ispasp prune` wrote")
    beside = folder if folder.name else folder.resolve()
    target = out or beside.with_name(f"{beside.name}-finetuned")
    checks.writable(target, model=True, force=force)
    taught = training.taught(seed)
    chosen = training.chosen(taught, seed)
    LOG.debug("loading %s", folder)
    loaded = load_model(f"ispasp:{folder}", dense=dense, seed=seed)
    wanted = reading.wanted(labels=labels, seed=seed)
    found = _labelled(loaded, load_data(data, loaded, wanted))
    if taught:
        runs(taught, found)
        checks.warn(taught.warnings)
    judge = _judge(val, loaded, found, wanted, batch_size) if val else None
    before = judge(loaded.model) if judge else {}
    LOG.debug("fine-tuning %s", folder)
    result = ispasp.finetune(loaded.model, found.loader(batch_size, labelled=True, shuffle=True), **chosen)
    typer.echo(str(result))
    scores = {"before": before, "after": judge(loaded.model)} if judge else {}
    if judge:
        told = {when: f"{100 * score[judge.name]:.1f} % {when}" for when, score in scores.items()}
        typer.echo(f"accuracy on {val}: {told['before']}, {told['after']}")
    if os.environ.get("RANK", "0") == "0":  # of several processes one writes
        _save(loaded, folder, target, scores)


def _labelled(loaded: Loaded, found: Examples) -> Examples:
    """Inputs of another size and labels beyond the model's outputs fail deep inside torch; say it here."""
    found.needed_labels()
    scores = logits_of(runs(loaded, found))
    return matched(found, scores.shape[1], loaded.names) if scores.ndim == 2 else found


def _judge(val: str, loaded: Loaded, found: Examples, wanted: Wanted, batch_size: int) -> Scorer:
    """Classes are numbers in the order of their names, so those of both must be the same, or known to the model."""
    held = load_data(val, loaded, wanted)
    unknown = sorted(set(held.classes) - set(found.classes))
    if found.classes and held.classes and unknown:
        raise InputError(
            f"--data and --val have different classes, such as {unknown[0]!r}: pass folders with the same sub-folders"
        )
    return scorer(loaded, held, batch_size, names=found.classes)


def _save(loaded: Loaded, folder: Path, target: Path, scores: Mapping[str, Any]) -> None:
    ispasp.save(loaded.model, target, plan=loaded.plan)
    if target.resolve() != folder.resolve():
        for path in (*folder.glob("*token*"), *folder.glob("vocab*"), *folder.glob("merges.txt")):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
    try:
        told = read_json(folder / RESULT)
    except SaveError:
        told = None
    if isinstance(told, dict):  # what is told about the pruning, and how good the model is now
        (target / RESULT).write_text(json.dumps(told | {"finetuned": dict(scores)}, indent=1), encoding="utf-8")
    typer.echo(f"wrote {target}")
