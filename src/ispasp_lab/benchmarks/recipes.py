"""`ispasp bench recipes`: what the paper's recipes yield beside what it prints.

Every way to read the paper's text is counted on the real torchvision model with one 224 x 224 image; one of them is the
recipe. The survey counts products of convolutions and linear layers. The paper's count of the dense MobileNetV2 (314 M)
has two more for every value that a BatchNorm puts out, so that count stands beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ispasp._keep import Recipe, recipes
from ispasp._survey import Survey, survey
from ispasp.integrations.torchvision import import_torchvision
from ispasp.report import Column, render, track
from ispasp.types.dimension import Kept, kept_length

DENSE = {"torchvision:resnet34": 3_680_000_000, "torchvision:mobilenet_v2": 314_000_000}  # Table 1, "Full Model"
_BLOCKS = {1: 3, 2: 4, 3: 6, 4: 3}  # ResNet34: group -> blocks
_ROBUST = (6, 9, 10, 12, 13)  # MobileNetV2: "not sensitive"
_SENSITIVE = {"3, 5": (3, 5, 8, 15, 16), "3, 4": (3, 4, 8, 15, 16)}  # both lists of the text
Keep = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """One reading of one recipe, or a dense model.

    Differences are fractions of the paper's count, positive where there is more; `with_norms` counts as above. `blocks`
    are the module paths of pruned blocks.
    """

    recipe: str
    reading: str
    chosen: bool
    paper_macs: int
    macs: int
    difference: float
    with_norms: int
    difference_with_norms: float
    params: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Counter:
    """A surveyed model, and (channels, positions) of the output of each of its BatchNorms."""

    found: Survey
    norms: Mapping[str, tuple[int, int]]

    def row(self, recipe: str, reading: str, paper: int, kept: Kept, *, chosen: bool) -> Row:
        costs, tensors = self.found.costs, self.found.structure.tensors
        with_norms = costs.macs(kept)
        for path, (channels, positions) in self.norms.items():
            layout = tensors.get(f"{path}.weight")
            with_norms += 2 * positions * (kept_length(layout.axes[0], kept) if layout else channels)
        counts = costs.macs(kept), costs.macs(kept) / paper - 1, with_norms, with_norms / paper - 1, costs.params(kept)
        return Row(recipe, reading, chosen, paper, *counts, tuple(name.split(".conv")[0] for name in kept))


def run(models: Sequence[str] = tuple(DENSE), *, progress: bool = True) -> list[Row]:
    """Survey each model once and count on it: dense, then every reading of its recipes, the recipe's own first."""
    rows = []
    for name in track(models, "recipes", show=progress):
        counter = _counter(name)
        rows.append(counter.row(name.split(":")[1], "dense", DENSE[name], {}, chosen=False))
        for recipe in recipes.values():
            if recipe.model == name:
                rows += _rows(recipe, counter)
    return rows


