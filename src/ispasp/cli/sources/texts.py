"""Text: lines of a file or a column of a data set, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.huggingface import tokenizer
from ispasp.cli.sources.loaded import Loaded
from ispasp.errors import InputError
from ispasp.files.reading import is_regular

_LARGEST = 2**30  # bytes of a text file, all of which is tokenised
_STEP = 16  # lengths are rounded up to it: every other shape is traced anew


def from_text(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """The lines of a text file that are not empty."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    return tokenised(lines, None, f"{len(lines):,} lines of {path}", loaded, wanted)


def read_text(path: Path) -> str:
    """All of a file of text."""
    if not is_regular(path) or path.stat().st_size > _LARGEST:
        raise InputError(f"{path} is no text of at most {_LARGEST:,} bytes: pass a smaller file")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is neither an image folder, an .npz file nor UTF-8 text ({error}): write arrays with "
            "numpy.savez(path, x=...), text with one example per line"
        ) from error


def tokenised(
    lines: Sequence[str],
    labels: Tensor | None,
    text: str,
    loaded: Loaded,
    wanted: Wanted,
    *,
    pairs: Sequence[str] | None = None,
    classes: tuple[str, ...] = (),
) -> Examples:
    """Examples from short to long: a batch is padded to its longest, and padding is no data.

    `pairs`: the second texts of pairs.
    """
    if not lines:
        raise InputError(f"{text}: there is nothing in it; write one example per line")
    words = tokenizer(loaded.tokenizer)
    limit = min(wanted.length, loaded.longest, words.model_max_length)
    second = None if pairs is None else list(pairs)
    tokens = words(list(lines), second, truncation=True, max_length=limit, padding=False)
    lengths = [len(ids) for ids in tokens["input_ids"]]
    order = sorted(range(len(lines)), key=lengths.__getitem__)

    def read(numbers: Sequence[int]) -> dict[str, Any]:
        chosen = [order[i] for i in numbers]
        longest = min(-(-max(lengths[i] for i in chosen) // _STEP) * _STEP, limit)
        rows = [{name: values[i] for name, values in tokens.items()} for i in chosen]
        batch = words.pad(rows, padding="max_length", max_length=longest, return_tensors="pt")
        return loaded.complete({name: value for name, value in batch.items() if name in loaded.parameters})

    sorted_labels = None if labels is None else labels[torch.tensor(order)]
    remedy = f"pass a smaller --length (now {limit} tokens), or data of its kind"
    return Examples(len(lines), read, text, sorted_labels, tokenizer=words, classes=classes, remedy=remedy)
