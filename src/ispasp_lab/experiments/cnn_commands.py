"""The steps of `ispasp reproduce cnn`, which yield lines to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from ispasp._options import Compensate
from ispasp.errors import InputError
from ispasp_lab.experiments import cnn, cnn_finetune, cnn_pipeline, cnn_report

_QUICK = cnn_pipeline.Training(between=0.002, final=0.01, batch=32)


def sweep(
    settings: cnn.Settings,
    out: Path,
    methods: Sequence[str] = (),
    keeps: Sequence[float] = (),
    compensations: Sequence[str] = (),
    *,
    quick: bool = False,
) -> Iterator[str]:
    """Every row when it is there, then the Markdown."""
    if quick:
        settings = cnn.quick(settings)
        methods, keeps = methods or cnn.QUICK_METHODS, keeps or (0.5,)
    for row in cnn.run(settings, out, methods, keeps or cnn.KEEPS, compensations or cnn.COMPENSATIONS):
        right = f"{row.accuracy:.2f} %" if row.accuracy is not None else row.note
        yield f"{row.method}, compensate {row.compensate}, keep {row.keep:g}: {right}"
    command = f"ispasp reproduce cnn {_described(settings)}"
    paths = cnn_report.write(settings, out, command)
    yield paths[-1].read_text(encoding="utf-8")
    yield "wrote " + ", ".join(map(str, paths))


def pipeline(
    settings: cnn.Settings,
    training: cnn_pipeline.Training,
    out: Path,
    recipe: str | None,
    keeps: Sequence[float],
    compensations: Sequence[str],
    *,
    quick: bool = False,
) -> Iterator[str]:
    """Every stage when it is done, then the Markdown."""
    if len(keeps) > 1 or len(compensations) > 1:
        raise InputError("the pipeline makes one network: pass one --keep or --recipe, and one --compensate")
    if quick:
        settings = cnn.quick(settings)
        training = replace(_QUICK, workers=training.workers, precision=training.precision)
    keep = keeps[0] if keeps else None
    compensate = None if not compensations or compensations[0] == "none" else cast("Compensate", compensations[0])
    name, _ = cnn_pipeline.target(settings.model, recipe, keep)
    for row in cnn_pipeline.run(settings, training, out, recipe, keep, compensate=compensate):
        right = [f"{value:.2f} %" for value in (row.accuracy, row.trained_accuracy) if value is not None]
        yield f"{row.stage} {row.block}: {', then '.join(right)}"
    what = f"--recipe {recipe}" if recipe else f"--keep {keep:g}"
    what += _trained(training)
    command = f"ispasp reproduce cnn --pipeline {what} {_described(settings)}"
    paths = cnn_pipeline.write(settings, training, out, name, command)
    yield paths[-1].read_text(encoding="utf-8")
    yield "wrote " + ", ".join(map(str, paths))


def finetuned(
    settings: cnn.Settings,
    training: cnn_pipeline.Training,
    out: Path,
    methods: Sequence[str],
    keeps: Sequence[float],
    seeds: int,
    *,
    quick: bool = False,
) -> Iterator[str]:
    """Every network when it is trained, then the Markdown."""
    if quick:
        settings, seeds, keeps = cnn.quick(settings), 1, keeps or (0.5,)
        training = replace(_QUICK, workers=training.workers, precision=training.precision)
    for row in cnn_finetune.run(settings, training, out, methods, keeps, seeds):
        yield f"{row.method}, keep {row.keep:g}, seed {row.seed}: {row.pruned:.2f} %, then {row.accuracy:.2f} %"
    what = f"{_trained(training)} --seeds {seeds} {_described(settings)}"
    path = cnn_finetune.write(settings, out, f"ispasp reproduce cnn --finetune{what}")
    yield path.read_text(encoding="utf-8")
    yield f"wrote {path}"


def _trained(training: cnn_pipeline.Training) -> str:
    t = training
    text = f" --epochs {t.final:g} --epochs-between {t.between:g} --batch {t.batch}"
    return text + (" --bf16" if t.precision == "bf16" else "")


def _described(settings: cnn.Settings) -> str:
    s = settings
    data = Path(s.data).name
    return f"--model {s.model} --data {data} --examples {s.examples} --tested {s.tested} --seed {s.seed}"