def _counter(name: str) -> _Counter:
    model = getattr(import_torchvision().models, name.split(":")[1])().eval()
    image = torch.zeros(1, 3, 224, 224)
    norms: dict[str, tuple[int, int]] = {}

    def hook(path: str) -> Any:
        def record(module: nn.Module, args: Any, output: Tensor) -> None:
            norms[path] = output.shape[1], output[0, 0].numel()

        return record

    hooks = [m.register_forward_hook(hook(path)) for path, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    try:
        with torch.no_grad():
            model(image)
    finally:
        for handle in hooks:
            handle.remove()
    return _Counter(survey(model, image), norms)


def _rows(recipe: Recipe, counter: _Counter) -> list[Row]:
    own = counter.found.plan(recipe.keep).kept
    rows = []
    for text, keep in readings(recipe).items():
        kept = counter.found.plan(keep).kept
        rows.append(counter.row(recipe.name, text, recipe.paper_macs, kept, chosen=kept == own))
    return sorted(rows, key=lambda row: not row.chosen)


def readings(recipe: Recipe) -> dict[str, Keep]:
    """Ways to read the paper's text for this recipe: in words -> what to keep.

    >>> from ispasp._keep import recipes
    >>> readings(recipes["mobilenet_v2-260M"])["blocks counted from 0"]["features.7.conv.0.0"]
    0.4
    """
    return dict(_resnet34(recipe) if recipe.model == "torchvision:resnet34" else _mobilenet_v2(recipe))


def _resnet34(recipe: Recipe) -> Iterator[tuple[str, Keep]]:
    uniform = (0.4, 0.4, 0.4)
    groups = uniform if recipe.name == "resnet34-2.69G" else (0.2, 0.3, 0.3)
    letter = _groups(groups, strided=False, last=False)
    yield "no strided, no last block (to the letter)", letter
    yield "no first, no last block", {name: keep for name, keep in letter.items() if name != "layer1.0.conv1"}
    yield "no last block", _groups(groups, strided=True, last=False)
    yield "no strided block", _groups(groups, strided=False, last=True)
    yield "every block of three groups", _groups(groups, strided=True, last=True)
    yield "no strided, no last block, of four groups", _groups((*groups, groups[-1]), strided=False, last=False)
    if groups != uniform:
        yield "no strided block, keep 0.4 as for 2.69G", _groups(uniform, strided=False, last=True)


def _groups(fractions: Sequence[float], *, strided: bool, last: bool) -> Keep:
    """One fraction for each group; whether strided and last blocks are pruned too."""
    return {
        f"layer{group}.{block}.conv1": keep
        for group, keep in enumerate(fractions, start=1)
        for block in range(_BLOCKS[group])
        if (strided or block > 0 or group == 1) and (last or block < _BLOCKS[group] - 1)
    }


def _mobilenet_v2(recipe: Recipe) -> Iterator[tuple[str, Keep]]:
    if recipe.name == "mobilenet_v2-260M":
        yield "blocks counted as features", _features({_ROBUST: 0.4})
        yield "blocks counted from 0", _features({_ROBUST: 0.4}, first=1)
        return
    large, small, extra = (0.8, 0.4, ()) if recipe.name == "mobilenet_v2-242M" else (0.7, 0.3, (2, 11, 17))
    for listed, sensitive in _SENSITIVE.items():
        yield f"sensitive {listed}, ... at {large}", _features({sensitive: large, _ROBUST: small, extra: 0.9})
        yield f"sensitive {listed}, ... at {small}", _features({sensitive: small, _ROBUST: large, extra: 0.9})
    sensitive, last = _SENSITIVE["3, 5"], ", no 17" if extra else ""  # from 0 there are blocks 0 to 16
    for one, other in ((large, small), (small, large)):
        keep = _features({sensitive: one, _ROBUST: other, extra[:2]: 0.9}, first=1)
        yield f"sensitive 3, 5, ... at {one}, blocks counted from 0{last}", keep


def _features(blocks: Mapping[tuple[int, ...], float], first: int = 0) -> Keep:
    return {f"features.{b + first}.conv.0.0": keep for numbers, keep in blocks.items() for b in numbers}


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries.

    >>> as_json([Row("a", "dense", False, 100, 97, -0.03, 99, -0.01, 7, ("layer1.1",))])[0]["difference"]
    -0.03
    """
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row]) -> str:
    """Rows as a table; the recipe itself is marked.

    >>> "-3.0 %" in as_table([Row("a", "dense", False, 100, 97, -0.03, 99, -0.01, 7, ("layer1.1",))])
    True
    """
    columns = [
        Column("recipe", "recipe"),
        Column("chosen", "", lambda chosen: "*" if chosen else ""),
        Column("reading", "reading"),
        Column("count", "blocks"),
        Column("paper_macs", "paper, M", _millions),
        Column("macs", "MACs, M", _millions),
        Column("difference", "difference", _percent),
        Column("with_norms", "with norms, M", _millions),
        Column("difference_with_norms", "difference", _percent),
        Column("params", "params, M", lambda count: f"{count / 1e6:.2f}"),
    ]
    shown = [{**asdict(row), "count": len(row.blocks)} for row in rows]
    note = "* the recipe. With norms: two more for every value that a BatchNorm puts out."
    return render("Recipes: what they yield beside what the paper prints", columns, shown, note)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}"
