"""Where waiting batches do not fit into memory, each is run from the start for every layer: the result is the same."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import ispasp
from ispasp.api import sequential as walk
from ispasp.calibrate import sources
from ispasp.calibrate.passage import Passage
from support.naive import Written
from support.nets import alive, mlp
from support.written import NETWORKS


def pruned(net: Written, memory: int | None, compensate: str | None) -> ispasp.Result:
    options: dict[str, Any] = {"compensate": compensate}
    if compensate == "all":
        options = {"compensate": "dense", "refit": "all"}
    options |= {"method": "ispasp", "progress": False, "memory": memory, **net.options}
    return ispasp.prune(net.build(), net.batches(), 0.34, **options)


@pytest.fixture
def reruns(monkeypatch: pytest.MonkeyPatch) -> list[sources.Rerun]:
    """Every source that runs batches anew."""
    made: list[sources.Rerun] = []

    def make(*args: Any, **kwargs: Any) -> sources.Rerun:
        made.append(sources.Rerun(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(walk, "Rerun", make)
    return made


@pytest.mark.parametrize(
    ("name", "compensate"),
    [
        ("resnet", None),
        ("resnet", "local"),
        ("resnet", "dense"),
        ("streams", "dense"),
        ("called twice", "dense"),
        ("view changed in place", "dense"),
        ("inception", "local"),
        ("heads", "dense"),
        ("densenet", "all"),
    ],
)
def test_rerunning_equals_lockstep(name: str, compensate: str | None, reruns: list[sources.Rerun]) -> None:
    net = NETWORKS[name]
    waiting = pruned(net, None, compensate)
    assert not reruns
    again = pruned(net, 1, compensate)
    assert len(reruns) == 1
    assert waiting.plan.kept == again.plan.kept
    assert waiting.model.state_dict().keys() == again.model.state_dict().keys()
    for key, value in waiting.model.state_dict().items():
        assert_close(again.model.state_dict()[key], value, rtol=1e-9, atol=1e-9, msg=key)
    for a, b in zip(waiting.layers, again.layers, strict=True):
        assert (a.name, a.kept, a.iterations, a.notes) == (b.name, b.kept, b.iterations, b.notes)
        assert a.relative_error == pytest.approx(b.relative_error, rel=1e-6, abs=1e-9)


def test_a_limit_that_is_reached_on_the_way_gives_the_same(
    reruns: list[sources.Rerun], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, batch = lambda: alive(mlp(4, 6, 40, 40, 3)), torch.randn(5, 4, dtype=torch.float64)
    net = Written(build, lambda: [batch, -batch], ())
    fits = 2 * 5 * (6 + 6) * 8  # two batches of five before and after the first ReLU; later layers are wider
    reached: list[int] = []
    check = sources.Lockstep._check

    def noted(source: sources.Lockstep, passage: Passage) -> None:
        check(source, passage)
        reached.append(passage.bytes)

    monkeypatch.setattr(sources.Lockstep, "_check", noted)
    free, limited = pruned(net, None, "dense"), len(reached)
    tight = pruned(net, fits, "dense")
    assert len(reruns) == 1
    assert 0 < len(reached) - limited < limited  # it got past the first layer, not to the last
    for key, value in free.model.state_dict().items():
        assert_close(tight.model.state_dict()[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("where", ["on the way", "in the statistics"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_running_out_of_memory_frees_the_waiting_batches_and_goes_on(
    where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, reruns: list[sources.Rerun]
) -> None:
    net = NETWORKS["mlp"]
    expected = pruned(net, None, "dense")
    waiting: list[weakref.ref[Passage]] = []
    still: list[int] = []

    class Watched(Passage):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            still.append(sum(ref() is not None for ref in waiting) if reruns else 0)
            super().__init__(*args, **kwargs)
            if not reruns:
                waiting.append(weakref.ref(self))

    def full(*_args: Any, **_kwargs: Any) -> Any:
        if not reruns and len(waiting) == 4:
            raise error("out of memory")
        return original(*_args, **_kwargs)

    monkeypatch.setattr(sources, "Passage", Watched)
    target, name = (Watched, "advance") if where == "on the way" else (walk, "gather")
    original = getattr(target, name)
    monkeypatch.setattr(target, name, full)
    found = pruned(net, None, "dense")
    assert len(reruns) == 1
    assert len(waiting) == 4
    assert set(still) == {0}  # no batch that waited was alive when the first one was run anew
    for key, value in expected.model.state_dict().items():
        assert_close(found.model.state_dict()[key], value, rtol=1e-9, atol=1e-9)


def test_other_errors_on_the_way_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(sources.Lockstep, "_check", broken)
    with pytest.raises(RuntimeError, match="a kernel is broken"):
        pruned(NETWORKS["mlp"], None, None)
