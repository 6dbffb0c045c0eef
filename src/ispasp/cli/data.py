"""Load the examples that users name: texts, tables, data sets, random inputs, image folders and .npz."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ispasp.cli.huggingface import quiet_hub, tokenizer
from ispasp.cli.loaded import Examples, Labels, Loaded, Preprocessing, numbered, pictures, runs
from ispasp.cli.options import Sample, Wanted
from ispasp.errors import InputError, failing_as, needed
from ispasp.files import is_regular, memory

_LARGEST = 2**30  # bytes of a text file, all of which is tokenised
_STEP = 16  # lengths are rounded up to it, since every new shape is traced
_TEXT_COLUMNS = ("text", "sentence", "content", "premise")
_IMAGE_COLUMNS, _LABEL_COLUMNS = ("image", "img"), ("label", "labels")


def from_text(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """The lines of a text file that are not empty."""
    lines = [line for line in _text_of(path).splitlines() if line.strip()]
    return _tokenised([lines], f"{len(lines):,} lines of {path}", loaded, wanted, (None, ()))


def from_table(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """The rows of a .csv or .tsv file with column names in the first row; columns by number if it has none.

    `--key premise,hypothesis` names two columns, for pairs of texts.
    """
    header, rows = _rows(path, wanted)
    keys = [part.strip() for part in wanted.key.split(",") if part.strip()] or [""]
    keys = [_column(path, header, key, _TEXT_COLUMNS, "--key", "text") for key in keys]
    if len(keys) > 2:
        raise InputError(f"--key {wanted.key}: pass one column of {path}, or two for pairs of texts")
    label = _column(path, header, wanted.labels, _LABEL_COLUMNS, "--labels")
    columns = [[row[header.index(key)] for row in rows] for key in keys]
    labels = numbered([row[header.index(label)].strip() for row in rows]) if label and rows else (None, ())
    return _tokenised(columns, f"{len(rows):,} rows of {path}", loaded, wanted, labels)


def from_dataset(spec: str, loaded: Loaded, wanted: Wanted) -> Examples:
    """A column of a Hugging Face data set, given as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT; the split is train.

    A model that takes tokens gets a column of text, any other a column of images.
    """
    rows, name = _dataset(spec), spec.partition(":")[0]
    where, columns = f"hf-dataset:{name}", list(rows.column_names)
    if not len(rows):
        raise InputError(f"{where} has no rows: pass another split, as {where}:SPLIT")
    usual, what = (_TEXT_COLUMNS, "text") if loaded.tokenizer and not loaded.input_size else (_IMAGE_COLUMNS, "images")
    key = _column(where, columns, wanted.key, usual, "--key", what)
    label = _column(where, columns, wanted.labels, _LABEL_COLUMNS, "--labels")
    numbers = list(rows[label]) if label else []
    labels = torch.tensor(numbers) if numbers and all(isinstance(number, int) for number in numbers) else None
    if wanted.labels and labels is None:
        raise InputError(f"column {label!r} of {where} does not hold class numbers: pass --labels, one that does")
    text, first = f"{len(rows):,} rows of {name}", rows[0][key]
    if isinstance(first, str):
        return _tokenised([[str(line or "") for line in rows[key]]], text, loaded, wanted, (labels, ()))
    if not hasattr(first, "convert"):
        kind = type(first).__name__
        raise InputError(f"column {key!r} of {where} holds {kind}: pass --key, a column of text or images")
    return pictures(len(rows), lambda i: rows[i][key].convert("RGB"), text, (labels, ()), loaded, wanted)


def _column(where: object, columns: Sequence[str], given: str, usual: Sequence[str], flag: str, what: str = "") -> str:
    """The column that the user names, else the first with a usual name. Without `what` there need be none."""
    found = given or next((name for name in usual if name in columns), "")
    if found not in columns and (found or what):
        known = ", ".join(columns)
        raise InputError(f"{where} has the columns {known}: pass {flag}, the one with the {what or 'labels'}")
    return found


def _tokenised(columns: Sequence[Sequence[str]], text: str, loaded: Loaded, wanted: Wanted, labels: Labels) -> Examples:
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

    numbers, classes = labels
    numbers = None if numbers is None else numbers[torch.tensor(order)]
    remedy = f"pass a smaller --length (now {limit} tokens), or other data"
    return Examples(count, read, text, numbers, classes, tokenizer=words, remedy=remedy)


def _text_of(path: Path) -> str:
    if not is_regular(path) or path.stat().st_size > _LARGEST:
        raise InputError(f"{path} is not a text file of at most {_LARGEST:,} bytes: pass a smaller one")
    remedy = "write arrays with numpy.savez(path, x=...), text with one example per line"
    with failing_as(InputError, f"{path} is neither an image folder, an .npz file nor UTF-8 text", remedy):
        return path.read_bytes().decode("utf-8-sig")


def _rows(path: Path, wanted: Wanted) -> tuple[list[str], Sequence[list[str]]]:
    mark = "," if path.suffix.lower() == ".csv" else "\t"
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if mark == "," else csv.QUOTE_NONE  # a quote in a .tsv file is a quote
    text = io.StringIO(_text_of(path), newline="")
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


_SPLITS = {"train", "training", "calibration", "val", "valid", "validation", "dev", "test", "testing", "eval"}
_PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}
_LABELS = ("y", "labels", "label", "targets")
_SAVEZ = "write it with numpy.savez(path, x=...)"
_RANDOM = (
    "The inputs are random numbers, not data: this shows that it works, and says nothing about accuracy. "
    "Pass --data with an image folder, an .npz or a text file."
)


def load_data(spec: str, loaded: Loaded, wanted: Wanted) -> Examples:
    """Return the examples that `spec` names, as the model takes them."""
    kind, path = _kind(spec)
    if not kind:
        known = "an image folder, an .npz or text file, a table (.csv, .tsv), hf-dataset:NAME, or random to try it out"
        raise InputError(f"no data at {spec or repr(spec)}: pass {known}")
    found = _READERS[kind](path, loaded, wanted)
    if found.preprocessing is None and (wanted.mean or wanted.std or wanted.resize):
        raise InputError(f"--mean, --std and --resize are for images, {found.text} are none: leave them out")
    return found


def load_sample(loaded: Loaded, sample: Sample) -> Any:
    """Two examples, after a check that the model runs on them."""
    examples = load_data(sample.data, loaded, sample)
    runs(loaded, examples)
    return examples.read(examples.some(2))


def _kind(spec: str) -> tuple[str, Any]:
    """A key of `_READERS`, and what its reader takes."""
    name, colon, rest = spec.partition(":")
    if spec == "random" or (name == "hf-dataset" and colon):
        return name, rest
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return "folder", path
    ending = path.suffix.lower()
    return ((ending if ending in _READERS else "text") if path.is_file() else ""), path


def from_random(_: str, loaded: Loaded, wanted: Wanted) -> Examples:
    """Normal noise of the model's input size, or random tokens."""
    vocabulary = getattr(loaded.config, "vocab_size", None)
    generator = torch.Generator().manual_seed(wanted.seed)
    shape = wanted.input_size or loaded.input_size
    if wanted.input_size is None and loaded.keyword == "input_ids" and isinstance(vocabulary, int):
        shape = (min(wanted.length, loaded.longest, 32),)
        x = torch.randint(0, vocabulary, (wanted.examples, *shape), generator=generator)
    elif shape is None:
        raise InputError(f"the input size of {loaded.spec} is unknown: pass --input-size, such as 3x224x224 or 64")
    else:
        if wanted.size is not None and wanted.input_size is None:
            shape = (*shape[:-2], wanted.size, wanted.size)
        x = torch.randn((wanted.examples, *shape), generator=generator)
    text = f"{wanted.examples:,} random inputs {'x'.join(map(str, shape))}"
    remedy = "pass --input-size with the size of one input, such as 3x224x224, or --data"
    return Examples(len(x), lambda numbers: loaded.call(x[list(numbers)]), text, warnings=(_RANDOM,), remedy=remedy)


