"""The latency benchmark: rows that are there are not measured again, and the page says what they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ispasp.errors import InputError
from ispasp_lab.benchmarks import latency
from support.cli import command


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


def test_what_is_not_at_hand_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISPASP_DATA", str(tmp_path))
    monkeypatch.setattr(latency, "find_spec", lambda name: None)
    assert [*latency.run(["smollm2-token"], ["eager"], ["Macs(0.5)", "torch-pruning 0.5"], tmp_path)] == []
