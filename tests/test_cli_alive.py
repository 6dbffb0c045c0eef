"""Signs of life in pipes."""

from __future__ import annotations

import logging
import time

import pytest

from ispasp.cli.app import signs_of_life
from ispasp.cli.options import LOG
from ispasp.report import progress


def test_a_stage_is_told_now_and_then(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="ispasp"), signs_of_life(every=0.02):
        LOG.debug("pruning %s", "net")
        until = time.monotonic() + 30
        while "ispasp: pruning net, 0 s" not in capsys.readouterr().err:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert "pruning net, 0 s" in caplog.messages  # records of the logger "ispasp.cli"
    assert LOG.handlers == []


def test_lines_of_progress_are_written_once_and_stand_for_the_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    with signs_of_life(every=1000.0):
        LOG.debug("pruning")
        assert list(progress.track([1, 2], "layers", 2)) == [1, 2]
    assert capsys.readouterr().err == "ispasp: layers: 0 of 2, 0 s\nispasp: layers: 1 of 2, 0 s\n"


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with signs_of_life():
        LOG.debug("pruning")
    assert capsys.readouterr().err == ""
