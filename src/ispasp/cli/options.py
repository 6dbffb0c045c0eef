"""Options that several commands share, alone and in groups, and the parsers of their values."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import torch
import typer
from torch import nn

from ispasp._survey import KINDS
from ispasp.errors import InputError, failing_as, visible

LOG = logging.getLogger("ispasp.cli")  # a DEBUG record names the stage that a command has come to
ALL = ",".join(KINDS)  # kinds of units
Parser = Callable[[str], Any]
DATA, WHAT, IMAGES = "Data", "What to prune", "Images"


def option(
    panel: str | None, text: str, *names: str, parser: Parser | None = None, completes: Iterable[str] = (), **more: Any
) -> Any:
    """An option under one heading of the help page. An InputError of its parser becomes a usage error.

    `completes` are names that a shell completes.
    """

    def parse(typed: str) -> Any:
        try:
            return parser(typed) if parser else typed
        except InputError as error:
            raise typer.BadParameter(f"{typed!r}: {error}") from error

    more |= {"parser": parse, "metavar": "TEXT"} if parser else {}
    more |= {"autocompletion": completion(completes)} if completes else {}
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def completion(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that completes one name, or the last of several with commas between them."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return complete


def kinds_of(text: str) -> tuple[str, ...]:
    """Parse --kinds."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or not set(names) <= set(KINDS):
        raise InputError(f"choose {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    return names


def colours(text: str, least: float = -math.inf) -> tuple[float, ...]:
    """Parse comma-separated numbers above `least`: one, or one per colour."""
    found: tuple[float, ...] = ()
    with suppress(ValueError):
        found = tuple(float(part) for part in text.split(","))
    if len(found) not in (1, 3) or not all(least < value < math.inf for value in found):
        raise InputError("pass one number or three, such as 0.5,0.5,0.5")
    return found


def sizes(text: str) -> tuple[int, ...]:
    """Parse --input-size."""
    parts = text.lower().replace(",", "x").split("x")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError("pass whole numbers such as 3x224x224, without the batch")
    return tuple(int(part) for part in parts)


def with_options(text: str) -> tuple[str, dict[str, Any]]:
    """Split `name:key=value,key=value`; values are JSON if they parse, else text."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"{text!r}: {item!r} is not an option; write name:key=value,key=value")
        options[key] = value
        with suppress(ValueError):
            options[key] = json.loads(value)
    return name, options


_DATA = (
    "Image folder (sub-folders are classes; a number is the class index itself), .npz, text file (one example per "
    "line), table (.csv, .tsv) or hf-dataset:NAME; random to try it out."
)
Data = Annotated[str, option(DATA, _DATA)]
BatchSize = Annotated[int, option(DATA, "Examples in a batch.", min=1)]
InputSize = Annotated[Any, option(DATA, "Size of one random input, such as 3x224x224.", parser=sizes)]
Dense = Annotated[str, option(None, "Dense model of a pruned folder, if the folder does not name it.", "--model")]
Device = Annotated[str, option(None, "cpu, cuda, ... Default: cuda if available.")]
Scope = Annotated[Literal["blocks", "all"], option(WHAT, "blocks, as in the paper, or all: residual streams too.")]
Kinds = Annotated[Any, option(WHAT, "neuron, filter or head; commas between them.", parser=kinds_of, completes=KINDS)]
Json = Annotated[bool, option(None, "Print JSON.", "--json")]
Force = Annotated[bool, option(None, "Write into a folder that is not empty.", "--force")]


def opt(default: Any, panel: str | None, text: str, *names: str, **more: Any) -> Any:
    """A field of a group that is an option."""
    return field(default=default, metadata={"option": option(panel, text, *names, **more)})


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How data is read. The fields at the end are options of some commands only."""

    size: int | None = opt(None, IMAGES, "Side of images. Default: the model's, else 224.", min=1)
    resize: int | None = opt(None, IMAGES, "Side before the crop. Default: the model's, else 8/7 of --size.", min=1)
    mean: Any = opt(None, IMAGES, "Mean of pixels: 0.5 or 0.5,0.5,0.5. Default: the model's.", parser=colours)
    std: Any = opt(None, IMAGES, "Standard deviation of pixels.", parser=partial(colours, least=0.0))
    key: str = opt("", DATA, "Array of an .npz, or column of a table or data set; two columns are a pair of texts.")
    length: int = opt(128, DATA, "Longest text, in tokens.", min=1)
    examples: int = 256
    input_size: Any = None  # of a random input
    labels: str = ""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Sample(Wanted):
    """Data of which two examples are enough."""

    data: Data = "random"
    input_size: InputSize = None
    examples: int = 2


@dataclass(frozen=True, kw_only=True)
class Labelled(Wanted):
    """Data that may have labels."""

    data: Data
    labels: str = opt("", DATA, "Labels: array of an .npz, or column of a table or data set.")
    seed: int = opt(0, None, "Random seed.", min=0, max=2**32 - 1)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a command by its fields that are options, for typer to read."""
    own = inspect.signature(command, eval_str=True).parameters
    groups = {name: _fields(p.annotation) for name, p in own.items() if is_dataclass(p.annotation)}
    flat = [each for name, p in own.items() for each in groups.get(name, [p])]
    flat = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in flat]

    def call(**given: Any) -> None:
        made = {
            name: own[name].annotation(**{each.name: given.pop(each.name) for each in group})
            for name, group in groups.items()
        }
        command(**given, **made)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(flat, return_annotation=None)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in flat}
    return call


def _fields(group: Any) -> list[inspect.Parameter]:
    """The options of a group, required ones first: fields made by `opt`, and those of an annotated type."""
    hints = get_type_hints(group, include_extras=True)
    hints |= {f.name: Annotated[hints[f.name], f.metadata["option"]] for f in fields(group) if f.metadata}
    found = sorted(inspect.signature(group).parameters.values(), key=lambda p: p.default is not p.empty)
    return [p.replace(annotation=hints[p.name]) for p in found if get_origin(hints[p.name]) is Annotated]


def writable(out: Path, name: str = "--out ") -> None:
    """Check, before the work, that a folder can be written to."""
    nearest = out.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        file = "that name" if nearest == out.absolute() else f"the name {nearest}"
        raise InputError(f"{name}{out}: there is a file of {file}: pass the name of a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{name}{out}: {nearest} is not writable: pass another folder")


def warn(warnings: Sequence[str]) -> None:
    """Print warnings on standard error."""
    for text in warnings:
        typer.secho(f"WARNING: {visible(text)}", err=True, fg=typer.colors.YELLOW, bold=True)


def move(model: nn.Module, device: str) -> None:
    """Move the model to the device; by default to the GPU, if there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "meta":
        raise InputError("--device meta holds no values to calibrate with: pass --device cpu")
    with failing_as(InputError, f"--device {device} cannot be used", "pass --device cpu"):
        model.to(device)
