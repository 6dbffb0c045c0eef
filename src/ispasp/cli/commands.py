"""The short commands: `ispasp survey`, `compare`, `export` and `finetune`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import ispasp
from ispasp.cli import options as o
from ispasp.cli.data import load_data, load_sample
from ispasp.cli.evaluate import Scorer, scorer
from ispasp.cli.loaded import Examples, Loaded, matched, runs
from ispasp.cli.models import RESULT, ModelOptions, check_out, is_saved, load_model, saved_result
from ispasp.errors import InputError
from ispasp.train import AdamW, Sgd
from ispasp.train.devices import need_accelerate
from ispasp.train.objective import logits_of


@o.grouped
def survey(
    model: ModelOptions, sample: o.Sample, scope: o.Scope = "blocks", kinds: o.Kinds = o.ALL, as_json: o.Json = False
) -> None:
    """Print every hidden dimension of a model, and what is frozen and why. Changes nothing, needs no data."""
    loaded = model.load()
    o.LOG.debug("surveying %s", model.model)
    found = ispasp.survey(loaded.model, load_sample(loaded, sample), scope=scope, kinds=kinds)
    told = {"model": model.model, "cost": found.cost(), "dimensions": found.dimensions, "frozen": found.frozen}
    typer.echo(json.dumps(told, indent=2, default=asdict) if as_json else str(found))


@o.grouped
def compare(
    model: ModelOptions,
    pruned: Annotated[str, typer.Argument(help="The pruned model: a folder that ispasp prune wrote, or as MODEL.")],
    data: o.Labelled,
    number: Annotated[int, o.option(o.DATA, "Examples, spread over the data; at most 256.", "--examples", min=1)] = 256,
    batch_size: o.BatchSize = 32,
    runtime: Annotated[Literal["eager", "compile", "onnx"], o.option(None, "What latency is measured in.")] = "eager",
    latency_batch: Annotated[int, o.option(None, "Examples in a call whose latency is measured.", min=1)] = 1,
    device: o.Device = "",
    out: Annotated[Path | None, o.option(None, "HTML page to write.")] = None,
    as_json: o.Json = False,
) -> None:
    """Print size, MACs, latency, agreement, divergence, worst examples and errors on the way of two models."""
    dense = model.load(data.seed)
    other = load_model(pruned, dense=model.dense or model.model, seed=data.seed)
    found = load_data(data.data, dense, data)
    o.warn((*dense.warnings, *other.warnings, *found.warnings))
    for each in (dense, other):
        o.move(each.model, device)
    o.LOG.debug("comparing %s and %s", model.model, pruned)
    batches = found.loader(batch_size, numbers=found.some(number))
    told = ispasp.compare(dense.model, other.model, batches, batch=latency_batch, runtime=runtime)
    typer.echo(told.to_json() if as_json else str(told))
    if out is not None:
        typer.echo(f"wrote {told.report(out)}", err=as_json)


@o.grouped
def export(
    model: ModelOptions,
    path: Annotated[Path, typer.Argument(help="File to write, such as model.onnx or model.gguf.")],
    sample: o.Sample,
    to: Annotated[Literal["onnx", "gguf"] | None, o.option(None, "Format. Default: gguf for .gguf, else onnx.")] = None,
    dtype: Annotated[Literal["f16", "f32"], o.option(None, "Numbers of a GGUF file.")] = "f16",
    static: Annotated[bool, o.option(None, "ONNX for the shapes of the sample only.", "--static")] = False,
    opset: Annotated[int | None, o.option(None, "ONNX opset. Default: the exporter's.", min=1)] = None,
    tolerance: Annotated[float | None, o.option(None, "Largest relative error. Default: 1e-4, for f16 2e-2.")] = None,
    force: Annotated[bool, o.option(None, "Overwrite an existing file.", "--force")] = False,
) -> None:
    """Write a model, dense or pruned, as ONNX or GGUF, and check that the file computes the same."""
    kind = to or ("gguf" if path.suffix == ".gguf" else "onnx")
    if path.is_dir():
        raise InputError(f"{path} is a folder: pass a file in it, such as {path / f'model.{kind}'}")
    if path.exists() and not force:
        raise InputError(f"{path} exists: pass another file, or --force to overwrite it")
    o.writable(path.parent, name="")
    loaded = model.load()
    o.warn(loaded.warnings)
    o.LOG.debug("exporting %s", model.model)
    if kind == "gguf":
        beside = loaded.tokenizer and (Path(loaded.tokenizer) / "tokenizer.json").is_file()
        words = loaded.tokenizer if beside else None
        if not words:
            o.warn([f"no tokenizer.json beside the model: {path} has no tokenizer."])
        error = ispasp.export_gguf(loaded.model, path, tokenizer=words, dtype=dtype, tolerance=tolerance)
    else:
        options: dict[str, Any] = {} if tolerance is None else {"tolerance": tolerance}
        batch = load_sample(loaded, sample)
        error = ispasp.export_onnx(loaded.model, batch, path, opset=opset, dynamic=not static, **options)
        onnx = importlib.import_module("onnx").load(path, load_external_data=False)
        written = next(each.version for each in onnx.opset_import if not each.domain)
        if opset not in (None, written):
            o.warn([f"the exporter cannot write opset {opset}: {path} has opset {written}."])
    typer.echo(f"wrote {path} ({path.stat().st_size:,} bytes); its output differs from torch's by {error:.0e}")


# Fine-tuning -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train."""

    epochs: float = o.opt(1.0, None, "Passes over the data, such as 10 or 0.5.")
    optimizer: Literal["sgd", "adamw"] = o.opt("sgd", None, "sgd with momentum and cosine, adamw with linear decay.")
    lr: float | None = o.opt(None, None, "Learning rate. Default: 0.01 for sgd, 5e-5 for adamw.")
    label_smoothing: float = o.opt(0.0, None, "Label smoothing.")
    teacher: str = o.opt("", None, "Dense model to distill from as well; as MODEL of `ispasp prune`.")
    teacher_weights: str = o.opt("", None, "Weights of the teacher.")
    accumulate: int = o.opt(1, None, "Batches per optimizer step.", min=1)
    mixed_precision: Literal["bf16", "fp16"] | None = o.opt(None, None, "fp16 needs a GPU. Default: full precision.")
    checkpoint: Path | None = o.opt(None, None, "Folder; an interrupted run resumes from it.")

    def chosen(self, teacher: Loaded | None, seed: int) -> dict[str, Any]:
        recipe = Sgd() if self.optimizer == "sgd" else AdamW()
        recipe = recipe if self.lr is None else replace(recipe, lr=self.lr)
        names = ("epochs", "label_smoothing", "mixed_precision", "accumulate", "checkpoint")
        given = {name: getattr(self, name) for name in names}
        return {**given, "recipe": recipe, "teacher": teacher.model if teacher else None, "seed": seed}


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
    teacher = load_model(training.teacher, training.teacher_weights, seed=data.seed) if training.teacher else None
    chosen = training.chosen(teacher, data.seed)
    o.LOG.debug("loading %s", folder)
    loaded = load_model(f"ispasp:{folder}", dense=dense, seed=data.seed)
    found = load_data(data.data, loaded, data)
    found.needed_labels()
    logits = logits_of(runs(loaded, found))  # training would fail deep inside torch
    found = matched(found, logits.shape[1], loaded.names) if logits.ndim == 2 else found
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


def _judge(val: str, loaded: Loaded, found: Examples, wanted: o.Wanted, batch_size: int) -> Scorer:
    """Return the scorer on --val, whose classes must be among those of --data."""
    held = load_data(val, loaded, wanted)
    unknown = sorted(set(held.classes) - set(found.classes))
    if found.classes and unknown:
        raise InputError(f"--data and --val have different classes, such as {unknown[0]!r}: pass the same sub-folders")
    return scorer(replace(loaded, names=found.classes or loaded.names), held, batch_size)


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
