"""The latency benchmark: rows that are there are not measured again, and the page says what they hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from torch import nn

from ispasp.budget.latency import RUNTIMES
from ispasp.errors import InputError
from ispasp_lab.benchmarks import latency
from support.cli import command
from support.nets import mlp


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(row: latency.Row) -> latency.Row:
        asked.append(row.way)
        if row.way == "keep 0.5":
            return replace(row, failure="no luck")
        return replace(row, macs=0.5, predicted=2.0, measured=1.5, dense_ms=10.0, spread=0.1)

    monkeypatch.setattr(latency, "measured", measured)
    call = ("bench", "latency", "--network", "resnet50", "--runtime", "eager", "--out", tmp_path)
    done = command(*call, "--way", "Macs(0.5)")
    assert done.code == 0, done.err
    assert "resnet50, eager, Macs(0.5): 1.50x" in done.out
    assert "keep 0.5: no luck" in command(*call, "--way", "Macs(0.5)", "--way", "keep 0.5").out
    assert asked == ["Macs(0.5)", "keep 0.5"]
    page = (tmp_path / "latency.md").read_text()
    assert "1.50x" in page
    assert "no luck" in page


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no runtime 'tpu' here: choose from eager, compile, onnx"):
        next(latency.run(["resnet50"], ["tpu"], ["Macs(0.5)"], tmp_path))


def test_what_is_not_at_hand_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"timm", "onnxruntime", "torch_pruning"}
    monkeypatch.setattr(latency, "find_spec", lambda name: None if name in missing else name)
    asked: list[latency.Row] = []

    def measured(row: latency.Row) -> latency.Row:
        asked.append(row)
        return replace(row, failure="measured")

    monkeypatch.setattr(latency, "measured", measured)
    networks = [("--network", name) for name in ("vit_small", "resnet50", "smollm2-token")]
    ways = ("--way", "keep 0.5", "--way", "torch-pruning 0.5")
    runtimes = ("--runtime", "eager", "--runtime", "onnx")
    done = command("bench", "latency", *chain(*networks), *runtimes, *ways, "--out", tmp_path)
    assert done.code == 0, done.err
    by_hand = "not run: torch-pruning needs corrections by hand for it"
    assert done.out.splitlines()[:-1] == [
        "vit_small, eager, keep 0.5: not run: pip install timm",
        f"vit_small, eager, torch-pruning 0.5: {by_hand}",
        "vit_small, onnx, keep 0.5: not run: pip install timm onnxruntime",
        f"vit_small, onnx, torch-pruning 0.5: {by_hand}",
        "resnet50, eager, keep 0.5: measured",
        "resnet50, eager, torch-pruning 0.5: not run: pip install torch-pruning",
        "resnet50, onnx, keep 0.5: not run: pip install onnxruntime",
        "resnet50, onnx, torch-pruning 0.5: not run: pip install onnxruntime torch-pruning",
        "smollm2-token, eager, keep 0.5: measured",
        f"smollm2-token, eager, torch-pruning 0.5: {by_hand}",
        "smollm2-token, onnx, keep 0.5: not run: pip install onnxruntime",
        f"smollm2-token, onnx, torch-pruning 0.5: {by_hand}",
    ]
    assert [row.network for row in asked] == ["resnet50", "smollm2-token"]
    assert "not run: pip" not in (tmp_path / "latency.csv").read_text()


def test_torch_pruning_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped(name: str, keep: float) -> nn.Module:
        raise KeyError(name)

    tiny = latency.Network(lambda: mlp(6, 8, 3), lambda: torch.randn(4, 6), "six numbers", "torch")
    monkeypatch.setattr(latency, "NETWORKS", {"resnet50": tiny})
    monkeypatch.setattr(latency, "find_spec", lambda name: name)
    monkeypatch.setattr(latency.surgery, "stepped", stepped)
    rows = [*latency.run(["resnet50"], ["eager"], ["keep 0.5", "torch-pruning 0.5"], tmp_path)]
    assert rows[0].macs == 0.5
    assert rows[0].measured is not None
    assert "torch-pruning fails (KeyError: 'resnet50')" in rows[1].failure
    assert "six numbers" in latency.write(tmp_path).read_text()


def test_rows_are_shown_in_order(tmp_path: Path) -> None:
    rows = [
        latency.Row(*names, 1, "here", failure="none") for names in product(latency.NETWORKS, RUNTIMES, latency.WAYS)
    ]
    assert latency.as_table(rows[::-1]) == latency.as_table(rows)
