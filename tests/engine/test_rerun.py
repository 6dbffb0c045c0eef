"""Where waiting batches do not fit into memory, each is run from the start for every layer: the result is the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import ispasp
from ispasp import _steps
from ispasp.engine import runner as engine
from ispasp.engine.runner import Cut, Edits, Lockstep, Runner
from ispasp.graph.ops import Operand
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
def reruns(monkeypatch: pytest.MonkeyPatch) -> list[Lockstep]:
    """Everything that has begun to run batches anew."""
    made: list[Lockstep] = []
    in_front = Lockstep._in_front

    def noted(walk: Lockstep, *args: Any) -> Iterator[Runner]:
        if walk.rerunning and walk not in made:
            made.append(walk)
        return in_front(walk, *args)

    monkeypatch.setattr(Lockstep, "_in_front", noted)
    return made


@pytest.mark.parametrize(
    ("name", "compensate"),
    [
        ("mlp", None),
        ("resnet", "dense"),
        ("streams", "dense"),
        ("called twice", "dense"),
        ("view changed in place", "dense"),
        ("inception", "local"),
        ("heads", "dense"),
        ("densenet", "all"),
    ],
)
def test_rerunning_equals_lockstep(name: str, compensate: str | None, reruns: list[Lockstep]) -> None:
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
    reruns: list[Lockstep], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, batch = lambda: alive(mlp(4, 6, 40, 40, 3)), torch.randn(5, 4, dtype=torch.float64)
    net = Written(build, lambda: [batch, -batch], ())
    fits = 2 * 5 * (6 + 6) * 8  # two batches of five before and after the first ReLU; later layers are wider
    reached: list[int] = []
    in_front = Lockstep._in_front

    def noted(walk: Lockstep, *args: Any) -> Iterator[Runner]:
        for runner in in_front(walk, *args):
            if not walk.rerunning:
                reached.append(runner.bytes)
            yield runner

    monkeypatch.setattr(Lockstep, "_in_front", noted)
    free, limited = pruned(net, None, "dense"), len(reached)
    tight = pruned(net, fits, "dense")
    assert len(reruns) == 1
    assert 0 < len(reached) - limited < limited  # it got past the first layer, not to the last
    for key, value in free.model.state_dict().items():
        assert_close(tight.model.state_dict()[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("spare", [0, -1])
def test_all_waiting_batches_have_to_fit(spare: int, reruns: list[Lockstep]) -> None:
    batch = torch.randn(5, 4, dtype=torch.float64)
    net = Written(lambda: alive(mlp(4, 6, 3)), lambda: [batch, -batch], ())
    fits = 2 * 5 * 6 * 8  # the ReLU of two batches of five
    pruned(net, fits + spare, None)
    assert len(reruns) == -spare


@pytest.mark.parametrize("where", ["on the way", "in the statistics"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_running_out_of_memory_frees_the_waiting_batches_and_goes_on(
    where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, reruns: list[Lockstep]
) -> None:
    net = NETWORKS["mlp"]
    expected = pruned(net, None, "dense")
    waiting: list[weakref.ref[Runner]] = []
    still: list[int] = []

    class Watched(Runner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            still.append(sum(ref() is not None for ref in waiting) if reruns else 0)
            super().__init__(*args, **kwargs)
            if not reruns:
                waiting.append(weakref.ref(self))

    def full(*_args: Any, **_kwargs: Any) -> Any:
        if not reruns and len(waiting) == 4:
            raise error("out of memory")
        return original(*_args, **_kwargs)

    monkeypatch.setattr(engine, "Runner", Watched)
    target, name = (Watched, "advance") if where == "on the way" else (_steps, "gather")
    original = getattr(target, name)
    monkeypatch.setattr(target, name, full)
    found = pruned(net, None, "dense")
    assert len(reruns) == 1
    assert len(waiting) == 4
    assert set(still) == {0}  # no batch that waited was alive when the first one was run anew
    for key, value in expected.model.state_dict().items():
        assert_close(found.model.state_dict()[key], value, rtol=1e-9, atol=1e-9)


def test_later_edits_come_first() -> None:
    cuts = [[Cut(Operand("input"), -1, torch.ones(2) > 0)] for _ in range(2)]
    one, two = (Edits({3: cut}, {"w": torch.full((1,), k)}, {4: torch.full((1,), k)}) for k, cut in enumerate(cuts))
    both = one | two | Edits(tensors={"v": torch.zeros(1)})
    assert both.cuts[3] is cuts[1]
    assert (both.tensors["w"].item(), both.biases[4].item(), both.tensors["v"].item()) == (1, 1, 0)


def test_other_errors_on_the_way_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_runner: Runner) -> int:
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(Runner, "bytes", property(broken))
    with pytest.raises(RuntimeError, match="a kernel is broken"):
        pruned(NETWORKS["mlp"], 2**30, None)
