"""One call of `ispasp prune`: labels where they are used, the run, and what is told about it."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer

import ispasp
from ispasp.cli.alive import LOG
from ispasp.cli.amounts import looks_at_the_task
from ispasp.cli.checks import warn
from ispasp.cli.scoring import Scorer
from ispasp.cli.sources import RESULT, Examples, Loaded, matched
from ispasp.cli.task import loss
from ispasp.errors import InputError, SaveError
from ispasp.report.html import html, roots
from ispasp.select import selector
from ispasp.train.objective import logits_of

_NOTHING = "Nothing was removed: pass a smaller --keep, or fewer --skip."
_NO_LABELS = "The labels are not used: {}"


@dataclass(frozen=True, eq=False)
class Job:
    """A model, the examples to calibrate with, and the options of `ispasp.prune`."""

    loaded: Loaded
    found: Examples
    chosen: dict[str, Any]
    examples: int
    batch_size: int
    scorer: Scorer | None = None

    def run(self, device: str, *, curves: bool) -> ispasp.Result:
        """Prune the model in place."""
        LOG.debug("pruning %s", self.loaded.spec)
        move(self.loaded, device)
        labelled = looks_at_the_task(self.chosen["method"]) and self.found.labels is not None
        batches = self.found.loader(self.batch_size, numbers=self.found.some(self.examples), labelled=labelled)
        given: dict[str, Any] = {"loss": loss if labelled else None, "examples": None, "evaluate": self.scorer}
        return ispasp.prune_(self.loaded.model, batches, curves=curves, **given, **self.chosen)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result beside what `Result.settings` tells."""
        prepare, scorer = self.found.preprocessing, self.scorer
        return {
            "examples": min(self.examples, self.found.count),
            "batch_size": self.batch_size,
            **({"preprocessing": prepare.to_dict()} if prepare else {}),
            **({"scored_on": scorer.text} if scorer else {}),
        }


def with_labels(loaded: Loaded, found: Examples, method: Any, output: Any) -> Examples:
    """The examples with labels that fit the model, or without labels and with a warning where they are not needed."""
    needed = "sensitivity" in selector(method).needs
    if needed:
        found.needed_labels()
    used = looks_at_the_task(method)
    if found.labels is None or not (used or (found.classes and isinstance(output, torch.Tensor))):
        return found
    scores = logits_of(output)
    if scores.ndim != 2:
        return found
    try:
        return matched(found, scores.shape[1], loaded.names)
    except InputError as error:
        if needed:
            raise
        return replace(found, labels=None, warnings=(*found.warnings, _NO_LABELS.format(error)))


def move(loaded: Loaded, device: str) -> None:
    """Move the model to a device: to that of its name, else to a GPU where there is one."""
    if device == "meta":
        raise InputError("--device meta has no numbers to calibrate with: pass --device cpu")
    try:
        loaded.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--device {device or 'cuda'} cannot be used ({reason}): pass --device cpu") from error


def write(result: ispasp.Result, told: dict[str, Any], found: Examples, out: Path) -> None:
    """The model, its plan, what is told about it, and the report."""
    LOG.debug("writing %s", out)
    ispasp.save(result, out)
    try:
        (out / RESULT).write_text(json.dumps(told, indent=1), encoding="utf-8")
        (out / "report.html").write_text(html(told, roots(result.curves)), encoding="utf-8")
        if found.tokenizer is not None:
            found.tokenizer.save_pretrained(out)
    except OSError as error:
        raise SaveError(f"cannot write to {out}: {error}") from error


def tell(job: Job, result: ispasp.Result, told: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """Print the table or JSON, then what it was made with; beside JSON that goes to standard error."""
    typer.echo(json.dumps(told, indent=2) if as_json else str(result))
    typer.echo(f"calibrated with {min(job.examples, job.found.count):,} of {job.found.text}", err=as_json)
    if job.found.preprocessing is not None:
        typer.echo(f"images: {job.found.preprocessing}", err=as_json)
    if job.scorer is not None:
        typer.echo(f"scored on {job.scorer.text}", err=as_json)
    warn(told["warnings"])
    typer.echo(f"wrote {out / 'report.html'}, plan.json, model.safetensors and {RESULT}", err=as_json)


def described(job: Job, result: ispasp.Result, typed: dict[str, Any], no_curves: str) -> dict[str, Any]:
    """What result.json holds: the result, what was typed, and what must not be overlooked."""
    told: dict[str, Any] = json.loads(result.to_json())
    warnings = (*job.loaded.warnings, *job.found.warnings, *(() if result.layers else (_NOTHING,)))
    told |= {"model": typed.pop("model"), "command": shlex.join(["ispasp", *sys.argv[1:]]), "warnings": warnings}
    told["settings"] |= {**typed, **job.settings()}
    return told | ({"no_curves": no_curves} if no_curves else {})
