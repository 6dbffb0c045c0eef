"""A folder that `ispasp prune` wrote, as a model again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ispasp.api.files import FORMAT, PLAN, WEIGHTS
from ispasp.api.load import load, saved_plan
from ispasp.cli.sources.huggingface import described, transformers
from ispasp.cli.sources.loaded import Loaded
from ispasp.cli.sources.preprocessing import Preprocessing, from_dict
from ispasp.errors import InputError, SaveError
from ispasp.files.reading import is_regular, opened, read_json

RESULT = "result.json"  # what `Result.to_json` tells, the model as it was typed, and the command
_SAFE = ("torchvision:", "timm:")  # a folder may name these; it may not name code to run
_FETCHES = re.compile(r"weights|pretrained|checkpoint|path|url|cfg|hub")  # nor options that read other files


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a pruned model.

    >>> is_saved(Path("no/such/folder"))
    False
    """
    if is_regular(folder / PLAN):
        return True
    try:
        with opened(folder / WEIGHTS) as file:
            return file.metadata.get("format") == FORMAT
    except SaveError:
        return False


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
        raise SaveError(f"{folder} has no {WEIGHTS} of ispasp: pass a folder that `ispasp prune` wrote")
    plan, described_itself = saved_plan(folder)
    if not dense and described_itself:
        transformers()  # says what is missing, and imports torchvision in the way that works everywhere
        found = described(load(folder), f"ispasp:{folder}", str(folder))
        return replace(found, plan=plan, preprocessing=_prepared(folder) or found.preprocessing)
    known = _made_from(folder)
    if not dense and (not known.startswith(_SAFE) or _FETCHES.search(known)):
        remedy = f"it was made from {known}" if known else "such as torchvision:resnet34"
        raise InputError(f"{folder} does not hold the code of its model: pass --model, the dense one ({remedy})")
    built = build(dense or known)
    load(folder, built.model)
    prepare = _prepared(folder) or built.preprocessing
    return replace(built, spec=f"ispasp:{folder}", warnings=(), plan=plan, preprocessing=prepare)


def dense_spec(spec: str, dense: str = "") -> str:
    """How the dense model is named: a folder of ours that is pruned again opens as it did before.

    >>> dense_spec("torchvision:resnet18")
    'torchvision:resnet18'
    """
    folder = saved_folder(spec)
    return spec if folder is None else dense or _made_from(folder)


def _made_from(folder: Path) -> str:
    model = _told(folder).get("model")
    return model if isinstance(model, str) else ""


def _prepared(folder: Path) -> Preprocessing | None:
    """How the images that it was calibrated with were read."""
    settings = _told(folder).get("settings")
    told = settings.get("preprocessing") if isinstance(settings, dict) else None
    return from_dict(told, f"{folder / RESULT}")


def _told(folder: Path) -> dict[str, Any]:
    try:
        told = read_json(folder / RESULT)
    except SaveError:
        return {}
    return told if isinstance(told, dict) else {}
