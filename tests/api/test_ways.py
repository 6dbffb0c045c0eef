"""Models that take several ways: other batches, other batch sizes, training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ispasp
from ispasp.graph.trace import trace


class Ways(nn.Module):
    """An MLP whose last layer depends on the shape of its input."""

    def __init__(self, short: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(8, 12), nn.Linear(12, 8)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.short = short

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(self.back(F.relu(self.front(x)))))
        return self.b(h) if self.short(x) else self.c(h)


def frozen(found: Any) -> dict[str, str]:
    return {row.name: row.reason for row in found.frozen}


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
@pytest.mark.parametrize("compensate", [None, "dense", "local"])
def test_a_branch_on_the_shape(order: str, compensate: str | None) -> None:
    model = Ways(lambda x: x.shape[1] < 5)
    batches = [torch.randn(4, 3, 8), torch.randn(4, 7, 8)]
    result = ispasp.prune(model, batches, 0.5, order=order, compensate=compensate, progress=False)
    for batch in batches:
        assert result.model(batch).shape == (*batch.shape[:2], 4)
    assert "a" not in result.plan.kept
    assert frozen(result)["a"] == "is read by b for some kinds of batches only"
    assert len(result.plan.kept["front"]) == 6
    assert result.evidence.kinds == 2


def test_a_branch_on_the_number_of_examples() -> None:
    model, x = Ways(lambda x: len(x) < 5), torch.randn(9, 8)
    result = ispasp.prune(model, [x], 0.5, progress=False)
    assert result.model(x).shape == (9, 4)
    assert result.model(x[:2]).shape == (2, 4)
    assert "a" not in result.plan.kept


def test_another_producer_for_another_shape_is_cut_alike() -> None:
    class Producers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.relu(self.a(x) if x.shape[1] < 5 else self.b(x)))

    batches = [torch.randn(4, 3, 8), torch.randn(4, 7, 8)]
    result = ispasp.prune(Producers(), batches, 0.5, progress=False)
    assert (result.model.a.out_features, result.model.b.out_features) == (8, 8)
    assert all(result.model(batch).shape == (*batch.shape[:2], 4) for batch in batches)
    assert result.verified < 1e-5


def test_an_axis_cut_at_the_length_of_the_input_is_cut_alike_for_all() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h, n = self.a(x), x.shape[1]
            return self.b(torch.cat([h[..., n:], h[..., :n]], -1))

    batches = [torch.randn(4, 3, 8), torch.randn(4, 7, 8)]
    try:
        result = ispasp.prune(Cut(), batches, 0.5, progress=False)
    except ispasp.errors.NothingToPruneError:
        return
    for batch in batches:
        assert torch.isfinite(result.model(batch)).all()


def test_a_kind_that_comes_late_is_refused_if_it_goes_another_way() -> None:
    class Later:
        """Yields another shape when it is gone through again."""

        def __init__(self) -> None:
            self.times = 0

        def __iter__(self) -> Any:
            self.times += 1
            return iter([torch.randn(4, 3 if self.times < 3 else 7, 8)])

    with pytest.raises(ispasp.errors.InputError, match="takes another path"):
        ispasp.prune(Ways(lambda x: x.shape[1] < 5), Later(), 0.5, order="oneshot", compensate=None, progress=False)


class Auxiliary(nn.Module):
    """A second head that only training reaches, as in GoogLeNet."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 6, 1)
        self.norm, self.aux, self.last = nn.BatchNorm2d(width), nn.Conv2d(width, 5, 1), nn.Linear(5, 2)
        self.idle = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.norm(self.a(x)))
        y = self.b(h).mean((2, 3))
        return (y, self.last(F.relu(self.aux(h)).mean((2, 3)))) if self.training else y


def test_train_only_branches_are_cut_alike() -> None:
    x = torch.randn(4, 3, 6, 6)
    result = ispasp.prune(Auxiliary(), [x], 0.5, progress=False)
    model = result.model.train()
    assert model.aux.in_channels == model.a.out_channels == 8
    y, side = model(x)
    (y.sum() + side.sum()).backward()
    assert model.aux.weight.grad is not None
    assert model.aux.weight.grad.shape == (5, 8, 1, 1)
    assert "used in training only" in frozen(result)["aux"]
    assert "used in training only" in frozen(result)["last"]
    assert "not used by the example call" in frozen(result)["idle"]


def test_train_only_branches_survive_saving_and_training(tmp_path: Any) -> None:
    x = torch.randn(4, 3, 6, 6)
    result = ispasp.prune(Auxiliary(), [x], 0.5, progress=False)
    again = ispasp.load(ispasp.save(result, tmp_path), Auxiliary())

    def loss(output: Any, _: Any) -> Tensor:
        return output[0].square().mean() + output[1].square().mean()

    before = again.aux.weight.detach().clone()
    ispasp.finetune(again, [(x, torch.zeros(4))], epochs=1, loss=loss, recipe=ispasp.train.Sgd(lr=0.1), progress=False)
    assert not torch.equal(again.aux.weight, before)


def test_what_training_cannot_run_with_is_refused() -> None:
    class Fixed(nn.Module):
        """Training reshapes to a width that is written in the code, in a way that no trace shows."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 10), nn.Linear(10, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            if self.training and (h.sum() > -1e9).item():
                h = h + torch.zeros(8)
            return self.d(F.relu(self.c(F.relu(self.b(h)))))

    x = torch.randn(4, 4)
    found = ispasp.survey(Fixed(), x)
    assert "a" in frozen(found)
    result = ispasp.prune(Fixed(), [x], 0.5, progress=False)
    assert result.model.train()(x).shape == (4, 2)
    assert result.model.c.out_features == 5


def test_a_training_trace_changes_nothing() -> None:
    model, x = Auxiliary().eval(), torch.randn(2, 3, 6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace(model, x, training=True)
    ispasp.survey(model, x)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Modes(nn.Module):
    """Has a layer that only another argument reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(8, 12), nn.Linear(12, 8)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, mode: str = "b") -> Tensor:
        h = F.relu(self.a(self.back(F.relu(self.front(x)))))
        return self.b(h) if mode == "b" else self.c(h)


def test_layers_that_no_batch_calls_are_told() -> None:
    x = torch.randn(16, 8)
    result = ispasp.prune(Modes(), [x], progress=False)
    (text,) = (text for text in result.advice if "no batch reaches c: " in text)
    assert "calls that reach it may fail" in text
    assert text.endswith("pass a batch that reaches it, or skip= what feeds it")
    assert "calls that use it may fail" in frozen(ispasp.survey(Modes(), x))["c"]
    both = ispasp.prune(Modes(), [(x, "b"), (x, "c")], progress=False)
    assert not any("no batch reaches" in text for text in both.advice)
    assert both.model(x, "c").shape == both.model(x).shape == (16, 4)
    left = ispasp.prune(Modes(), [x], skip=["a"], progress=False)
    assert left.model(x, "c").shape == (16, 4)
