"""Recipes: data that fits the real models, and yields what the benchmark says."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import nn

import ispasp
from ispasp._keep import Recipe, recipes
from ispasp.integrations.torchvision import import_torchvision
from ispasp_lab.benchmarks import recipes as experiment

requires_vision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="recipes are for torchvision's models: pip install 'ispasp[vision]'",
)
NAMES = ["resnet34-2.69G", "resnet34-2.13G", "mobilenet_v2-260M", "mobilenet_v2-242M", "mobilenet_v2-220M"]


def build(model: str) -> nn.Module:
    source, name = model.split(":")
    assert source == "torchvision"
    built: nn.Module = getattr(import_torchvision().models, name)()
    return built.eval()


@pytest.fixture(scope="module")
def surveys() -> Mapping[str, ispasp.Survey]:
    image = torch.zeros(1, 3, 224, 224)
    return {
        name: ispasp.survey(build(name), image, check=False) for name in {recipe.model for recipe in recipes.values()}
    }


@pytest.fixture(scope="module")
def rows() -> list[experiment.Row]:
    return experiment.run(progress=False)


def test_names_and_read_only_data() -> None:
    assert list(recipes) == NAMES
    assert all(name == recipe.name for name, recipe in recipes.items())
    with pytest.raises(TypeError):
        recipes["mine"] = recipes["resnet34-2.69G"]  # type: ignore[index]
    with pytest.raises(TypeError):
        recipes["resnet34-2.69G"].keep["layer4.1.conv1"] = 0.5  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipes["resnet34-2.69G"].paper_macs = 1  # type: ignore[misc]


@pytest.mark.parametrize("recipe", recipes.values(), ids=recipes)
def test_the_printed_count_is_in_the_name_and_the_source_is_quoted(recipe: Recipe) -> None:
    unit = 10**9 if recipe.name.endswith("G") else 10**6
    assert recipe.paper_macs == round(float(recipe.name.split("-")[1][:-1]) * unit)
    assert recipe.name.startswith(recipe.model.split(":")[1])
    assert f"{recipe.name.split('-')[1][:-1]} " in experiment.QUOTES[recipe.name]  # "2.69 GFlop", "260 MFlop"
    page = Path(__file__).parents[2] / "docs" / "results" / "recipes.md"
    assert re.search(rf"│ {re.escape(recipe.name)} +│ \* │", page.read_text("utf-8"))  # says how the text was read
    assert all(0.0 < keep < 1.0 for keep in recipe.keep.values())


@requires_vision
@pytest.mark.parametrize("recipe", recipes.values(), ids=recipes)
def test_globs_fit_and_no_dimension_fits_two(recipe: Recipe, surveys: Mapping[str, ispasp.Survey]) -> None:
    names = [d.name for d in surveys[recipe.model].dimensions]
    fitting = {glob: [name for name in names if fnmatchcase(name, glob)] for glob in recipe.keep}
    assert all(fitting.values())
    pruned = [name for found in fitting.values() for name in found]
    assert len(pruned) == len(set(pruned))


@requires_vision
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet34-2.69G", "layer1.1 layer2.1 layer2.2 layer3.1 layer3.2 layer3.3 layer3.4"),
        ("resnet34-2.13G", "layer1.0 layer1.1 layer2.1 layer2.2 layer3.1 layer3.2 layer3.3 layer3.4"),
    ],
)
def test_resnet34_leaves_out_strided_and_last_blocks(
    name: str, blocks: str, surveys: Mapping[str, ispasp.Survey]
) -> None:
    model = build("torchvision:resnet34")
    pruned = [path.removesuffix(".conv1") for path in surveys["torchvision:resnet34"].plan(recipes[name].keep).kept]
    assert pruned == blocks.split()
    for path in pruned:
        assert model.get_submodule(f"{path}.conv1").stride == (1, 1)
        group, number = path.split(".")
        assert int(number) < len(model.get_submodule(group)) - 1


@requires_vision
def test_mobilenet_blocks_are_neither_strided_nor_widening(surveys: Mapping[str, ispasp.Survey]) -> None:
    """The paper's list of such blocks holds when blocks are counted as features; 220M adds three others."""
    model = build("torchvision:mobilenet_v2")
    plain = [k for k, block in enumerate(model.features) if getattr(block, "use_res_connect", False)]
    assert plain == [3, 5, 6, 8, 9, 10, 12, 13, 15, 16]
    found = surveys["torchvision:mobilenet_v2"]
    pruned = {
        name: {int(path.split(".")[1]) for path in found.plan(recipes[name].keep).kept}
        for name in recipes
        if name.startswith("mobilenet")
    }
    assert pruned["mobilenet_v2-260M"] < pruned["mobilenet_v2-242M"] == set(plain)
    assert pruned["mobilenet_v2-220M"] == {*plain, 2, 11, 17}


