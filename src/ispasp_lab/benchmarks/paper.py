"""`ispasp bench paper`: the library against the paper's procedure, end to end.

The procedure is that of `ispasp_lab.reference`: blocks from first to last, importance by automatic differentiation
through conv2 and bn2, and for every block the network is run again from its input, with masks where blocks are pruned.
The paper's cost of one layer is T forward passes (it draws new images in each iteration): row "per iteration". An
implementation that keeps the block's hidden representation in memory runs the network once: row "per block". Both see
the same images in every iteration here, so all plans must be the same. Only deciding is counted for the reference; the
library's time has survey, copy, surgery and proof in it. The reference is linear in the images, so it is timed on a
part of them and scaled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from ispasp._survey import survey
from ispasp.errors import InputError
from ispasp.report import Column, render
from ispasp_lab import reference
from ispasp_lab.benchmarks import job
from ispasp_lab.benchmarks.timing import interleaved

RERUNS = ("per block", "per iteration")
_LIBRARY = "library"
Sets = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Row:
    """One comparison. `reference_s` is scaled from `reference_images` to `images`; plans are those of the former."""

    rerun: str
    images: int
    reference_images: int
    reference_s: float
    library_s: float
    ratio: float
    same_plan: bool
    differing: tuple[str, ...]


def run(
    images: int = 128,
    reference_images: int = 16,
    batch: int = 16,
    repeats: int = 3,
    T: int = 20,
    seed: int = 0,
    *,
    reruns: Sequence[str] = RERUNS,
    size: int = 224,
    progress: bool = True,
) -> list[Row]:
    """Time both, in turn, and compare the plans on the reference's images.

    >>> run(images=2, reference_images=3)
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: reference_images=3 of images=2: time the reference on 1 to 2
    """
    if not 1 <= reference_images <= images:
        raise InputError(f"reference_images={reference_images} of images={images}: time the reference on 1 to {images}")
    model, batches = job.network(seed), job.images(images, batch, size, seed)
    part = list(torch.split(torch.cat(batches)[:reference_images], batch))
    job.warm_up()
    job.forward(model, batches[:1])
    counts = {name: len(kept) for name, kept in survey(model, batches[0][:2]).plan(job.RECIPE.keep).kept.items()}

    def by_reference(rerun: str) -> Callable[[], Sets]:
        return lambda: paper_plan(model, part, counts, T, rerun)

    jobs = {_LIBRARY: lambda: job.prune(model, batches, T), **{rerun: by_reference(rerun) for rerun in reruns}}
    found = interleaved(jobs, repeats, "paper", progress=progress)
    ours = job.prune(model, part, T).plan.kept
    rows = []
    for rerun in reruns:
        theirs = found[rerun].value
        differing = tuple(name for name in counts if ours.get(name) != theirs[name])
        seconds, library_s = found[rerun].median * images / reference_images, found[_LIBRARY].median
        ratio = seconds / library_s
        rows.append(Row(rerun, images, reference_images, seconds, library_s, ratio, not differing, differing))
    return rows


def paper_plan(model: Any, batches: Sequence[Tensor], counts: Mapping[str, int], T: int, rerun: str) -> Sets:
    """The units that stay in each block of a torchvision ResNet, by the paper's procedure.

    `counts`: "layer2.1.conv1" -> number of filters that stay. `rerun` says when the network is run again.
    """
    if rerun not in RERUNS:
        raise InputError(f"rerun={rerun!r}: choose from {', '.join(RERUNS)}")
    model = copy.deepcopy(model).eval().requires_grad_(False)
    layers = {f"layer{i}": getattr(model, f"layer{i}") for i in range(1, 5)}
    blocks = {f"{name}.{j}": block for name, layer in layers.items() for j, block in enumerate(layer)}
    kept: Sets = {}
    for number, (path, block) in enumerate(blocks.items()):
        name = f"{path}.conv1"
        if name not in counts:
            continue

        def hidden(number: int = number) -> list[Tensor]:
            return [_hidden(model, list(blocks.values()), number, x) for x in batches]

        Hs: Iterable[list[Tensor]] = repeat(hidden(), T) if rerun == "per block" else (hidden() for _ in range(T))
        consumer = nn.Sequential(block.conv2, block.bn2)
        sets = reference.algorithm2(Hs, [consumer], s=counts[name])
        kept[name] = tuple(sets[-1])
        block.conv2.register_forward_pre_hook(_mask(block.conv2.in_channels, sets[-1]))
    return kept


def _hidden(model: Any, blocks: Sequence[Any], number: int, x: Tensor) -> Tensor:
    """The input of conv2 of a block, from the images on. (batch, channels, h, w)"""
    with torch.no_grad():
        x = model.maxpool(model.relu(model.bn1(model.conv1(x))))
        for block in blocks[:number]:
            x = block(x)
        block = blocks[number]
        hidden: Tensor = block.relu(block.bn1(block.conv1(x)))
    return hidden


def _mask(channels: int, kept: Sequence[int]) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    mask = torch.zeros(channels, 1, 1)
    mask[list(kept)] = 1.0
    return lambda layer, args: (args[0] * mask,)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries.

    >>> as_json([Row("per block", 128, 16, 500.0, 10.0, 50.0, True, ())])[0]["ratio"]
    50.0
    """
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row], T: int = 20) -> str:
    """Rows as a table, with a note on what was scaled.

    >>> table = as_table([Row("per block", 128, 16, 500.0, 10.0, 50.0, False, ("layer1.1.conv1",))])
    >>> "50.0x" in table, "NO: layer1.1.conv1" in table, "scaled linearly by 8" in " ".join(table.split())
    (True, True, True)
    """
    columns = [
        Column("rerun", "paper's procedure: network run again"),
        Column("images", "images"),
        Column("reference_s", "reference, s", "{:.1f}".format),
        Column("library_s", "library, s", "{:.2f}".format),
        Column("ratio", "ratio", "{:.1f}x".format),
        Column("plan", "same plan"),
    ]
    shown = [{**asdict(row), "plan": _told(row)} for row in rows]
    threads = torch.get_num_threads()
    note = f"torchvision ResNet34, {job.weights()}, recipe {job.RECIPE.name}, T = {T}, {threads} thread(s)."
    scaled = [row for row in rows if row.reference_images < row.images]
    if scaled:
        first = scaled[0]
        note += (
            f" The reference was timed on {first.reference_images} images and scaled linearly by "
            f"{first.images / first.reference_images:g}; plans compared on those images."
        )
    return render("Library against the paper's procedure, end to end", columns, shown, note)


def _told(row: Row) -> str:
    return "yes" if row.same_plan else f"NO: {', '.join(row.differing)}"
