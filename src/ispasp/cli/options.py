"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ispasp.cli.sources import Examples, Loaded, Wanted, load_data, sizes

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
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)]
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


def one_batch(loaded: Loaded, data: str, input_size: str, size: int | None, length: int) -> Examples:
    """Two examples to run the model on: random ones unless data is named."""
    return load_data(data, loaded, Wanted(2, size, sizes(input_size), length=length))


def warn(warnings: tuple[str, ...]) -> None:
    """Say what must not be overlooked, on standard error."""
    for text in warnings:
        typer.secho(f"WARNING: {text}", err=True, fg=typer.colors.YELLOW, bold=True)
