"""How pruned transformers of many families open without ispasp: tiny random models, half of all units removed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ispasp
from ispasp.errors import IspaspError
from ispasp_lab.zoo.case import Case
from ispasp_lab.zoo.language import cases

FAMILIES = (
    "bert_masked_lm roberta distilbert modernbert gpt2 opt gpt_neox falcon llama mistral qwen2 qwen3 gemma2 phi3 "
    "cohere granite mixtral t5 bart whisper vit clip"
).split()
KINDS = {"neurons": ("neuron",), "neurons and heads": ("neuron", "head")}


@dataclass(frozen=True)
class Row:
    """A family, what was pruned, the way its folder opens, and why not by a simpler one."""

    family: str
    pruned: str
    way: str
    note: str


def run(only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield two rows for each family."""
    known = {case.name.rpartition("/")[2]: case for case in cases()}
    for name in only or FAMILIES:
        for pruned, kinds in KINDS.items():
            yield Row(name, pruned, *_saved(known[name], kinds))


def _saved(case: Case, kinds: Any) -> tuple[str, str]:
    model, batch = case.build(), case.batch()
    try:
        plan = ispasp.survey(model, batch, kinds=kinds).plan(0.5)
        small = ispasp.apply_(copy.deepcopy(model), plan)
        with tempfile.TemporaryDirectory() as folder:
            saved = ispasp.save(small, folder, plan, example=batch)
    except IspaspError as error:
        return "not pruned", str(error)
    return saved.way, saved.note.partition(" (")[2].removesuffix(")")


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row]) -> str:
    """A table with one line for each family."""
    lines = [
        "# How pruned transformers open",
        "",
        "Written by `ispasp bench families`: tiny random models, half of the units removed, then `ispasp.save`.",
        "`plain` is `from_pretrained(folder)`, `code` the same with `trust_remote_code=True`.",
        "The last column says why it is not `plain`.",
        "",
        "| family | " + " | ".join(KINDS) + " | why |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.family for row in rows):
        found = {row.pruned: row for row in rows if row.family == name}
        why = next((row.note for row in reversed(found.values()) if row.note), "")
        lines.append("| " + " | ".join([name, *(found[each].way for each in KINDS), why]) + " |")
    return "\n".join([*lines, ""])


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the page."""
    path.write_text(as_table(rows), encoding="utf-8")
