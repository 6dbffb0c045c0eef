"""The demo trains, prunes with every method and fine-tunes for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ispasp
from ispasp_lab import demo


@pytest.fixture(scope="module")
def done() -> demo.Demo:
    return demo.run(keep=0.25, epochs=12, progress=False)


@pytest.mark.long
def test_every_method_has_a_row_of_numbers_or_says_why_not(done: demo.Demo) -> None:
    dense, *rows = done.rows
    assert [row.method for row in rows] == ispasp.methods()
    assert dense.plain > 90
    assert dense.macs == 64 * 256 + 256 * 128 + 128 * 10
    assert [row.method for row in rows if row.note] == ["slimming"]  # the network has no BatchNorm
    for row in rows:
        if row.note:
            assert row.plain is None
            continue
        assert row.macs == 64 * 64 + 64 * 32 + 32 * 10
        assert row.parameters == row.macs + 64 + 32 + 10
        assert row.compensated > max(row.plain, 90)
        assert row.healed > 90 and row.finetuned > 90
    table = demo.as_table(done.rows, 0.25)
    assert all(name in table for name in ispasp.methods())
    assert "BatchNorm" in table


@pytest.mark.long
def test_the_report_and_the_network_are_written(done: demo.Demo, tmp_path: Path) -> None:
    report = demo.write(done, tmp_path / "out")
    assert "Handwritten digits, pruned" in report.read_text(encoding="utf-8")
    assert set(done.result.curves) == {"0", "2"}
    x = demo.Digits.load().x_test
    torch.testing.assert_close(ispasp.load(tmp_path / "out", demo.network())(x), done.result.model(x))


def test_a_wrong_keep_is_told_before_training() -> None:
    with pytest.raises(ispasp.errors.InputError, match="keep=1.5"):
        demo.run(keep=1.5, epochs=10**9)
