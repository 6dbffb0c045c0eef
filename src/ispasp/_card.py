"""The model card (README.md) of a saved Hugging Face model: what was pruned, how, and what was measured."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ispasp._huggingface import Opening
from ispasp.types.plan import Plan

CARD = "README.md"
MARK = "<!-- Written by ispasp.save, which replaces this file. Remove this line to keep it. -->"


def card(model: Any, plan: Plan, opening: Opening, facts: Sequence[tuple[str, str]], how: str) -> str:
    """The text of the card. `facts` are the rows that a result prints, `how` its options."""
    rows = [row for row in plan.rows() if row["kept"] < row["units"]]
    lines = ["---", "library_name: transformers", "tags:", "- pruned", "- ispasp"]
    base = _base(model)
    lines += [f"base_model: {json.dumps(base)}"] if base else []
    lines += ["---", MARK, "", f"# {_text(type(model).__name__)}, pruned", ""]
    lines.append(f"Whole neurons, filters or attention heads were removed from {_text(base) or 'the dense model'}.")
    call, module = opening.call.replace("folder", '"this/folder"', 1), opening.call.partition(".")[0]
    code = "import ispasp" if opening.way == "ispasp" else f"from transformers import {module}"
    lines += [f"How: {_text(how)}." if how else "", "", "```python", code, "", f"model = {call}", "```", ""]
    if facts:
        lines += ["| | |", "|---|---|", *(f"| {_text(name)} | {_text(value)} |" for name, value in facts), ""]
    lines += ["| hidden dimension | units | kept |", "|---|--:|--:|"]
    lines += [f"| {_text(row['name'])} | {row['units']:,} | {row['kept']:,} |" for row in rows]
    return "\n".join([*lines, ""])


def replaces(path: Path) -> bool:
    """Whether a card may be written there: over nothing, or over one of ours."""
    try:
        return MARK in path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False


def _base(model: Any) -> str:
    """The name of the dense model on the hub, if it came from there."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    return name if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and not Path(name).exists() else ""


def _text(value: object) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", html.escape(" ".join(str(value).split()), quote=False))


def options_text(settings: Mapping[str, Any]) -> str:
    """The options that decided the result, on one line."""
    names = ("method", "keep", "order", "compensate", "round_to", "bias", "uniform")
    found = [f"{name}={settings[name]}" for name in names if settings.get(name) not in (None, False)]
    versions = settings.get("versions", {})
    return ", ".join([*found, *(f"{name} {versions[name]}" for name in ("ispasp", "torch") if name in versions)])
