"""The convolutional experiments on a network of eight layers and generated images."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import ispasp
from ispasp.cli.app import app
from ispasp.errors import InputError
from ispasp_lab.data import Files, Pixels
from ispasp_lab.experiments import cnn, cnn_augment, cnn_finetune, cnn_pipeline, cnn_report
from ispasp_lab.experiments.cnn_setup import load_images, load_network
from ispasp_lab.models import CifarResNet

NAME = "cifar_resnet8"
SETTINGS = cnn.Settings(NAME, examples=24, tested=20, batch=12)
TRAINING = cnn_pipeline.Training(between=1, final=1, batch=16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a CIFAR-10 of 40 + 30 images and a random network."""
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("ISPASP_DATA", str(data))
    random = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 40), ("test", 30)):
        arrays[f"x_{part}"] = random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = random.integers(0, 10, n, dtype=np.uint8)
    np.savez(data / "cifar10.npz", **arrays)
    torch.manual_seed(0)
    save_file(CifarResNet(8).state_dict(), data / "cifar10-resnet8.safetensors")
    return tmp_path


def sweep(out: Path, **grid: object) -> list[cnn.Row]:
    return list(cnn.run(SETTINGS, out, progress=False, **grid))  # type: ignore[arg-type]


@pytest.mark.long
def test_rows_that_are_there_are_not_made_again(folder: Path) -> None:
    first = sweep(folder, names=["l1", "taylor"], keeps=[0.5], compensations=["none"])
    assert [(r.method, r.keep) for r in first] == [(cnn.DENSE, 1.0), ("l1", 0.5), ("taylor", 0.5)]
    more = sweep(folder, names=["l1", "taylor"], keeps=[0.5, 0.25], compensations=["none"])
    assert [(r.method, r.keep) for r in more] == [("l1", 0.25), ("taylor", 0.25)]
    assert sweep(folder, names=["l1"], keeps=[0.25], compensations=["none"]) == []
    with (folder / "cnn-cifar10.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [cnn.DENSE, "l1", "taylor", "l1", "taylor"]
    assert all(0 <= float(row["accuracy"]) <= 100 for row in rows)
    macs = [float(row["macs"]) for row in rows]
    assert macs[0] > macs[1] == macs[2] > macs[3] == macs[4]


def test_a_row_is_what_prune_gives(folder: Path) -> None:
    row = sweep(folder, names=["l1"], keeps=[0.5], compensations=["dense"])[1]
    images = load_images("cifar10").some(24, 20, 0)
    batches = [images.x[:12], images.x[12:24]]
    result = ispasp.prune(load_network(NAME), batches, 0.5, method="l1", progress=False)
    right = 100 * float((result.model(images.x_test[:]).argmax(1) == images.y_test).float().mean())
    assert row.accuracy == pytest.approx(right)
    assert (row.macs, row.params) == (result.cost.macs, result.cost.params)


def test_a_row_cut_off_and_a_method_that_failed_are_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise InputError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(cnn, "prune", refuse)
        rows = sweep(folder, names=["l1"], keeps=[0.5], compensations=["none"])
    assert (rows[1].accuracy, rows[1].note) == (None, "not today")
    assert "l1 did not run: not today" in cnn_report.summary(rows, "command", "figure.png")
    path = folder / "cnn-cifar10.csv"
    path.write_text(path.read_text() + f"{NAME},cifar10,24")
    again = sweep(folder, names=["l1"], keeps=[0.5], compensations=["none"])
    assert [(r.method, r.note) for r in again] == [("l1", "")]


def test_other_settings_need_another_folder(folder: Path) -> None:
    sweep(folder, names=["random"], keeps=[0.5], compensations=["none"])
    with pytest.raises(InputError, match="with 24 examples, 20 tested, seed 0: choose another folder"):
        list(cnn.run(replace(SETTINGS, seed=1), folder, progress=False))


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({"names": ["magic"]}, "unknown method 'magic'"),
        ({"keeps": [1.5]}, "pass fractions above 0"),
        ({"compensations": ["all"]}, "choose from none, local, dense"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_is_loaded(folder: Path, grid: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        list(cnn.run(replace(SETTINGS, data="nowhere"), folder, **grid))  # type: ignore[arg-type]


def test_the_command_writes_table_figure_and_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", NAME, "--examples", "24", "--tested", "20", "--keep", "0.5", "--method", "ispasp"]
    arguments += ["--method", "topk", "--compensate", "none", "--out", str(folder / "new")]
    app(["reproduce", "cnn", *arguments], standalone_mode=False)
    assert {path.name for path in (folder / "new").iterdir()} == {f"cnn-cifar10.{e}" for e in ("csv", "png", "md")}
    text = (folder / "new/cnn-cifar10.md").read_text()
    assert "| method | none 0.5 |" in text
    cells = {line.split(" | ")[0]: line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ")}
    assert cells["| ispasp"] == cells["| topk"]  # from keep 0.5 on they are the same method
    assert str(folder) not in text
    assert "ispasp, compensate none, keep 0.5:" in capsys.readouterr().out


def pipeline(folder: Path, **options: object) -> list[cnn_pipeline.Stage]:
    return list(cnn_pipeline.run(SETTINGS, TRAINING, folder, keep=0.5, progress=False, **options))  # type: ignore[arg-type]


PLACE = f"cnn-pipeline-{NAME}-cifar10-keep-0.5"


@pytest.mark.long
def test_the_pipeline_prunes_and_trains_block_by_block(folder: Path) -> None:
    rows = pipeline(folder)
    assert [r.block for r in rows] == [cnn.DENSE, *(f"layer{i}.0.conv1" for i in (1, 2, 3)), cnn_pipeline.FINAL]
    assert [(r.kept, r.units) for r in rows[1:4]] == [(8, 16), (16, 32), (32, 64)]
    assert all(a.macs > b.macs for a, b in itertools.pairwise(rows[:4]))
    assert pipeline(folder) == []
    model = ispasp.load(folder / PLACE / "model", CifarResNet(8))
    assert model.layer3[0].conv1.out_channels == 32
    dense = load_network(NAME)
    assert not torch.equal(model.linear.weight, dense.linear.weight)  # it was trained
    assert [path.name for path in (folder / PLACE).iterdir() if path.name.startswith("training")] == []
    with pytest.raises(InputError, match="choose another folder"):
        list(cnn_pipeline.run(SETTINGS, replace(TRAINING, lr=0.1), folder, keep=0.5, progress=False))


@pytest.mark.long
def test_an_interrupted_pipeline_ends_in_the_same_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pipeline(folder / "whole")
    steps = cnn_pipeline.run(SETTINGS, TRAINING, folder / "cut", keep=0.5, progress=False)
    head = [next(steps) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(cnn_pipeline, "save", lambda *args, **options: 1 / 0)  # a row without its network
        with pytest.raises(ZeroDivisionError):
            next(steps)
    rows = head + pipeline(folder / "cut")
    assert rows == whole
    with (folder / "cut" / PLACE / "stages.csv").open() as file:
        assert [row["block"] for row in csv.DictReader(file)] == [row.block for row in whole]
    a, b = (load_file(folder / name / PLACE / "model/model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
def test_a_compensated_pipeline_can_be_loaded(folder: Path) -> None:
    rows = pipeline(folder, compensate="dense")
    model = ispasp.load(folder / PLACE / "model", CifarResNet(8)).eval()
    images = load_images("cifar10").some(24, 20, 0)
    right = 100 * float((model(images.x_test[:]).argmax(1) == images.y_test).float().mean())
    assert rows[-1].trained_accuracy == pytest.approx(right)


def finetuned(folder: Path, methods: list[str], **options: object) -> list[cnn_finetune.Row]:
    named = {"keeps": [0.5], "seeds": 1, "progress": False, **options}
    return list(cnn_finetune.run(SETTINGS, TRAINING, folder, methods, **named))  # type: ignore[arg-type]


@pytest.mark.long
def test_every_method_gives_a_trained_network_of_the_same_size(folder: Path) -> None:
    rows = finetuned(folder, [])
    assert [row.method for row in rows] == list(cnn_finetune.METHODS)
    assert len({row.macs for row in rows}) == 1
    epochs = {row.method: row.epochs for row in rows}
    assert {epochs[name] for name in cnn_finetune.METHODS if name != "scratch-b"} == {4.0}  # three blocks, and the end
    assert 4.0 < epochs["scratch-b"] < 16.0
    assert all(0 <= row.accuracy <= 100 and row.cpu_s > 0 for row in rows)
    assert not list((folder / "cnn-finetune").iterdir())  # only the rows stay


def test_finetuned_rows_resume_and_are_those_of_the_pipeline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(cnn_finetune, "append_row", lambda *args: 1 / 0)  # interrupted at the very end
        finetuned(folder, ["ispasp"])
    assert list((folder / "cnn-finetune").iterdir())
    (row,) = finetuned(folder, ["ispasp"])
    stages = pipeline(folder / "alone")
    assert row.accuracy == stages[-1].trained_accuracy
    assert row.macs == stages[-1].macs
    assert finetuned(folder, ["ispasp"]) == []
    text = cnn_finetune.write(SETTINGS, folder, "the command").read_text(encoding="utf-8")
    assert f"| ispasp | {row.pruned:.2f} | **{row.accuracy:.2f}** | 0.00 | 1 | 4 |" in text


def test_training_in_mixed_precision_is_close_and_not_the_same() -> None:
    models = {precision: load_network(NAME) for precision in ("no", "bf16")}
    for precision, model in models.items():
        replace(TRAINING, precision=precision).fit(model, load_images("cifar10"), 1, seed=0, progress=False)
    a, b = (model.conv1.weight for model in models.values())
    assert not torch.equal(a, b)
    assert torch.allclose(a, b, atol=0.01)
    assert a.is_contiguous() and not models["no"].training


def test_mixed_precision_makes_rows_of_its_own(folder: Path) -> None:
    run = partial(cnn_finetune.run, SETTINGS, folder=folder, methods=["scratch-e"], keeps=[0.5], seeds=1)
    (full,) = run(training=TRAINING, progress=False)
    (mixed,) = run(training=replace(TRAINING, precision="bf16"), progress=False)
    assert "precision" not in full.settings
    assert mixed.settings == f"{full.settings} precision=bf16"
    text = cnn_finetune.summary([full, mixed], "the command")
    assert text.count(f"## {NAME} at keep 0.5") == 2  # one table each
    assert f"Settings: `{mixed.settings}`" in text
    assert not list(run(training=replace(TRAINING, precision="bf16"), progress=False))


def test_networks_from_scratch_forget_the_weights(folder: Path) -> None:
    soft, scratch = finetuned(folder, ["sfp", "scratch-e"])
    whole = 100 * float((load_network(NAME)(load_images("cifar10").some(24, 20, 0).x_test[:]).argmax(1)
                         == load_images("cifar10").some(24, 20, 0).y_test).float().mean())  # fmt: skip
    assert soft.pruned == pytest.approx(whole)  # soft filter pruning starts at the dense network
    assert scratch.macs == soft.macs
    with pytest.raises(InputError, match=r"methods \['magic'\]: choose from ispasp, gfs"):
        finetuned(folder, ["magic"])


def test_the_pipeline_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(InputError, match="pass either a recipe"):
        cnn_pipeline.target("resnet34", None, None)
    with pytest.raises(InputError, match="choose from resnet34-2.69G, resnet34-2.13G"):
        cnn_pipeline.target("resnet34", "mobilenet_v2-260M", None)


@pytest.mark.long
def test_an_image_folder_works_with_the_command(folder: Path) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / "pets" / part / name).mkdir(parents=True)
            pixels = random.integers(0, 256, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pets" / part / name / "1.png")
    arguments = ["--model", NAME, "--data", str(folder / "pets"), "--out", str(folder / "new"), "--examples", "2"]
    arguments += ["--pipeline", "--keep", "0.5", "--epochs", "1", "--batch", "2"]
    app(["reproduce", "cnn", *arguments], standalone_mode=False)
    text = (folder / "new" / f"cnn-pipeline-{NAME}-pets-keep-0.5/stages.md").read_text()
    assert "| 1 | layer1.0.conv1 | 8 of 16 |" in text
    assert str(folder) not in text


def test_augmented_images_are_views_of_the_image() -> None:
    data = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8)
    plain = Pixels(data, ((0.0,), (1 / 255,)))
    set_ = cnn_augment.Augmented(plain, torch.tensor([7]))
    torch.manual_seed(0)
    views = [set_[0][0] for _ in range(40)]
    assert len({tuple(v.flatten().tolist()) for v in views}) > 20
    steps = [v[0][:, 1:] - v[0][:, :-1] for v in views]
    inside = [step[(v[0][:, 1:] > 0) & (v[0][:, :-1] > 0)] for step, v in zip(steps, views, strict=True)]
    signs = {int(s) for step in inside for s in step.round().tolist()}
    assert signs == {1, -1}  # neighbours stay neighbours, from left to right or flipped


def test_augmented_files_are_parts_of_the_picture(tmp_path: Path) -> None:
    ramp = np.zeros((300, 400, 3), dtype=np.uint8)
    ramp[..., 0] = np.linspace(0, 255, 400)[None]
    Image.fromarray(ramp).save(tmp_path / "a.png")
    files = Files((tmp_path / "a.png",), ((0.0,) * 3, (1.0,) * 3))
    torch.manual_seed(0)
    views = [cnn_augment.Augmented(files, torch.tensor([0]))[0][0] for _ in range(20)]
    assert all(v.shape == (3, 224, 224) for v in views)
    widths = [float(v[0].max() - v[0].min()) for v in views]
    assert min(widths) < 0.5
    assert max(widths) > 0.7
    assert {bool(v[0, 0, 0] < v[0, 0, -1]) for v in views} == {True, False}


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    weights = load_file(folder / "data/cifar10-resnet8.safetensors")
    del weights["linear.bias"]
    torch.save(weights, folder / "short.pth")
    with pytest.raises(InputError, match="1 tensors are missing and 0 unexpected \\(linear.bias\\)"):
        load_network(NAME, folder / "short.pth")
    with pytest.raises(InputError, match="is not a file"):
        load_network(NAME, folder / "none.pth")
