"""From what users type to examples: `random`, an image folder, .npz, text, a table, `hf-dataset:NAME`."""

from __future__ import annotations

from pathlib import Path

from ispasp.cli.sources.arrays import from_npz
from ispasp.cli.sources.datasets import from_dataset
from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.generated import generated
from ispasp.cli.sources.images import from_images
from ispasp.cli.sources.loaded import Loaded
from ispasp.cli.sources.tables import ENDINGS as TABLES
from ispasp.cli.sources.tables import from_table
from ispasp.cli.sources.texts import from_text
from ispasp.errors import InputError

_DATASET = "hf-dataset:"


def load_data(spec: str, loaded: Loaded, wanted: Wanted) -> Examples:
    """The examples that `spec` names, as this model takes them.

    >>> from torch import nn
    >>> load_data("random", Loaded(nn.Identity(), "identity"), Wanted(examples=4, input_size=(3,))).read([0, 1]).shape
    torch.Size([2, 3])
    """
    found = _found(spec, loaded, wanted)
    if found.preprocessing is None and (wanted.mean or wanted.std or wanted.resize):
        raise InputError(f"--mean, --std and --resize are for images, {found.text} are none: leave them out")
    return found


def _found(spec: str, loaded: Loaded, wanted: Wanted) -> Examples:
    if spec == "random":
        return generated(loaded, wanted)
    if spec.startswith(_DATASET):
        return from_dataset(spec.removeprefix(_DATASET), loaded, wanted)
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return from_images(path, loaded, wanted)
    if not path.is_file():
        raise InputError(
            f"no data at {spec or repr(spec)}: pass an image folder, an .npz or text file, a table (.csv, .tsv), "
            "hf-dataset:NAME, or random to try it out"
        )
    kind = path.suffix.lower()
    read = from_npz if kind == ".npz" else from_table if kind in TABLES else from_text
    return read(path, loaded, wanted)


def sizes(text: str) -> tuple[int, ...] | None:
    """An input size such as 3x224x224.

    >>> sizes("3x224x224"), sizes("64"), sizes("")
    ((3, 224, 224), (64,), None)
    """
    if not text:
        return None
    parts = text.lower().replace(",", "x").split("x")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--input-size {text}: pass whole numbers such as 3x224x224, without the batch")
    return tuple(int(part) for part in parts)
