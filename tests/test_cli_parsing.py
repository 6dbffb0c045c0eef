"""What users type, parsed: amounts, methods, sizes, kinds; options in groups; scores of known value."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import nn

from ispasp import Heal, Macs, Params
from ispasp.cli import options as o
from ispasp.cli.app import one_line
from ispasp.cli.evaluate import accuracy, perplexity
from ispasp.cli.loaded import Examples, Preprocessing, numbered
from ispasp.cli.models import saved_folder
from ispasp.cli.prune import (
    AmountOptions,
    HealOptions,
    augment_of,
    bytes_of,
    looks_at_the_task,
    method_of,
    number,
    share,
)
from ispasp.errors import InputError
from ispasp.select import ISpaSP


def test_amounts() -> None:
    def amount(**given: Any) -> Any:
        return AmountOptions(**given).amount()

    assert amount() == 0.5
    assert amount(keep=[share("0.3")]) == 0.3
    assert amount(keep=[share("layer1.*=0.5"), share("*=64")]) == {"layer1.*": 0.5, "*": 64}
    assert amount(keep=[share("*=0.5")]) == {"*": 0.5}
    assert amount(macs=Macs(0.5)) == Macs(0.5) and amount(params=Params(1000)) == Params(1000)
    numbers = [number(text) for text in ("0.5", "64", "2.69e9")]
    assert numbers == [0.5, 64, 2_690_000_000] and [type(x) for x in numbers] == [float, int, int]


def test_healing_is_asked_for_by_any_of_its_options(tmp_path: Path) -> None:
    assert HealOptions().chosen() is None
    assert HealOptions(heal=True).chosen() == Heal()
    assert HealOptions(heal_blocks=True, heal_checkpoint=tmp_path).chosen() == Heal(blocks=True, checkpoint=tmp_path)
    limits = HealOptions(heal_time=9.0, heal_steps=3, heal_epochs=0.5, heal_augment=augment_of("flip, crop"))
    assert limits.chosen() == Heal(time=9.0, steps=3, epochs=0.5, augment=("flip", "crop"))
    with pytest.raises(InputError, match="augment"):
        augment_of("flop")


@pytest.mark.parametrize(
    ("text", "size"), [("2G", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("500MB", 5 * 10**8), ("7", 7), (".5k", 500)]
)
def test_bytes(text: str, size: int) -> None:
    assert bytes_of(text) == size


def test_methods_with_and_without_options() -> None:
    assert method_of("l1") == "l1" and method_of("auto") == "auto"
    assert method_of("ispasp:iterations=40") == ISpaSP(iterations=40)
    assert method_of("ispasp:minibatches=yes") == ISpaSP(minibatches=True)
    assert looks_at_the_task("taylor") and not looks_at_the_task("ispasp")
    assert o.with_options("net:width=10,deep=true,name=a") == ("net", {"width": 10, "deep": True, "name": "a"})


def test_sizes_numbers_and_kinds() -> None:
    assert (o.sizes("3x224x224"), o.sizes("64")) == ((3, 224, 224), (64,))
    assert (o.colours("0.5,0.4,0.3"), o.colours("-1")) == ((0.5, 0.4, 0.3), (-1.0,))
    assert o.kinds_of("head, neuron") == ("head", "neuron")
    assert o.completion(["neuron", "head"])("neuron,h") == ["neuron,head"]


@dataclass(frozen=True)
class Size:
    width: Annotated[int, "an option"]
    height: Annotated[int, "an option"] = 2
    depth: int = 1  # not one


def test_a_group_of_options_stands_for_its_fields() -> None:
    seen: list[Any] = []

    def area(size: Size, unit: str = "cm2") -> None:
        seen.append((size.width * size.height * size.depth, unit))

    command = o.grouped(area)
    assert list(inspect.signature(command).parameters) == ["width", "height", "unit"]
    command(width=3, height=4, unit="m2")
    assert seen == [(12, "m2")]


def test_classes_by_number_and_by_name() -> None:
    labels, classes = numbered(["7", "10"])
    assert (labels.tolist(), classes) == ([7, 10], ())
    labels, classes = numbered(["dog", "cat"], among=["ant"])
    assert (labels.tolist(), classes) == ([2, 1], ("ant", "cat", "dog"))
    data = Examples(3, torch.tensor, "", labels=torch.tensor([5, 6, 7]))
    assert [(x.tolist(), y.tolist()) for x, y in data.loader(2, labelled=True)] == [([0, 1], [5, 6]), ([2], [7])]


def test_scores_of_known_value() -> None:
    assert accuracy(nn.Identity(), [(torch.eye(2), torch.tensor([0, 0]))]) == 0.5
    even = nn.Embedding.from_pretrained(torch.zeros(4, 4))  # every token is as likely as any other
    assert perplexity(even, [{"input": torch.tensor([[0, 1, 2]])}]) == 4.0
    with pytest.raises(InputError, match="no text has two tokens"):
        perplexity(even, [{"input": torch.tensor([[0]])}])


def test_preprocessing_in_proportion_and_by_colour() -> None:
    assert Preprocessing().sized(112).resize == 128
    assert Preprocessing().changed(o.Wanted(mean=(0.5,), std=(0.5,))).source == "ImageNet's defaults, --mean, --std"
    white = torch.full((3, 1, 1), 255, dtype=torch.uint8)
    assert Preprocessing(mean=(0.5,), std=(0.5,)).normalise(white).flatten().tolist() == [1.0, 1.0, 1.0]


def test_errors_are_one_line() -> None:
    assert one_line(InputError("keep=2.0:\npass less")) == "keep=2.0: pass less"
    assert one_line(FileExistsError(17, "File exists", "results")).startswith("results: File exists: check")
    with pytest.raises(InputError, match="there is a file of that name: pass the name of a folder"):
        o.writable(Path(__file__))


def test_names_of_pruned_folders() -> None:
    assert saved_folder("torchvision:resnet18") is None
    assert saved_folder("ispasp:small") == Path("small")
