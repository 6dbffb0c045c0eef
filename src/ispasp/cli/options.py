"""Arguments and options that several commands share, one by one and in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ispasp.api.survey import KINDS
from ispasp.cli import choices
from ispasp.cli.alive import LOG
from ispasp.cli.checks import numbers
from ispasp.cli.sources import Loaded, Wanted, load_data, load_model, runs, sizes

ALL_KINDS = ",".join(KINDS)
DATA, WHAT, IMAGES = "Data", "What to prune", "Images"

Model = Annotated[
    str,
    typer.Argument(
        help="torchvision:NAME, timm:NAME, hf:FOLDER_OR_NAME, path/to/file.py:factory, or a folder that `ispasp prune` "
        "wrote. Options follow a name: torchvision:resnet18:num_classes=10, nets.py:build:width=32."
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="Safetensors file or state dict (.pt, .pth); or pretrained: torchvision and timm then fetch theirs."
    ),
]
Dense = Annotated[str, typer.Option("--model", help="The dense model of a pruned folder, if the folder cannot tell.")]
TaskClass = Annotated[
    choices.Task | None, typer.Option("--task", help="Class of a Hugging Face model. Default: as its config says.")
]
Data = Annotated[
    str,
    typer.Option(
        help="Image folder, .npz, text file (one example per line), table (.csv, .tsv), hf-dataset:NAME; or random, to "
        "try it out. Sub-folders of images are classes: a number is the class itself.",
        rich_help_panel=DATA,
    ),
]
Labelled = Annotated[
    str,
    typer.Option(
        "--data",
        help="Data with labels: image folder with one sub-folder per class, .npz, table (.csv, .tsv), hf-dataset:NAME.",
        rich_help_panel=DATA,
    ),
]
ExampleCount = Annotated[
    int, typer.Option("--examples", help="Calibration examples, spread over the data.", min=1, rich_help_panel=DATA)
]
BatchSize = Annotated[int, typer.Option(help="Examples in a batch.", min=1, rich_help_panel=DATA)]
ImageSize = Annotated[
    int | None,
    typer.Option(help="Side of images in pixels. Default: the model's, else 224.", min=1, rich_help_panel=IMAGES),
]
Resize = Annotated[
    int | None,
    typer.Option(
        help="Shorter side of images before their centre is cut out. Default: the model's, else 8/7 of --size.",
        min=1,
        rich_help_panel=IMAGES,
    ),
]
Mean = Annotated[
    str,
    typer.Option(
        help="Mean of pixels, such as 0.5,0.5,0.5. Default: the model's, else ImageNet's.", rich_help_panel=IMAGES
    ),
]
Std = Annotated[str, typer.Option(help="Standard deviation of pixels, alike.", rich_help_panel=IMAGES)]
InputSize = Annotated[str, typer.Option(help="Size of one random input, such as 3x224x224.", rich_help_panel=DATA)]
Key = Annotated[
    str,
    typer.Option(
        help="Array of an .npz (default: the first), or column of a table or data set; two columns of a table are a "
        "pair of texts.",
        rich_help_panel=DATA,
    ),
]
Labels = Annotated[
    str, typer.Option(help="Labels: array of an .npz, or column of a table or data set.", rich_help_panel=DATA)
]
Length = Annotated[int, typer.Option(help="Longest text, in tokens.", min=1, rich_help_panel=DATA)]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0, max=2**32 - 1)]
Device = Annotated[str, typer.Option(help="cpu, cuda, ... Default: cuda where there is one.")]
Scope = Annotated[
    choices.Scope, typer.Option(help="blocks, as the paper, or all: residual streams too.", rich_help_panel=WHAT)
]
Kinds = Annotated[
    str,
    typer.Option(
        help="Which units: neuron, filter, head; separated by commas.",
        autocompletion=choices.complete_kinds,
        rich_help_panel=WHAT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Out = Annotated[Path, typer.Option(help="Folder to write to.")]
Force = Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model."""

    model: Model
    weights: Weights = ""
    dense: Dense = ""
    task: TaskClass = None

    def load(self, seed: int = 0) -> Loaded:
        """Build it and fill it."""
        LOG.debug("loading %s", self.model)
        task = self.task.value if self.task else ""
        return load_model(self.model, self.weights, dense=self.dense, task=task, seed=seed)


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How data is read."""

    size: ImageSize = None
    resize: Resize = None
    mean: Mean = ""
    std: Std = ""
    key: Key = ""
    length: Length = 128

    def wanted(self, examples: int = 2, *, input_size: str = "", labels: str = "", seed: int = 0) -> Wanted:
        """All that is said about data."""
        mean, std = numbers("--mean", self.mean), numbers("--std", self.std)
        size = sizes(input_size)
        return Wanted(examples, self.size, size, self.key, labels, self.length, seed, self.resize, mean, std)


def one_batch(loaded: Loaded, data: str, wanted: Wanted) -> Any:
    """Two examples that the model runs on: random ones unless data is named."""
    examples = load_data(data, loaded, wanted)
    runs(loaded, examples)
    return examples.read(examples.some(2))
