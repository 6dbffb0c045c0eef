"""Tables of text: .csv and .tsv files with a column of text and, where there is one, a column of labels."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ispasp.cli.sources.classes import numbered
from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.loaded import Loaded
from ispasp.cli.sources.texts import read_text, tokenised
from ispasp.errors import InputError

ENDINGS = {".csv": ",", ".tsv": "\t"}
TEXTS, LABELS = ("text", "sentence", "content", "premise"), ("label", "labels")


def from_table(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """Rows of a table. The first row names the columns; a column given by its number, from 0, means there are no names.

    `--key premise,hypothesis` takes two columns, as a pair of texts.
    """
    header, rows = _rows(path, wanted)
    keys = [part.strip() for part in wanted.key.split(",") if part.strip()]
    keys = keys or [name for name in TEXTS if name in header][:1]
    if not keys or len(keys) > 2 or not set(keys) <= set(header):
        raise InputError(f"{path} has the columns {', '.join(header)}: pass --key, the one with the text")
    label = wanted.labels or next((name for name in LABELS if name in header), "")
    if label and label not in header:
        raise InputError(f"{path} has the columns {', '.join(header)}: pass --labels, the one with the labels")
    columns = [[row[header.index(key)] for row in rows] for key in keys]
    text = f"{len(rows):,} rows of {path}"
    labels, classes = numbered([row[header.index(label)].strip() for row in rows]) if label and rows else (None, ())
    return tokenised(columns[0], labels, text, loaded, wanted, pairs=[*columns, None][1], classes=classes)


def _rows(path: Path, wanted: Wanted) -> tuple[list[str], Sequence[list[str]]]:
    mark = ENDINGS[path.suffix.lower()]
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if mark == "," else csv.QUOTE_NONE  # a quote in a .tsv file is a quote
    try:
        found = list(csv.reader(io.StringIO(read_text(path), newline=""), delimiter=mark, quoting=quoting, strict=True))
    except csv.Error as error:
        raise InputError(f"{path} cannot be read as a table ({error}): write it with Python's csv module") from error
    rows = [row for row in found if any(cell.strip() for cell in row)]
    if not rows:
        raise InputError(f"{path}: there is nothing in it; write one example per row below the names of the columns")
    asked = [*wanted.key.split(","), wanted.labels]
    unnamed = all(part.strip().isdecimal() for part in asked if part) and any(asked) and not set(asked) & set(rows[0])
    header = [str(i) for i in range(len(rows[0]))] if unnamed else [cell.strip() for cell in rows.pop(0)]
    short = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
    if short is not None:
        raise InputError(
            f"{path}: row {short + 1} has {len(rows[short])} columns, the others have {len(header)}: write it anew"
        )
    return header, rows
