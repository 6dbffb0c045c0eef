"""Data sets of Hugging Face: a column of text or of images, by the name the user gives."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.huggingface import quiet_hub
from ispasp.cli.sources.images import REMEDY
from ispasp.cli.sources.loaded import Loaded
from ispasp.cli.sources.tables import LABELS, TEXTS
from ispasp.cli.sources.texts import tokenised
from ispasp.errors import InputError, MissingExtraError

_IMAGES = ("image", "img")


def from_dataset(spec: str, loaded: Loaded, wanted: Wanted) -> Examples:
    """A column of a data set: `hf-dataset:NAME`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`; the split is "train" unless said.

    A model that takes tokens gets the column of text, any other the column of images.
    """
    name, rows = _loaded(spec)
    columns = list(rows.column_names)
    known = TEXTS if loaded.tokenizer and not loaded.input_size else _IMAGES
    key = wanted.key or next((column for column in known if column in columns), "")
    if key not in columns:
        what = "text" if known is TEXTS else "images"
        raise InputError(f"hf-dataset:{name} has the columns {', '.join(columns)}: pass --key, the one with the {what}")
    text = f"{len(rows):,} rows of {name}"
    if not len(rows):
        raise InputError(f"{text}: there is nothing in it; pass another split, as hf-dataset:{name}:SPLIT")
    labels = _labels(rows, columns, name, wanted)
    first = rows[0][key]
    if isinstance(first, str):
        return tokenised([str(line or "") for line in rows[key]], labels, text, loaded, wanted)
    if not hasattr(first, "convert"):
        raise InputError(
            f"column {key!r} of hf-dataset:{name} holds {type(first).__name__}: pass --key, a column of text or images"
        )
    prepare = wanted.preprocessing(loaded.preprocessing)

    def read(numbers: Sequence[int]) -> Any:
        pictures = [rows[int(i)][key].convert("RGB") for i in numbers]
        return loaded.call(torch.stack([prepare.image(picture) for picture in pictures]))

    remedy = REMEDY.format(prepare.size)
    return Examples(len(rows), read, text, labels, remedy=remedy, preprocessing=prepare)


def _loaded(spec: str) -> tuple[str, Any]:
    name, *more = spec.split(":")
    if not name or len(more) > 2:
        raise InputError(f"hf-dataset:{spec} names no data set: pass hf-dataset:NAME, NAME:SPLIT or NAME:CONFIG:SPLIT")
    try:
        package = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError(
            "hf-dataset: needs the package datasets: pip install datasets; or pass a text file or an image folder"
        ) from error
    quiet_hub()
    split = more[-1] if more and more[-1] else "train"
    try:
        return name, package.load_dataset(name, *more[:-1], split=split)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"hf-dataset:{spec} cannot be loaded ({reason[:200]}): check its name, its split and the network, or pass "
            "a text file or an image folder"
        ) from error


def _labels(rows: Any, columns: Sequence[str], name: str, wanted: Wanted) -> Tensor | None:
    column = wanted.labels or next((column for column in LABELS if column in columns), "")
    if not column:
        return None
    if column not in columns:
        raise InputError(f"hf-dataset:{name} has the columns {', '.join(columns)}: pass --labels, the one with labels")
    values = list(rows[column])
    if not all(isinstance(value, int) for value in values):
        if wanted.labels:
            raise InputError(f"column {column!r} of hf-dataset:{name} is no column of class numbers: pass --labels so")
        return None
    return torch.tensor(values)
