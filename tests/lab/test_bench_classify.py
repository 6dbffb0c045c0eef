"""The accuracy benchmarks on a few made-up images and weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import ispasp
from ispasp.errors import InputError
from ispasp_lab import data, models
from ispasp_lab.accuracy import accuracy
from ispasp_lab.benchmarks import cifar, classify, mobilenet
from ispasp_lab.commands.bench import bench


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISPASP_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def tiny_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10 of 12 and 30 images, and random weights for resnet20, which has 8 layers here."""
    monkeypatch.setattr("ispasp_lab.models.cifar_resnet.CifarResNet", lambda _: models.CifarResNet(8))
    random = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 12), ("test", 30)):
        arrays[f"x_{part}"] = random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = random.integers(0, 10, n, dtype=np.uint8)
    np.savez(folder / "cifar10.npz", **arrays)
    torch.manual_seed(0)
    weights = models.resnet20(pretrained=False).state_dict()
    save_file({k: t for k, t in weights.items() if "num_batches" not in k}, folder / "cifar10-resnet20.safetensors")
    return folder


@pytest.mark.long
@pytest.mark.usefixtures("tiny_cifar")
def test_cifar_rows_are_what_prune_and_accuracy_say() -> None:
    rows = cifar.run(8, 20, methods=("l1",), network="resnet20", batch=4, progress=False)
    assert [(row.method, row.compensate) for row in rows] == [
        ("dense", ""),
        ("l1", "None"),
        ("l1", "local"),
        ("l1", "dense"),
    ]
    model = models.resnet20()
    x, y = classify.sample(*data.cifar10("test"), 20)
    calibration, _ = classify.sample(*data.cifar10("train"), 8)
    dense, *pruned = rows
    assert dense.accuracy == accuracy(model, x, y)
    assert dense.seconds is None
    assert dense.params == sum(p.numel() for p in model.parameters())
    result = ispasp.prune(
        model, list(data.batches(calibration, 4)), 0.5, method="l1", compensate="local", progress=False
    )
    assert pruned[1].accuracy == accuracy(result.model, x, y)
    assert {(row.params, row.macs) for row in pruned} == {(result.cost.params, result.cost.macs)}
    assert result.cost.macs < dense.macs
    assert all(layer.kept * 2 == layer.units for layer in result.layers)
    assert len(result.layers) == 3


@pytest.mark.usefixtures("tiny_cifar")
def test_the_command_prints_rows_as_json_and_as_a_table() -> None:
    small = ["cifar", "--network", "resnet20", "--images", "4", "--test", "10", "--batch", "4", "--methods", "topk,"]
    done = CliRunner().invoke(bench, [*small, "--keep", "0.25", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["method"], row["compensate"]) for row in rows][1:] == [
        ("topk", "None"),
        ("topk", "local"),
        ("topk", "dense"),
    ]
    table = cifar.as_table([cifar.Row(**row) for row in rows], 4, 10, 0.25, "resnet20")
    assert "CIFAR-10 resnet20" in table
    assert "Top-K" not in table  # said for keep >= 0.5 only
    text = " ".join(table.split())
    assert "Every block at keep 0.25, 4 unlabelled training images" in text
    assert "top-1 on 10 test images" in text


def test_samples_are_drawn_without_repetition_and_keep_their_labels() -> None:
    x = data.Pixels(torch.arange(50, dtype=torch.uint8).reshape(50, 1, 1, 1), ((0.0,), (1 / 255,)))
    y = torch.arange(50)
    some, labels = classify.sample(x, y, 20, seed=1)
    assert torch.equal(some[:].flatten().round().long(), labels)
    assert len(set(labels.tolist())) == 20
    assert not torch.equal(labels, classify.sample(x, y, 20, seed=2)[1])
    assert torch.equal(classify.sample(x, y, 50)[1], y)
    for count in (0, 51):
        with pytest.raises(InputError, match=f"{count} images of 50: pass a number from 1 to 50"):
            classify.sample(x, y, count)


def test_missing_data_and_unknown_methods_are_told_before_the_work(tiny_cifar: Path) -> None:
    with pytest.raises(InputError, match="unknown method 'magic'"):
        cifar.run(4, 4, methods=("magic",), network="resnet20")
    with pytest.raises(InputError, match="'cifar10-resnet56.safetensors' is not in"):
        cifar.run()
    (tiny_cifar / "cifar10.npz").unlink()
    with pytest.raises(InputError, match="'cifar10.npz' is not in"):
        cifar.run(network="resnet20")


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision: 'ispasp[vision]'")
def test_mobilenet_keeps_what_the_recipe_says(folder: Path) -> None:
    with pytest.raises(InputError, match="'mobilenet_v2.pth' is not in"):
        mobilenet.run()
    torch.manual_seed(0)
    torch.save(models.mobilenet_v2(pretrained=False).state_dict(), folder / "mobilenet_v2.pth")
    random = np.random.default_rng(0)
    for part in ("calibration", "val"):
        for label in (3, 7):
            path = folder / "imagenet-mini" / part / f"{label:04}" / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(random.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(path)
    rows = mobilenet.run(2, 2, ("l1",), (None,), batch=2, progress=False)
    assert [(row.method, row.compensate) for row in rows] == [("dense", ""), ("l1", "None")]
    assert rows[0].accuracy == accuracy(models.mobilenet_v2(), *data.imagenet_mini("val"))
    assert rows[0].macs == 300_774_272
    assert rows[1].macs == pytest.approx(254.6e6, abs=5e4)  # docs/results/recipes.md
    assert "mobilenet_v2-260M, 2 unlabelled images" in " ".join(mobilenet.as_table(rows, 2, 2).split())
