"""Text: lines of a file or a column of a data set, as tokens."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.huggingface import tokenizer
from ispasp.cli.sources.loaded import Loaded
from ispasp.errors import InputError, MissingExtraError

_STEP = 16  # lengths are rounded up to it: every other shape is traced anew
_TEXTS, _LABELS = ("text", "sentence", "content", "premise"), ("label", "labels")


def from_text(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """The lines of a text file that are not empty."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is neither an image folder, an .npz file nor UTF-8 text ({error})") from error
    return _tokenised(lines, None, f"{len(lines):,} lines of {path}", loaded, wanted)


def from_dataset(name: str, loaded: Loaded, wanted: Wanted) -> Examples:
    """A column of text of a data set of Hugging Face: `hf-dataset:NAME` or `hf-dataset:NAME:SPLIT`."""
    try:
        package = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError(
            "hf-dataset: needs the package datasets: pip install datasets; or pass a text file or an image folder"
        ) from error
    name, _, split = name.partition(":")
    try:
        rows = package.load_dataset(name, split=split or "train")
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"hf-dataset:{name} cannot be loaded ({reason[:200]}): check its name and split") from error
    columns = list(rows.column_names)
    key = wanted.key or next((column for column in _TEXTS if column in columns), "")
    if key not in columns:
        raise InputError(f"hf-dataset:{name} has the columns {', '.join(columns)}: pass --key, the one with the text")
    column = wanted.labels or next((column for column in _LABELS if column in columns), "")
    labels = torch.tensor(list(rows[column])) if column else None
    return _tokenised(list(rows[key]), labels, f"{len(rows):,} rows of {name}", loaded, wanted)


def _tokenised(lines: Sequence[str], labels: Tensor | None, text: str, loaded: Loaded, wanted: Wanted) -> Examples:
    """Examples from short to long: a batch is padded to its longest, and padding is no data."""
    if not lines:
        raise InputError(f"{text}: there is nothing in it; one example per line")
    words = tokenizer(loaded.tokenizer)
    tokens = words(list(lines), truncation=True, max_length=wanted.length, padding=False)
    lengths = [len(ids) for ids in tokens["input_ids"]]
    order = sorted(range(len(lines)), key=lengths.__getitem__)

    def read(numbers: Sequence[int]) -> dict[str, Any]:
        chosen = [order[i] for i in numbers]
        longest = min(-(-max(lengths[i] for i in chosen) // _STEP) * _STEP, wanted.length)
        rows = [{name: values[i] for name, values in tokens.items()} for i in chosen]
        batch = words.pad(rows, padding="max_length", max_length=longest, return_tensors="pt")
        return loaded.complete({name: value for name, value in batch.items() if name in loaded.parameters})

    sorted_labels = None if labels is None else labels[torch.tensor(order)]
    return Examples(len(lines), read, text, sorted_labels, tokenizer=words)
