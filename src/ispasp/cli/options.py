"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ispasp.api.files import FILES
from ispasp.cli.sources import Loaded, Wanted, is_saved, load_data, runs, sizes
from ispasp.errors import InputError, visible

DATA, WHAT = "Data", "What to prune"

Model = Annotated[
    str,
    typer.Argument(
        help="torchvision:NAME, timm:NAME, hf:FOLDER_OR_NAME, path/to/file.py:factory, or a folder that `ispasp prune` "
        "wrote. Options follow a name: torchvision:resnet18:num_classes=10."
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="Safetensors file or state dict (.pt, .pth); or pretrained: torchvision and timm then fetch theirs."
    ),
]
Dense = Annotated[str, typer.Option("--model", help="The dense model of a pruned folder, if the folder cannot tell.")]
Data = Annotated[
    str,
    typer.Option(
        help="Image folder, .npz, text file (one example per line), hf-dataset:NAME; or random, to try it out.",
        rich_help_panel=DATA,
    ),
]
ExampleCount = Annotated[
    int, typer.Option("--examples", help="Calibration examples, spread over the data.", min=1, rich_help_panel=DATA)
]
BatchSize = Annotated[int, typer.Option(help="Examples in a batch.", min=1, rich_help_panel=DATA)]
ImageSize = Annotated[
    int | None,
    typer.Option(help="Side of images in pixels. Default: the model's, else 224.", min=1, rich_help_panel=DATA),
]
InputSize = Annotated[str, typer.Option(help="Size of one random input, such as 3x224x224.", rich_help_panel=DATA)]
Key = Annotated[
    str, typer.Option(help="Array of an .npz (default: the first) or column of a data set.", rich_help_panel=DATA)
]
Labels = Annotated[str, typer.Option(help="Labels: array of an .npz or column of a data set.", rich_help_panel=DATA)]
Length = Annotated[int, typer.Option(help="Longest text, in tokens.", min=1, rich_help_panel=DATA)]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0, max=2**32 - 1)]
Device = Annotated[str, typer.Option(help="cpu, cuda, ... Default: cuda where there is one.")]
Scope = Annotated[str, typer.Option(help="blocks, as the paper, or all: residual streams too.", rich_help_panel=WHAT)]
Kinds = Annotated[
    str, typer.Option(help="Which units: neuron, filter, head; separated by commas.", rich_help_panel=WHAT)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Out = Annotated[Path, typer.Option(help="Folder to write to.")]


def listed(text: str) -> tuple[str, ...]:
    """Names separated by commas.

    >>> listed("neuron, head")
    ('neuron', 'head')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def one_of(option: str, text: str, *known: str) -> str:
    """The text, if it is among those known.

    >>> one_of("--order", "backwards", "sequential", "oneshot", "global")
    Traceback (most recent call last):
    ispasp.errors.InputError: --order backwards: choose sequential, oneshot or global
    """
    if text not in known:
        raise InputError(f"{option} {text or repr(text)}: choose {', '.join(known[:-1])} or {known[-1]}")
    return text


def finite(option: str, value: float) -> float:
    """The number, unless it is infinite or none at all.

    >>> finite("--ridge", float("inf"))
    Traceback (most recent call last):
    ispasp.errors.InputError: --ridge inf: pass a finite number
    """
    if not math.isfinite(value):
        raise InputError(f"{option} {value}: pass a finite number")
    return value


def some_of(option: str, text: str, *known: str) -> tuple[str, ...]:
    """Names separated by commas, all among those known, and at least one.

    >>> some_of("--kinds", "head,neuron", "neuron", "filter", "head")
    ('head', 'neuron')
    """
    return tuple(one_of(option, name, *known) for name in listed(text) or ("",))


def writable(out: Path, *, model: bool = False, option: str = "--out ") -> Path:
    """The folder, if it can be written: told before the work, not after it. `model`: a model is to be saved there.

    >>> writable(Path(__file__))
    Traceback (most recent call last):
    ispasp.errors.InputError: --out ...options.py: there is a file of that name: pass the name of a folder
    """
    nearest = out.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        name = "that name" if nearest == out.absolute() else f"the name {nearest}"
        raise InputError(f"{option}{out}: there is a file of {name}: pass the name of a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{option}{out}: {nearest} may not be written: pass another folder")
    foreign = [name for name in FILES if (out / name).exists()]
    if model and foreign and not is_saved(out):
        raise InputError(f"{option}{out} holds {foreign[0]}, which `ispasp prune` did not write: pass another folder")
    return out


def one_batch(loaded: Loaded, data: str, wanted: Wanted) -> Any:
    """Two examples that the model runs on: random ones unless data is named."""
    examples = load_data(data, loaded, wanted)
    runs(loaded, examples)
    return examples.read(examples.some(2))


def wanted(input_size: str, size: int | None, key: str, length: int) -> Wanted:
    """What is to be known about the two examples of `survey` and `export`.

    >>> wanted("3x8x8", None, "", 128).input_size
    (3, 8, 8)
    """
    return Wanted(2, size, sizes(input_size), key=key, length=length)


def warn(warnings: Sequence[str]) -> None:
    """Say what must not be overlooked, on standard error."""
    for text in warnings:
        typer.secho(f"WARNING: {visible(text)}", err=True, fg=typer.colors.YELLOW, bold=True)
