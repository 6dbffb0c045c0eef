"""The surgery benchmark skips networks whose weights are not at hand, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ispasp_lab.benchmarks import surgery


def test_a_network_without_its_weights_is_skipped_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ISPASP_DATA", str(tmp_path))
    assert surgery.run(["smollm2"], progress=False) == []
    assert f"smollm2 is skipped: put its folder SmolLM2-135M into {tmp_path}" in caplog.text
    (tmp_path / "SmolLM2-135M").mkdir()
    assert surgery._at_hand(["smollm2", "resnet50"]) == ["smollm2", "resnet50"]
