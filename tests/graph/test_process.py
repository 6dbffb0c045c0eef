"""Threads, and what belongs to the whole process."""

from __future__ import annotations

import io
import logging
import random
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.graph.state import one_at_a_time, quiet, settings_kept
from ispasp.graph.trace import trace

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Branching(nn.Module):
    """Decides by values, so that torch.export fails at first and prints its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y if y.abs().sum() > 0 else -y


class Drawing(nn.Module):
    """Draws random numbers in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y + torch.rand_like(y)


def nets() -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
        conv = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Conv1d(8, 2, 3), nn.Flatten())
        return [mlp, conv, Branching(), Drawing()]


def pruned(net: nn.Module) -> dict[str, Tensor]:
    return ispasp.prune(net, [X, X + 1], 0.5, progress=False).model.state_dict()


def process() -> list[Any]:
    """Everything global that a call might leave behind."""
    handlers = {h for name in ("", "torch", "torch.fx") for h in logging.getLogger(name).handlers}
    return [
        (sys.stdout, sys.stderr),
        logging.root.manager.disable,
        list(warnings.filters),
        warnings.showwarning,
        {id(h): list(h.filters) for h in handlers},
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(),
    ]


@pytest.mark.long
def test_four_threads_at_once_and_a_fifth_that_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    out, log = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    logger = logging.getLogger("somebody.else")
    logger.propagate = False
    handler = logging.StreamHandler(log)
    logger.addHandler(handler)
    expected = [pruned(net) for net in nets()]
    before = process()
    stop, said, models = threading.Event(), [0], nets()
    found: list[dict[str, Tensor]] = [{} for _ in models]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(3):
                found[number] = pruned(models[number])
        except BaseException as error:
            errors.append(error)

    def talk() -> None:
        while not stop.wait(0.002):
            print(f"line {said[0]}")
            logger.error("line %d", said[0])
            said[0] += 1

    talker = threading.Thread(target=talk)
    talker.start()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    talker.join()
    logger.removeHandler(handler)
    assert errors == []
    assert process() == before
    assert said[0] > 20
    assert out.getvalue().splitlines() == log.getvalue().splitlines() == [f"line {k}" for k in range(said[0])]
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_failed_trace_says_nothing_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    ispasp.survey(Branching(), X)
    assert capfd.readouterr() == ("", "")


def test_quiet_is_for_one_thread(recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
    def other() -> None:
        warnings.warn("from the other one", stacklevel=1)
        logging.getLogger("torch.fx.other").error("from the other one")

    logging.getLogger("torch.fx.other").propagate = True
    with quiet("torch"):
        warnings.warn("from this one", stacklevel=1)
        logging.getLogger("torch.fx.this").error("from this one")
        logging.getLogger("mine").error("of another package")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [str(w.message) for w in recwarn] == ["from the other one"]
    assert "of another package" in caplog.messages
    assert "from this one" not in caplog.messages


def test_a_forked_child_does_not_wait_for_threads_it_does_not_have() -> None:
    from ispasp.graph import state as module

    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with one_at_a_time():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(10)
    before = module._turn
    module._new_turn()  # what a fork runs in the child
    try:
        with one_at_a_time():
            assert module._turn is not before
    finally:
        module._turn = before
        leave.set()
        thread.join()


def test_settings_that_a_forward_changes_are_put_back() -> None:
    class Setter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))

        def forward(self, x: Tensor) -> Tensor:
            random.seed(1)
            np.random.rand()
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
            return self.body(x)  # type: ignore[no-any-return]

    def settings() -> list[Any]:
        flags = [torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), torch.get_num_threads()]
        return [*process(), *flags]

    net = Setter()
    before = settings()
    ispasp.survey(net, X)
    assert settings() == before
    with settings_kept():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
    assert torch.get_default_dtype() is torch.float32
    assert torch.empty(1).device.type == "cpu"
    assert torch.is_grad_enabled()


def test_a_branch_on_parameters_goes_by_their_values() -> None:
    """torch gives parameters no values beside fake tensors, but whatever lies in memory: 36 of 150 went wrong."""
    net = nets()[2]
    kept = [torch.full((12, 6), torch.nan) for _ in range(50)]  # what fresh memory is then likely to hold
    del kept
    for _ in range(5):
        assert "neg" not in str(trace(net, X).graph)
