"""Ctrl-C in the middle of something."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ispasp
from ispasp.graph.state import uninterrupted


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """A shell may have started us with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_block_ends_first() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        ctrl_c()
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_go_on_as_ever() -> None:
    done: list[str] = []

    def work() -> None:
        with uninterrupted():
            done.append("all of it")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["all of it"]


def test_ctrl_c_inside_the_export_leaves_no_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    export = torch.export.export

    def interrupted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hook = model[1].register_forward_pre_hook(lambda *_: ctrl_c())
        try:
            return export(model, *args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(torch.export, "export", interrupted)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        ispasp.prune_(model, [torch.rand(16, 4)], progress=False)
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * 4
    for key, value in model.state_dict().items():
        assert value.equal(before[key]), key


def test_ctrl_c_while_the_result_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ispasp.result.Layer", lambda *_: ctrl_c())
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(KeyboardInterrupt):
        ispasp.prune_(model, [torch.rand(16, 4)], progress=False)
    assert model[0].out_features == 8
    assert model[2].weight.shape == (2, 8)
