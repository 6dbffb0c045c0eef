"""Text files, tables and Hugging Face data sets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ispasp.cli.huggingface import quiet_hub, tokenizer
from ispasp.cli.loaded import Examples, Loaded, numbered, pictures
from ispasp.cli.options import Wanted
from ispasp.errors import InputError, failing_as, needed
from ispasp.files.reading import is_regular

_LARGEST = 2**30  # bytes of a text file, all of which is tokenised
_STEP = 16  # lengths are rounded up to it, since every new shape is traced
_TEXTS, _IMAGES, _LABELS = ("text", "sentence", "content", "premise"), ("image", "img"), ("label", "labels")


def from_text(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """The lines of a text file that are not empty."""
    lines = [line for line in _read(path).splitlines() if line.strip()]
    return _tokenised([lines], None, f"{len(lines):,} lines of {path}", loaded, wanted)


def from_table(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """The rows of a .csv or .tsv file with column names in the first row; columns by number if it has none.

    `--key premise,hypothesis` names two columns, for pairs of texts.
    """
    header, rows = _rows(path, wanted)
    keys = [part.strip() for part in wanted.key.split(",") if part.strip()] or [""]
    keys = [_column(path, header, key, _TEXTS, "--key", "text") for key in keys]
    if len(keys) > 2:
        raise InputError(f"--key {wanted.key}: pass one column of {path}, or two for pairs of texts")
    label = _column(path, header, wanted.labels, _LABELS, "--labels")
    columns = [[row[header.index(key)] for row in rows] for key in keys]
    labels, classes = numbered([row[header.index(label)].strip() for row in rows]) if label and rows else (None, ())
    return _tokenised(columns, labels, f"{len(rows):,} rows of {path}", loaded, wanted, classes)


def from_dataset(spec: str, loaded: Loaded, wanted: Wanted) -> Examples:
    """A column of a Hugging Face data set, given as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT; the split is train.

    A model that takes tokens gets a column of text, any other a column of images.
    """
    rows, name = _dataset(spec), spec.partition(":")[0]
    where, columns = f"hf-dataset:{name}", list(rows.column_names)
    if not len(rows):
        raise InputError(f"{where} has no rows: pass another split, as {where}:SPLIT")
    usual, what = (_TEXTS, "text") if loaded.tokenizer and not loaded.input_size else (_IMAGES, "images")
    key = _column(where, columns, wanted.key, usual, "--key", what)
    label = _column(where, columns, wanted.labels, _LABELS, "--labels")
    numbers = list(rows[label]) if label else []
    labels = torch.tensor(numbers) if numbers and all(isinstance(number, int) for number in numbers) else None
    if wanted.labels and labels is None:
        raise InputError(f"column {label!r} of {where} does not hold class numbers: pass --labels, one that does")
    text, first = f"{len(rows):,} rows of {name}", rows[0][key]
    if isinstance(first, str):
        return _tokenised([[str(line or "") for line in rows[key]]], labels, text, loaded, wanted)
    if not hasattr(first, "convert"):
        raise InputError(
            f"column {key!r} of {where} holds {type(first).__name__}: pass --key, a column of text or images"
        )
    return pictures(len(rows), lambda i: rows[i][key].convert("RGB"), text, labels, loaded, wanted)


def _column(where: object, columns: Sequence[str], given: str, usual: Sequence[str], flag: str, what: str = "") -> str:
    """The column that the user names, else the first with a usual name. Without `what` there need be none."""
    found = given or next((name for name in usual if name in columns), "")
    if found not in columns and (found or what):
        raise InputError(
            f"{where} has the columns {', '.join(columns)}: pass {flag}, the one with the {what or 'labels'}"
        )
    return found


def _tokenised(
    columns: Sequence[Sequence[str]],
    labels: Tensor | None,
    text: str,
    loaded: Loaded,
    wanted: Wanted,
    classes: tuple[str, ...] = (),
) -> Examples:
    """Tokenise one column of texts, or two of pairs, and sort by length: a batch is padded to its longest."""
    count = len(columns[0])
    if not count:
        raise InputError(f"{text}: there is nothing in it; write one example per line")
    words = tokenizer(loaded.tokenizer)
    limit = min(wanted.length, loaded.longest, words.model_max_length)
    tokens = words(*map(list, columns), truncation=True, max_length=limit, padding=False)
    lengths = [len(ids) for ids in tokens["input_ids"]]
    order = sorted(range(count), key=lengths.__getitem__)

    def read(numbers: Sequence[int]) -> dict[str, Any]:
        chosen = [order[i] for i in numbers]
        longest = min(-(-max(lengths[i] for i in chosen) // _STEP) * _STEP, limit)
        rows = [{name: values[i] for name, values in tokens.items()} for i in chosen]
        batch = words.pad(rows, padding="max_length", max_length=longest, return_tensors="pt")
        return loaded.complete({name: value for name, value in batch.items() if name in loaded.parameters})

    sorted_labels = None if labels is None else labels[torch.tensor(order)]
    remedy = f"pass a smaller --length (now {limit} tokens), or other data"
    return Examples(count, read, text, sorted_labels, tokenizer=words, classes=classes, remedy=remedy)


def _read(path: Path) -> str:
    if not is_regular(path) or path.stat().st_size > _LARGEST:
        raise InputError(f"{path} is not a text file of at most {_LARGEST:,} bytes: pass a smaller one")
    remedy = "write arrays with numpy.savez(path, x=...), text with one example per line"
    with failing_as(InputError, f"{path} is neither an image folder, an .npz file nor UTF-8 text", remedy):
        return path.read_bytes().decode("utf-8-sig")


def _rows(path: Path, wanted: Wanted) -> tuple[list[str], Sequence[list[str]]]:
    mark = "," if path.suffix.lower() == ".csv" else "\t"
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if mark == "," else csv.QUOTE_NONE  # a quote in a .tsv file is a quote
    text = io.StringIO(_read(path), newline="")
    with failing_as(InputError, f"{path} cannot be read as a table", "write it with Python's csv module"):
        found = list(csv.reader(text, delimiter=mark, quoting=quoting, strict=True))
    rows = [row for row in found if any(cell.strip() for cell in row)]
    if not rows:
        raise InputError(f"{path}: there is nothing in it; write column names, then one example per row")
    asked = [part for part in (*wanted.key.split(","), wanted.labels) if part]
    unnamed = bool(asked) and all(part.strip().isdecimal() for part in asked) and not set(asked) & set(rows[0])
    header = [str(i) for i in range(len(rows[0]))] if unnamed else [cell.strip() for cell in rows.pop(0)]
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise InputError(f"{path}: row {number} has {len(row)} columns, the others have {len(header)}: correct it")
    return header, rows


def _dataset(spec: str) -> Any:
    name, *more = spec.split(":")
    if not name or len(more) > 2:
        raise InputError(f"hf-dataset:{spec} names no data set: pass hf-dataset:NAME, NAME:SPLIT or NAME:CONFIG:SPLIT")
    package = needed("datasets", "hf-dataset:")
    quiet_hub()
    remedy = "check its name, its split and the network, or pass a text file or an image folder"
    with failing_as(InputError, f"hf-dataset:{spec} cannot be loaded", remedy):
        return package.load_dataset(name, *more[:-1], split=(more or [""])[-1] or "train")
