"""One-shot order: memory does not grow with the number of batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ispasp
import ispasp._steps as module
from ispasp.engine.runner import Edits, Runner
from support.nets import ResNet, alive


class Loader:
    """Makes a batch when it is asked for one, and counts how many of them are still held by anyone."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.batches):
            g = torch.Generator().manual_seed(number)
            batch = torch.randn(2, 3, 9, 9, generator=g, dtype=torch.float64)
            self.made.append(weakref.ref(batch))
            self.most = max(self.most, sum(ref() is not None for ref in self.made))
            yield batch
            del batch


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators return, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                size = leaf.untyped_storage().nbytes()
                self.now += size
                weakref.finalize(leaf, self._gone, size)
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


def peak(batches: int, compensate: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Most bytes that live at once during calibration, and most batches."""
    measured: list[int] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with LiveBytes() as live:
                found = original(*args, **kwargs)
            measured.append(live.peak)
            return found

        return run

    loader = Loader(batches)
    with monkeypatch.context() as patch:
        patch.setattr(module, "measure_all", watched(module.measure_all))
        patch.setattr(module, "_gather_all", watched(module._gather_all))
        options = {"order": "oneshot", "compensate": compensate, "method": "obs", "progress": False}
        ispasp.prune(alive(ResNet(small=True)), loader, **options)
    assert len(loader.made) >= batches * (1 if compensate is None else 2)  # every pass asks for them anew
    assert len(measured) == (1 if compensate is None else 2)
    return max(measured), loader.most


@pytest.mark.parametrize("compensate", [None, "local"])
def test_peak_does_not_grow_with_the_number_of_batches(compensate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    few, held = peak(3, compensate, monkeypatch)
    many, held_of_many = peak(12, compensate, monkeypatch)
    assert few > 2 * 6 * 9 * 9 * 8  # the first layer's activations were counted
    assert many <= 1.02 * few
    assert held_of_many == held <= 4  # the first, the last, the present and the next one


def test_no_runner_outlives_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[weakref.ref[Runner]] = []
    most = 0

    class Watched(Runner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal most
            super().__init__(*args, **kwargs)
            runners.append(weakref.ref(self))
            most = max(most, sum(ref() is not None for ref in runners))

    monkeypatch.setattr(module, "Runner", Watched)
    options = {"order": "oneshot", "compensate": "local", "progress": False}
    ispasp.prune(alive(ResNet(small=True)), Loader(10), **options)
    assert len(runners) == 21  # two passes over all batches, and the example
    assert most <= 3


def test_values_are_let_go_when_nobody_needs_them() -> None:
    """The live activations in front of the last layer are those of that layer, not of the network."""
    found = ispasp.survey(alive(ResNet(small=True)), torch.zeros(2, 3, 9, 9, dtype=torch.float64))
    model = alive(ResNet(small=True))
    from ispasp.engine.graphs import TracedGraphs
    from ispasp.graph.trace import named_tensors

    batch = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    graph = TracedGraphs(model, found.analysis, batch).of(batch)
    runner = Runner(graph, batch, named_tensors(model), Edits())
    sizes = []
    with torch.no_grad():
        for node in sorted(graph.contractions.values(), key=graph.order.__getitem__):
            runner.advance(node)
            sizes.append(runner.bytes)
        (output,) = runner.advance()
    assert sizes[0] == batch.untyped_storage().nbytes()
    assert sizes[-1] == 2 * 8 * 8  # what the last linear layer reads
    assert max(sizes) < 2.5 * 2 * 6 * 9 * 9 * 8
    assert runner.bytes == 0
    with torch.no_grad():
        torch.testing.assert_close(output, model(batch))