@requires_vision
def test_the_first_recipe_yields_the_printed_count(surveys: Mapping[str, ispasp.Survey]) -> None:
    found = surveys["torchvision:resnet34"]
    cost = found.cost(found.plan(recipes["resnet34-2.69G"].keep))
    assert round(cost.macs / 1e9, 2) == 2.69


@requires_vision
@pytest.mark.long
def test_rows_are_what_the_survey_says(rows: list[experiment.Row], surveys: Mapping[str, ispasp.Survey]) -> None:
    chosen = {row.recipe: row for row in rows if row.chosen}
    assert sum(row.chosen for row in rows) == len(chosen) == len(recipes)  # each recipe is just one of its readings
    for name, recipe in recipes.items():
        found, row = surveys[recipe.model], chosen[name]
        plan = found.plan(recipe.keep)
        cost = found.cost(plan)
        assert (row.macs, row.params, row.paper_macs) == (cost.macs, cost.params, recipe.paper_macs)
        assert row.difference == pytest.approx((cost.macs - recipe.paper_macs) / recipe.paper_macs)
        assert len(row.blocks) == len(plan.kept)
        assert all(any(path.startswith(f"{block}.") for path in plan.kept) for block in row.blocks)
    assert all(len(experiment.readings(recipe)) > 1 for recipe in recipes.values())


@requires_vision
@pytest.mark.long
def test_dense_rows_and_counts_with_norms(rows: list[experiment.Row]) -> None:
    dense = {row.recipe: row for row in rows if row.reading == "dense"}
    assert [row.blocks for row in dense.values()] == [(), ()]
    assert round(dense["mobilenet_v2"].with_norms / 1e6) == 314  # what the paper prints
    assert round(dense["resnet34"].macs / 1e9, 2) == 3.66


@requires_vision
@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet34-2.69G", "mobilenet_v2-220M"])
def test_counts_with_norms_are_those_of_the_pruned_model(
    name: str, rows: list[experiment.Row], surveys: Mapping[str, ispasp.Survey]
) -> None:
    recipe = recipes[name]
    model = build(recipe.model)
    ispasp.apply_(model, surveys[recipe.model].plan(recipe.keep))
    total = 0

    def count(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.BatchNorm2d):
            total += 2 * output.numel()
        elif isinstance(module, (nn.Conv2d, nn.Linear)):
            total += output.numel() * module.weight[0].numel()

    for module in model.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    (row,) = [row for row in rows if row.recipe == name and row.chosen]
    assert row.with_norms == total
    assert row.params == sum(p.numel() for p in model.parameters())


@requires_vision
@pytest.mark.long
def test_table_and_json(rows: list[experiment.Row]) -> None:
    table = experiment.as_table(rows)
    assert all(name in table for name in recipes)
    assert sum("│ * │" in line for line in table.splitlines()) == len(recipes)
    data = json.loads(json.dumps(experiment.as_json(rows)))
    assert [entry["recipe"] for entry in data] == [row.recipe for row in rows]
    assert data[1]["blocks"][0] == "layer1.1"
