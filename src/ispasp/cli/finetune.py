"""`ispasp finetune`: train a pruned model to win back accuracy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.data import load_data
from ispasp.cli.evaluate import Scorer, scorer
from ispasp.cli.loaded import Examples, Loaded, matched, runs
from ispasp.cli.models import RESULT, check_out, is_saved, load_model, saved_result
from ispasp.errors import InputError
from ispasp.train import AdamW, Sgd
from ispasp.train.devices import need_accelerate
from ispasp.train.objective import logits_of


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train."""

    epochs: float = o.opt(1.0, None, "Passes over the data, such as 10 or 0.5.")
    optimizer: Literal["sgd", "adamw"] = o.opt(
        "sgd", None, "sgd with momentum and a cosine schedule, adamw with a linear decay."
    )
    lr: float | None = o.opt(None, None, "Learning rate. Default: 0.01 for sgd, 5e-5 for adamw.")
    label_smoothing: float = o.opt(0.0, None, "Label smoothing.")
    teacher: str = o.opt("", None, "Dense model to distill from as well; as MODEL of `ispasp prune`.")
    teacher_weights: str = o.opt("", None, "Weights of the teacher.")
    accumulate: int = o.opt(1, None, "Batches per optimizer step.", min=1)
    mixed_precision: Literal["bf16", "fp16"] | None = o.opt(None, None, "fp16 needs a GPU. Default: full precision.")
    checkpoint: Path | None = o.opt(None, None, "Folder; an interrupted run resumes from it.")

    def chosen(self, teacher: Loaded | None, seed: int) -> dict[str, Any]:
        """Return these options as `ispasp.finetune` takes them."""
        recipe = Sgd() if self.optimizer == "sgd" else AdamW()
        names = ("epochs", "label_smoothing", "mixed_precision", "accumulate", "checkpoint")
        return {name: getattr(self, name) for name in names} | {
            "recipe": recipe if self.lr is None else replace(recipe, lr=self.lr),
            "teacher": teacher.model if teacher else None,
            "seed": seed,
        }


@o.grouped
def finetune(
    folder: Annotated[Path, typer.Argument(help="Folder that `ispasp prune` wrote.")],
    data: o.Labelled,
    training: TrainingOptions,
    dense: o.Dense = "",
    val: Annotated[str, o.option(o.DATA, "Data to measure accuracy on, before and after; as --data.")] = "",
    batch_size: o.BatchSize = 64,
    out: Annotated[Path | None, o.option(None, "Folder to write to. Default: FOLDER-finetuned.")] = None,
    force: o.Force = False,
) -> None:
    """Fine-tune a pruned model on labelled data, and save it with its plan."""
    need_accelerate()
    if not is_saved(folder):
        raise InputError(f"{folder} holds no pruned model: pass a folder that `ispasp prune` wrote")
    beside = folder if folder.name else folder.resolve()
    target = out or beside.with_name(f"{beside.name}-finetuned")
    check_out(target, force=force)
    seed = data.seed
    teacher = load_model(training.teacher, training.teacher_weights, seed=seed) if training.teacher else None
    chosen = training.chosen(teacher, seed)
    o.LOG.debug("loading %s", folder)
    loaded = load_model(f"ispasp:{folder}", dense=dense, seed=seed)
    found = _labelled(loaded, load_data(data.data, loaded, data))
    if teacher:
        runs(teacher, found)
        o.warn(teacher.warnings)
    judge = _judge(val, loaded, found, data, batch_size) if val else None
    before = judge(loaded.model) if judge else {}
    o.LOG.debug("fine-tuning %s", folder)
    result = ispasp.finetune(loaded.model, found.loader(batch_size, labelled=True, shuffle=True), **chosen)
    typer.echo(str(result))
    scores = {"before": before, "after": judge(loaded.model)} if judge else {}
    if judge:
        told = [f"{100 * score[judge.name]:.1f} % {when}" for when, score in scores.items()]
        typer.echo(f"accuracy on {val}: {', '.join(told)}")
    if os.environ.get("RANK", "0") == "0":  # one of several processes writes
        _save(loaded, folder, target, scores)


def _labelled(loaded: Loaded, found: Examples) -> Examples:
    """Check that inputs and labels fit the model; training would fail deep inside torch."""
    found.needed_labels()
    scores = logits_of(runs(loaded, found))
    return matched(found, scores.shape[1], loaded.names) if scores.ndim == 2 else found


def _judge(val: str, loaded: Loaded, found: Examples, wanted: o.Wanted, batch_size: int) -> Scorer:
    """Return the scorer on --val, whose classes must be among those of --data."""
    held = load_data(val, loaded, wanted)
    unknown = sorted(set(held.classes) - set(found.classes))
    if found.classes and unknown:
        raise InputError(
            f"--data and --val have different classes, such as {unknown[0]!r}: pass folders with the same sub-folders"
        )
    return scorer(loaded, held, batch_size, names=found.classes)


def _save(loaded: Loaded, folder: Path, target: Path, scores: Mapping[str, Any]) -> None:
    """Save the model, with the tokenizer and result.json of the pruned folder."""
    ispasp.save(loaded.model, target, plan=loaded.plan)
    if target.resolve() != folder.resolve():
        for path in (*folder.glob("*token*"), *folder.glob("vocab*"), *folder.glob("merges.txt")):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
    told = saved_result(folder) | {"finetuned": dict(scores)}
    (target / RESULT).write_text(json.dumps(told, indent=1), encoding="utf-8")
    typer.echo(f"wrote {target}")