def from_images(folder: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """All images below a folder, labelled by the sub-folders of the first level.

    Sub-folders whose names are all numbers are class indices. Hidden files and folders are left out.
    """
    if loaded.reads_text:
        raise InputError(f"{folder} is a folder of images, and {loaded.spec} reads text: pass a text file")
    paths = sorted(_images(folder, set()))
    if not paths:
        raise InputError(f"no images in {folder}: pass a folder with .jpeg, .jpg, .png or similar files")
    labels: Labels = None, ()
    tops = [parts[0] for path in paths if len(parts := path.relative_to(folder).parts) > 1]
    if len(tops) == len(paths):
        _check_no_splits(folder, sorted(set(tops)))
        among = [path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
        labels = numbered(tops, among)
    text = f"{len(paths):,} images in {folder}"
    return pictures(len(paths), lambda i: _opened(paths[i]), text, labels, loaded, wanted)


def _opened(path: Path) -> Any:
    image = needed("PIL.Image", "reading images", "vision")
    remedy = "remove it, or save it again"
    with failing_as(InputError, f"{path} cannot be read as an image", remedy), image.open(path) as file:
        return file.convert("RGB")


def _images(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Image files below a folder. Links are followed, but no folder is entered twice below the same class."""
    here = folder.stat()
    if (here.st_dev, here.st_ino) in seen:
        return
    top = not seen
    seen.add((here.st_dev, here.st_ino))
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _images(path, set(seen) if top else seen)
        elif path.suffix.lower() in _PICTURES and path.is_file():
            yield path


def _check_no_splits(folder: Path, names: Sequence[str]) -> None:
    """Raise if sub-folders are splits of a data set (train, val), not classes."""
    splits = [name for name in names if name.lower() in _SPLITS]
    train = [name for name in splits if name.lower().startswith("train")]
    if splits and (len(splits) == len(names) or 0 < len(train) < len(splits)):
        first = [*train, *splits][0]
        raise InputError(f"{folder} has the splits {', '.join(splits)}, no classes: pass {folder}/{first}")


def from_npz(path: Path, loaded: Loaded, wanted: Wanted) -> Examples:
    """The first array of the file, or that of `--key`; bytes are images and are normalised.

    A Hugging Face model gets all arrays that its forward takes by name.
    """
    arrays = _read(path)
    prepare = loaded.preprocessing.changed(wanted)
    key = wanted.key or next(iter(arrays))
    labels = _labels(path, arrays, wanted, key)
    names = [name for name in arrays if name in loaded.parameters and name != "labels"] if loaded.keyword else []
    by_name = not wanted.key and loaded.keyword in names
    names = names if by_name else [key]
    chosen = {name: _tensor(_array(path, arrays, name), loaded, prepare) for name in names}
    first = chosen[names[0]]
    if any(not arrays[name].ndim or len(arrays[name]) != len(first) for name in names):
        raise InputError(f"{path}: the first axis of {', '.join(names)} must be the examples: save all like that")
    if not len(first):
        raise InputError(f"{path}: {names[0]!r} holds no example: pass an array with at least one")
    if labels is not None and len(labels) != len(first):
        raise InputError(f"{path} has {len(first)} examples and {len(labels)} labels: pass as many of each")

    def read(numbers: Sequence[int]) -> Any:
        rows = {name: tensor[list(numbers)] for name, tensor in chosen.items()}
        return loaded.complete(rows) if by_name else loaded.call(rows[key])

    given = ", ".join(f"{name} is {arrays[name].dtype} {arrays[name].shape}" for name in names)
    remedy = f"pass --key, or write arrays as the model takes them ({given})"
    prepared = prepare if any(_are_images(arrays[name], loaded) for name in names) else None
    text = f"{len(first):,} examples in {path}"
    return Examples(len(first), read, text, labels, remedy=remedy, preprocessing=prepared)


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(part.file_size for part in archive.infolist())
        if size > memory() // 2:  # a small archive may unpack to anything
            raise InputError(f"{path} takes {size:,} bytes unpacked, more than half of the memory: pass fewer examples")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        if "pickle" in reason or "not a zip" in reason:  # numpy would advise to trust the file
            reason = "no archive of numeric arrays"
        raise InputError(f"{path} cannot be read as .npz ({reason}): {_SAVEZ}") from error
    other = [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]
    if other or not arrays:
        raise InputError(f"{path} holds {f'{other[0]!r}, which is not an array' if other else 'no array'}: {_SAVEZ}")
    return arrays


def _array(path: Path, arrays: dict[str, Any], key: str) -> Any:
    if key not in arrays:
        raise InputError(f"{path} has no array {key!r}: it has {', '.join(arrays)}; pass one to --key or --labels")
    return arrays[key]


def _labels(path: Path, arrays: dict[str, Any], wanted: Wanted, key: str) -> Tensor | None:
    usual = (*_LABELS, f"y_{key[2:]}") if key.startswith("x_") else _LABELS  # x_train, y_train
    name = wanted.labels or next((name for name in usual if name in arrays and name != key), "")
    if not name:
        return None
    values = _array(path, arrays, name)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(f"{path}: {name!r} is {values.dtype} {values.shape}; labels are whole numbers (examples,)")
    return torch.from_numpy(values.astype(np.int64))


def _are_images(array: Any, loaded: Loaded) -> bool:
    return bool(array.dtype == np.uint8 and (array.ndim == 4 or (array.ndim == 3 and not loaded.reads_text)))


def _tensor(array: Any, loaded: Loaded, prepare: Preprocessing) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise InputError(f"an array of {array.dtype} is not an input: pass numbers")
    images = _are_images(array, loaded)
    if images:
        array = array[:, None] if array.ndim == 3 else array  # grey images
        if array.shape[-1] in (1, 3) and array.shape[1] not in (1, 3):
            array = np.moveaxis(array, -1, 1)  # colours first
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return prepare.normalise(tensor) if images else tensor.float() if array.dtype.kind == "f" else tensor.long()


_READERS: dict[str, Callable[[Any, Loaded, Wanted], Examples]] = {
    "random": from_random,
    "hf-dataset": from_dataset,
    "folder": from_images,
    ".npz": from_npz,
    **dict.fromkeys((".csv", ".tsv"), from_table),
    "text": from_text,
}
