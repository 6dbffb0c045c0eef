"""Calibration batches in every form that users have them, and models in every dtype."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ispasp
from support.nets import ResNet, alive, mlp

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Pair = namedtuple("Pair", "x scale")


class Two(nn.Module):
    """Takes two inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = alive(mlp(6, 10, 8, 3))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.body(x * scale)


class Encoding(UserDict[str, Tensor]):
    """As a tokenizer returns it: a mapping that is no dict, with attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["data"][name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclass
class Sample:
    image: Tensor
    label: Tensor


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from X.split(10)


ONE = torch.ones(20, 1, dtype=torch.float64)
LABELS = torch.zeros(20)
FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "tensors": (lambda: Two().body, lambda: list(X.split(10)), {}),
    "another size at the end": (lambda: Two().body, lambda: [X[:9], X[9:18], X[18:]], {}),
    "a generator": (lambda: Two().body, lambda: (x for x in X.split(10)), {}),
    "a mapped iterator": (lambda: Two().body, lambda: map(torch.clone, X.split(10)), {}),
    "tuples": (Two, lambda: [(x, s) for x, s in zip(X.split(10), ONE.split(10), strict=True)], {}),
    "lists": (Two, lambda: [[x, s] for x, s in zip(X.split(10), ONE.split(10), strict=True)], {}),
    "named tuples": (Two, lambda: [Pair(x, s) for x, s in zip(X.split(10), ONE.split(10), strict=True)], {}),
    "dicts": (Two, lambda: [{"scale": ONE, "x": X}], {}),
    "encodings": (Two, lambda: [Encoding(x=X, scale=ONE)], {}),
    "an attribute of encodings": (
        lambda: Two().body,
        lambda: [Encoding(x=X, scale=ONE)],
        {"input_of": lambda batch: batch.x},
    ),
    "loader": (
        lambda: Two().body,
        lambda: DataLoader(TensorDataset(X, LABELS), batch_size=10),
        {"input_of": lambda batch: batch[0]},
    ),
    "samples": (lambda: Two().body, lambda: [Sample(X, LABELS)], {"input_of": lambda batch: batch.image}),
    "streaming loader": (lambda: Two().body, lambda: DataLoader(Stream(), batch_size=None), {}),
}


@cache
def expected(order: str) -> dict[str, Tensor]:
    return ispasp.prune(Two().body, [X], order=order, ridge=1e-3, progress=False).model.state_dict()


ONESHOT = ("a generator", "loader", "encodings", "another size at the end")


@pytest.mark.parametrize(("form", "order"), [*((f, "sequential") for f in FORMS), *((f, "oneshot") for f in ONESHOT)])
def test_every_form_gives_the_same_network(form: str, order: str) -> None:
    build, batches, options = FORMS[form]
    result = ispasp.prune(build(), batches(), order=order, ridge=1e-3, progress=False, **options)
    found = {name.removeprefix("body."): value for name, value in result.model.state_dict().items()}
    for name, value in expected(order).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=f"{form}: {name}")


def test_batches_are_not_changed() -> None:
    batch = {"x": X.clone(), "scale": ONE.clone()}
    ispasp.prune(Two(), [batch], progress=False)
    assert list(batch) == ["x", "scale"]
    assert torch.equal(batch["x"], X)


def test_a_model_that_takes_no_part_of_a_batch() -> None:
    """Two examples are enough to look at a model, if it takes two."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = alive(mlp(6, 10, 3))

        def forward(self, x: Tensor, order: Tensor) -> Tensor:
            return self.body(x[order])

    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    result = ispasp.prune(Whole(), [(X, order)], progress=False)
    assert result.model.body[0].out_features == 5


def test_a_batch_of_one_example_without_a_batch_axis() -> None:
    result = ispasp.prune(alive(mlp(6, 10, 3)), list(X), hold_out=False, progress=False)
    assert result.plan.kept == ispasp.prune(alive(mlp(6, 10, 3)), [X], hold_out=False, progress=False).plan.kept


@pytest.mark.parametrize(
    ("dtype", "compensate", "order"),
    [
        (torch.float16, "dense", "sequential"),
        (torch.bfloat16, "local", "oneshot"),
        (torch.bfloat16, None, "sequential"),
    ],
)
def test_half_precision(dtype: torch.dtype, compensate: str | None, order: str) -> None:
    dense = alive(ResNet(small=True))
    batches = [torch.randn(8, 3, 9, 9, dtype=torch.float64) for _ in range(2)]
    options = {"compensate": compensate, "order": order, "progress": False}
    half = ispasp.prune(alive(ResNet(small=True)).to(dtype), [x.to(dtype) for x in batches], **options)
    assert {p.dtype for p in half.model.parameters()} == {dtype}
    assert half.model.bn1.running_mean.dtype == dtype
    assert half.verified < {torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for layer in half.layers:
        assert compensate is None or layer.relative_error <= layer.uncompensated_error
    whole = ispasp.prune(dense, batches, **options)
    same = [set(half.plan.kept[name]) & set(kept) for name, kept in whole.plan.kept.items()]
    assert sum(map(len, same)) >= 0.8 * sum(map(len, whole.plan.kept.values()))


def test_statistics_of_half_precision_do_not_overflow() -> None:
    """Sums of float16 activations beyond 65504 are taken in float64."""
    dense = mlp(6, 10, 3).half()
    x = 300 * torch.randn(600, 6).half()
    result = ispasp.prune(dense, [x], progress=False)
    assert all(torch.isfinite(p).all() for p in result.model.parameters())
    assert result.layers[0].relative_error < 1


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("compensate", [None, "local", "dense"])
def test_images_without_a_batch_axis(axes: int, compensate: str | None) -> None:
    conv = (nn.Conv1d, nn.Conv2d)[axes - 1]
    dense = alive(nn.Sequential(conv(3, 12, 3), nn.ReLU(), conv(12, 10, 3), nn.ReLU(), conv(10, 2, 1)))
    images = torch.randn(6, 3, *(8, 7)[:axes], dtype=torch.float64)
    alone = ispasp.prune(dense, list(images), compensate=compensate, ridge=1e-3, progress=False)
    together = ispasp.prune(dense, [images], compensate=compensate, ridge=1e-3, progress=False)
    assert alone.plan.kept == together.plan.kept
    for key, value in together.model.state_dict().items():
        torch.testing.assert_close(alone.model.state_dict()[key], value, rtol=1e-7, atol=1e-9)


def test_calibration_does_not_write_into_a_batch() -> None:
    from ispasp.engine.graphs import TracedGraph
    from ispasp.engine.runner import Edits, Runner
    from ispasp.graph.trace import named_tensors, trace

    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :6].mul_(2.0))

    model, x = InPlace(6, 2).double(), X.clone()
    found = Runner(TracedGraph(trace(model, x), {}), x, named_tensors(model), Edits()).advance()
    assert torch.equal(x, X)
    torch.testing.assert_close(found[0], model(x.clone()))


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x.view(-1)[:, None])))


def test_slices_are_batches_too() -> None:
    """A trace copies its inputs, so a view in it fits the memory of the copy, not that of a slice."""
    slices = list(torch.randn(12, 9, dtype=torch.float64)[:, :4].split(6))
    found, expected = (
        ispasp.prune(alive(Views()), batches, hold_out=False, progress=False).model.state_dict()
        for batches in (slices, [part.contiguous() for part in slices])
    )
    assert all(torch.equal(found[key], value) for key, value in expected.items())
