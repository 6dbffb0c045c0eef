"""`ispasp bench accuracy` on a few made-up images and random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ispasp.cli.app import app
from ispasp.errors import InputError
from ispasp_lab import models
from ispasp_lab.benchmarks import accuracy, healing
from ispasp_lab.benchmarks.accuracy_tasks import NETWORKS, SentenceEncoder, spearman
from ispasp_lab.commands.bench import bench
from ispasp_lab.experiments.records import read_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10 of 48 and 30 images, and random weights for resnet20, which has 8 layers here; no other data."""
    monkeypatch.setattr("ispasp_lab.models.cifar_resnet.CifarResNet", lambda _: models.CifarResNet(8))
    monkeypatch.setenv("ISPASP_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 48), ("test", 30)):
        arrays[f"x_{part}"] = random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = random.integers(0, 10, n, dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", **arrays)
    torch.manual_seed(0)
    weights = models.resnet20(pretrained=False).state_dict()
    save_file({k: t for k, t in weights.items() if "num_batches" not in k}, tmp_path / "cifar10-resnet20.safetensors")
    return tmp_path


@pytest.mark.long
def test_rows_are_measured_once_and_become_a_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "out"
    chosen = ["--way", "keep", "--size", "0.5", "--method", "l1", "--test", "20", "--heal-time", "0.2"]
    arguments = ["accuracy", "--only", "resnet20", "--only", "resnet56", *chosen, "--out", str(out)]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 0, done.output
    assert "resnet56 is skipped: cifar10-resnet56.safetensors not in" in done.output
    rows = read_rows(out / accuracy.NAME, accuracy.Row)
    assert [(r.way, r.method, r.heal) for r in rows] == [
        ("", "dense", "no"),
        ("keep", "l1", "no"),
        ("keep", "l1", "yes"),
    ]
    assert all(r.test == 20 and r.score is not None and 0 <= r.score <= 100 for r in rows)
    assert rows[1].macs == rows[2].macs
    assert rows[1].macs == pytest.approx(0.5, abs=0.02)
    assert rows[1].steps == 0 < rows[2].steps
    assert rows[1].seconds is not None
    assert rows[2].seconds is not None
    assert rows[1].seconds < rows[2].seconds
    line = next(x for x in (out / accuracy.PAGE).read_text().splitlines() if x.startswith("| `keep=0.5` | 5"))
    assert line.split(" | ")[2:6] == ["-"] * 4  # auto and ispasp were not run
    assert f"**{rows[1].score:.2f}**" in line

    monkeypatch.setattr(accuracy, "prune", lambda *args, **options: 1 / 0)
    assert CliRunner().invoke(bench, arguments).exit_code == 0
    assert read_rows(out / accuracy.NAME, accuracy.Row) == rows


@pytest.mark.long
def test_healing_in_both_ways(folder: Path) -> None:
    options = ["--method", "l1", "--keep", "0.5", "--steps", "2", "--block-steps", "3", "--test", "10", "--json"]
    options += ["--examples", "40", "--out", str(folder)]
    done = CliRunner().invoke(app, ["bench", "healing", "--only", "resnet20", *options])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["way"], row["steps"]) for row in rows] == [("end to end", 2), ("by blocks", 3)]
    assert all(row["after"] <= row["before"] == rows[0]["before"] for row in rows)
    assert "held-out before" in (folder / healing.PAGE).read_text()
    again = CliRunner().invoke(app, ["bench", "healing", "--only", "resnet20", *options])
    assert json.loads(again.stdout) == []  # both rows are there


def test_a_row_that_cannot_be_measured_says_why_and_is_tried_again(folder: Path) -> None:
    choice = accuracy.Choice((0.5,), ("macs",), ("slimming",), ("no",), test=4)

    def failing(*args: object, **options: object) -> None:
        raise InputError("cannot run")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "prune", failing)
        made = list(accuracy.run("resnet20", folder, choice, progress=False))
    assert "cannot run" in accuracy.described(made[1])
    assert "cannot run" not in accuracy.as_page(made)
    again = list(accuracy.run("resnet20", folder, choice, progress=False))
    assert [row.score is not None for row in again] == [True]
    assert len(read_rows(folder / accuracy.NAME, accuracy.Row)) == 2


def test_targets_are_judged_by_the_default_method() -> None:
    row = accuracy.Row("resnet56", "macs", 0.5, "auto", "all", "no", 10_000, 91.0, None, 0.5, 0.5, 60.0, 0, None, "")
    better = replace(row, method="obs", score=95.0)
    page = accuracy.as_page([row, better, replace(row, heal="yes", score=92.5), replace(row, test=5, score=10.0)])
    assert "half of the MACs, not healed, target >= 91.3: 91.00 with `Macs(0.5)`, **short by 0.30**." in page
    assert "half of the MACs, healed, target >= 92.5: 92.50 with `Macs(0.5)`, **reached**." in page
    assert "a quarter of the MACs, healed, target >= 89: not run." in page
    assert "| 91.00 | **92.50** |" in page
    assert "**95.00**" in page
    text = replace(row, task="smollm2", way="keep", size=0.75, score=70.0, other=99.0)
    page = accuracy.as_page([text])
    assert "target <= 60: 70.00 with `keep=0.75`, **short by 10.00**." in page
    assert "70.00 (99.00)" in page


def test_rows_of_another_refit_are_marked_and_give_way() -> None:
    row = accuracy.Row("resnet56", "macs", 0.5, "auto", "all", "no", 10_000, 91.0, None, 0.5, 0.5, 60.0, 0, None, "")
    old = replace(row, refit="consumers", score=90.0)
    assert old.key != row.key
    page = accuracy.as_page([row, old, replace(old, heal="yes", score=92.0)])
    assert r"| **91.00** | **92.00\*** |" in page and "90.00" not in page
    assert r"healed, target >= 92.5: 92.00\* with `Macs(0.5)`" in page


def test_unknown_tasks_methods_and_ways_are_refused() -> None:
    with pytest.raises(InputError, match="there is no task 'vgg': choose from resnet56"):
        accuracy.missing("vgg")
    with pytest.raises(InputError, match="unknown method 'magic'"):
        accuracy.Choice(methods=("magic",))
    with pytest.raises(InputError, match="way 'flops': choose from keep"):
        accuracy.Choice(ways=("flops",))
    assert {target.size in NETWORKS[name].sizes[way] for name in NETWORKS for target in NETWORKS[name].targets
            for way in target.ways} == {True}  # fmt: skip


def test_padding_does_not_change_sentences() -> None:
    class Output:
        def __init__(self, ids: torch.Tensor) -> None:
            self.last_hidden_state = torch.stack([ids.float(), ids.float() ** 2], -1)

    class Transformer(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Output:
            return Output(input_ids)

    encoder = SentenceEncoder(Transformer())
    short = encoder(torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.long))
    padded = encoder(torch.tensor([[1, 2, 9]]), torch.tensor([[1, 1, 0]]))
    assert torch.allclose(short, padded)
    assert float(short.norm()) == pytest.approx(1)
    assert spearman(torch.arange(5.0), -torch.arange(5.0)) == pytest.approx(-1)
