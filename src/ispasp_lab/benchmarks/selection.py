"""`ispasp bench selection`: i-SpaSP from first moments against the paper's autodiff procedure.

Both start from the same hidden representation of a real torchvision ResNet34 block (random weights: none are shipped),
the output of relu(bn1(conv1)), and read it through conv2 and bn2 as the paper does. The library's time includes
summing the activations of all examples; the reference's cost is linear in the examples, so it may be timed on a part
of them and scaled, which the rows say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.report import Column, render, track
from ispasp.select import i_spasp
from ispasp.types import ConvConsumer, Selection, Statistics, units_to_keep
from ispasp.types.consumer import Geometry
from ispasp_lab import reference

BLOCKS = {2: ("layer1", 1, 56), 15: ("layer4", 1, 7)}  # number in the paper -> group, index, size of the maps
_CHUNK = 128  # examples at a time: the paper's mini-batches (it uses 256)


@dataclass(frozen=True)
class Row:
    """One comparison. `reference_s` is scaled from `reference_examples` to `examples`."""

    block: int
    keep: float
    examples: int
    reference_s: float
    library_s: float
    ratio: float
    same_sets: bool
    reference_examples: int


def run(
    examples: int = 1280,
    reference_examples: int = 128,
    keeps: Sequence[float] = (0.2, 0.4),
    T: int = 20,
    seed: int = 0,
    *,
    blocks: Sequence[int] = tuple(BLOCKS),
    progress: bool = True,
) -> list[Row]:
    """Time both on every block and keep; the sets are compared at every iteration on the reference's examples.

    >>> run(examples=2, reference_examples=3)
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: reference_examples=3 of examples=2: time the reference on 1 to 2
    """
    if not 1 <= reference_examples <= examples:
        raise InputError(
            f"reference_examples={reference_examples} of examples={examples}: time the reference on 1 to {examples}"
        )
    rows = []
    for number in track(blocks, "selection", show=progress):
        block, H = _block(number, examples, seed)
        rows += [_compare(number, block, H, keep, reference_examples, T) for keep in keeps]
    return rows


def _block(number: int, examples: int, seed: int) -> tuple[Any, Tensor]:
    group, index, size = BLOCKS[number]
    torch.manual_seed(seed)
    models = import_torchvision().models
    block = getattr(models.resnet34(), group)[index].eval()
    channels = block.conv1.in_channels
    with torch.no_grad():
        parts = [
            torch.relu(block.bn1(block.conv1(torch.randn(n, channels, size, size).relu())))
            for n in _pieces(examples, _CHUNK)
        ]
    return block, torch.cat(parts)


def _pieces(total: int, size: int) -> Iterator[int]:
    for start in range(0, total, size):
        yield min(size, total - start)


def _compare(number: int, block: Any, H: Tensor, keep: float, part: int, T: int) -> Row:
    norm = block.bn2
    consumer = ConvConsumer(
        block.conv2.weight.detach(),
        scale=(norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach(),
        geometry=Geometry(block.conv2.stride, block.conv2.padding, block.conv2.dilation, block.conv2.groups),
    )
    _library(consumer, H[:1], keep, T)  # both have run once before they are timed
    started = time.perf_counter()
    _library(consumer, H, keep, T)
    library_s = time.perf_counter() - started

    batches = list(torch.split(H[:part], _CHUNK))
    s = units_to_keep(keep, consumer.channels)
    layer = nn.Sequential(block.conv2, norm).requires_grad_(False)
    reference.importance(batches[0][:1], set(), [layer])
    started = time.perf_counter()
    expected = reference.algorithm2([batches] * T, [layer], s=s)
    reference_s = (time.perf_counter() - started) * len(H) / part

    found = [list(step.kept) for step in _library(consumer, H[:part], keep, T).steps]
    found += [found[-1]] * (T - len(found))  # a stable set stays
    return Row(number, keep, len(H), reference_s, library_s, reference_s / library_s, found == expected, part)


def _library(consumer: ConvConsumer, H: Tensor, keep: float, T: int) -> Selection:
    readings = [measure(consumer, part) for part in torch.split(H, _CHUNK)]
    total = readings[0]
    for reading in readings[1:]:
        total = total + reading
    return i_spasp(Statistics(consumer.channels, (total,)), keep, iterations=T)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries.

    >>> as_json([Row(2, 0.2, 1280, 60.0, 0.5, 120.0, same_sets=True, reference_examples=128)])[0]["ratio"]
    120.0
    """
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row], T: int = 20) -> str:
    """Rows as a table, with a note on what was scaled.

    >>> table = as_table([Row(2, 0.2, 1280, 60.0, 0.5, 120.0, same_sets=False, reference_examples=128)])
    >>> "120x" in table, "NO" in table, "scaled linearly by 10" in " ".join(table.split())
    (True, True, True)
    """
    columns = [
        Column("block", "ResNet34 block"),
        Column("keep", "keep"),
        Column("examples", "examples"),
        Column("reference_s", "reference, s", "{:.2f}".format),
        Column("library_s", "library, s", "{:.4f}".format),
        Column("ratio", "ratio", "{:.0f}x".format),
        Column("same_sets", "same sets", lambda same: "yes" if same else "NO"),
    ]
    scaled = [row for row in rows if row.reference_examples < row.examples]
    note = f"T = {T}. The reference is the paper's autodiff procedure"
    if scaled:
        part = scaled[0]
        note += (
            f", timed on {part.reference_examples} examples and scaled linearly by "
            f"{part.examples / part.reference_examples:.0f}; sets compared at every iteration on those examples."
        )
    return render("i-SpaSP: library against reference", columns, as_json(rows), note)
