"""Labelled sentences, or pairs of them, from tab-separated files; and batches of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp_lab.data.folder import available, find

_KNOWN = ("sst2", "snli", "xnli")
_HEADERS = {"label", "gold_label"}
_ALIASES = {"contradictory": "contradiction"}  # the training file of XNLI says so
_TRAIN, _OTHER, _TEST = ("train",), ("validation", "dev"), ("test",)
_MULTIPLE = 8  # lengths are padded to its multiples: few different shapes, little padding

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sentence:
    """One example: one text or two, and the label as it stands in the file."""

    texts: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Texts:
    """Examples to train on and to test on; `labels[i]` is the name of class i."""

    train: tuple[Sentence, ...]
    test: tuple[Sentence, ...]
    labels: tuple[str, ...]

    def some(self, train: int, tested: int, seed: int = 0) -> Texts:
        """That many of each, drawn at random; 0 for all."""
        return Texts(_drawn(self.train, train, seed), _drawn(self.test, tested, 0), self.labels)


def load_texts(name: str, language: str | None = None) -> Texts:
    """Sentences by name (sst2, snli, xnli in the data folder's nlp), or from a folder of .tsv files.

    A line is `text <tab> label` or `text <tab> text <tab> label`; a first line of column names is skipped. train*.tsv
    is for training and test*.tsv for testing; where one is missing, validation*.tsv or dev*.tsv stands in. Where there
    is only one such file, every third of its triples is for testing: the three hypotheses of a premise stay together.
    With a `language` only files such as dev-en.tsv count.

    >>> load_texts("no-such-folder")
    Traceback (most recent call last):
    ispasp.errors.InputError: data 'no-such-folder': choose sst2, snli or xnli, or pass a folder with train.tsv and
    test.tsv
    """
    known = name in _KNOWN or available(f"nlp/{name}")
    folder = find(f"nlp/{name}") if known else Path(name)
    if not folder.is_dir():
        raise InputError(f"data {name!r}: choose sst2, snli or xnli, or pass a folder with train.tsv and test.tsv")
    train, test, other = (_files(folder, beginnings, language) for beginnings in (_TRAIN, _TEST, _OTHER))
    if (not train or not test) and other:
        train, test = train or other, test or other
    if not train or not test:
        raise InputError(f"{folder} has neither train*.tsv and test*.tsv, nor validation*.tsv or dev*.tsv: add them")
    learnt, tested = (tuple(s for path in paths for s in read_sentences(path)) for paths in (train, test))
    if train == test:
        learnt, tested = divided(learnt)
    labels = tuple(sorted({sentence.label for sentence in learnt}))
    unknown = {sentence.label for sentence in tested} - set(labels)
    if unknown:
        raise InputError(f"{folder} is tested on label {min(unknown)!r}, which is not among {list(labels)}: fix a file")
    return Texts(learnt, tested, labels)


def divided(sentences: Sequence[Sentence]) -> tuple[tuple[Sentence, ...], tuple[Sentence, ...]]:
    """Two thirds to train on, one third to test on; three sentences in a row stay together.

    >>> parts = divided([Sentence((str(i),), "a") for i in range(10)])
    >>> [[s.texts[0] for s in part] for part in parts]
    [['0', '1', '2', '3', '4', '5', '9'], ['6', '7', '8']]
    """
    rest = [number // 3 % 3 == 2 for number in range(len(sentences))]
    learnt = tuple(s for s, tests in zip(sentences, rest, strict=True) if not tests)
    return learnt, tuple(s for s, tests in zip(sentences, rest, strict=True) if tests)


def read_sentences(path: Path) -> list[Sentence]:
    """The examples of one file.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "a.tsv"
    ...     _ = path.write_text("sentence\\tlabel\\nfine work\\t1\\n")
    ...     read_sentences(path)
    [Sentence(texts=('fine work',), label='1')]
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        cells = [cell.strip() for cell in line.split("\t")]
        if cells == [""] or (number == 0 and cells[-1].lower() in _HEADERS):
            continue
        if len(cells) not in (2, 3) or not cells[-1]:
            raise InputError(
                f"{path} line {number + 1} has {len(cells)} columns: write text, maybe a second, and label"
            )
        found.append(Sentence(tuple(cells[:-1]), _ALIASES.get(cells[-1], cells[-1])))
    return found


def similar_pairs(part: str) -> tuple[list[tuple[str, str]], Tensor]:
    """STS-B from nlp/stsb: pairs of sentences, and how similar people find them, from 0 to 5.

    Part is "train" (5,749), "dev" (1,500) or "test" (1,379).
    """
    lines = (find("nlp/stsb") / f"sts-{part}.csv").read_text(encoding="utf-8").split("\n")
    cells = [line.split("\t") for line in lines if line]
    return [(row[5], row[6]) for row in cells], torch.tensor([float(row[4]) for row in cells])


def token_blocks(text: str, tokenizer: Any, count: int, length: int, size: int) -> list[Batch]:
    """The first `count` blocks of `length` tokens, in batches of `size`; what fills no block is left out."""
    ids = torch.tensor(tokenizer(text)["input_ids"])[: count * length]
    blocks = ids[: len(ids) // length * length].reshape(-1, length)
    return [{"input_ids": part} for part in torch.split(blocks, size)]


def token_batches(
    sentences: Sequence[Sentence], labels: Sequence[str], tokenizer: Any, size: int, length: int, *, group: int = 0
) -> list[Batch]:
    """Batches of tokens with "labels", as a Hugging Face model takes them.

    Sentences of like length go together: `group` at a time are sorted, so that with shuffled sentences batches differ
    from seed to seed; 0 sorts all. Texts longer than `length` tokens are cut.
    """
    numbers = {label: number for number, label in enumerate(labels)}
    texts = [[sentence.texts[k] for sentence in sentences] for k in range(len(sentences[0].texts))]
    encoded: Mapping[str, list[list[int]]] = tokenizer(*texts, truncation=True, max_length=length)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    batches = []
    for start in range(0, len(sentences), group or len(sentences)):
        part = range(start, min(start + (group or len(sentences)), len(sentences)))
        order = sorted(part, key=lambda i: lengths[i])
        for k in range(0, len(order), size):
            chosen = order[k : k + size]
            rows = [{key: values[i] for key, values in encoded.items()} for i in chosen]
            batch = tokenizer.pad(rows, pad_to_multiple_of=_MULTIPLE, return_tensors="pt")
            batches.append({**batch, "labels": torch.tensor([numbers[sentences[i].label] for i in chosen])})
    return batches


def _files(folder: Path, beginnings: Sequence[str], language: str | None) -> list[Path]:
    paths = sorted(path for path in folder.glob("*.tsv") if path.name.startswith(tuple(beginnings)))
    return [path for path in paths if language is None or f"-{language}." in path.name]


def _drawn(sentences: tuple[Sentence, ...], count: int, seed: int) -> tuple[Sentence, ...]:
    if not count:
        return sentences
    order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(seed))[:count]
    return tuple(sentences[int(i)] for i in order)
