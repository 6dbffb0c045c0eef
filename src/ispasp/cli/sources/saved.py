"""A folder that `ispasp prune` wrote, as a model again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ispasp.api.load import load
from ispasp.cli.sources.huggingface import described, transformers
from ispasp.cli.sources.loaded import Loaded
from ispasp.errors import InputError, SaveError
from ispasp.types.plan import Plan

RESULT = "result.json"  # what `Result.to_json` tells, the model as it was typed, and the command
_SAFE = ("torchvision:", "timm:")  # a folder may name these; it may not name code to run


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a pruned model.

    >>> is_saved(Path("no/such/folder"))
    False
    """
    return (folder / "plan.json").is_file()


def saved_folder(spec: str) -> Path | None:
    """The folder of a pruned model that is named as a model: FOLDER, ispasp:FOLDER or hf:FOLDER.

    >>> saved_folder("torchvision:resnet18"), saved_folder("ispasp:small")
    (None, ...Path('small'))
    """
    kind, _, rest = spec.partition(":")
    text = rest if kind in ("ispasp", "hf") else spec
    folder = Path(text).expanduser()
    return folder if kind == "ispasp" or (text and is_saved(folder)) else None


def load_saved(folder: Path, dense: str, build: Callable[[str], Loaded]) -> Loaded:
    """The pruned model of a folder, with its plan. `dense` names the dense model if the folder cannot."""
    if not is_saved(folder):
        raise SaveError(f"{folder} has no plan.json: pass a folder that `ispasp prune` wrote")
    plan = _plan(folder / "plan.json")
    if not dense and (folder / "config.json").is_file():
        transformers()  # says what is missing, and imports torchvision in the way that works everywhere
        return replace(described(load(folder), f"ispasp:{folder}", str(folder)), plan=plan)
    known = _made_from(folder)
    if not dense and not known.startswith(_SAFE):
        remedy = f"it was made from {known}" if known else "such as torchvision:resnet34"
        raise InputError(f"{folder} does not hold the code of its model: pass --model, the dense one ({remedy})")
    built = build(dense or known)
    load(folder, built.model)
    return replace(built, spec=f"ispasp:{folder}", warnings=(), plan=plan)


def _plan(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SaveError(f"{path} cannot be read ({error}): restore the folder that `ispasp prune` wrote") from error


def _made_from(folder: Path) -> str:
    try:
        return str(json.loads((folder / RESULT).read_text(encoding="utf-8"))["model"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
