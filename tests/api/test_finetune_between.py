"""Pruning with training between the layers: what is pruned, what is said about it, what can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp


class Residual(nn.Module):
    """Layers without biases, so that compensation adds some; two blocks write to one stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 8, bias=False)
        self.a, self.b = nn.Linear(8, 10, bias=False), nn.Linear(10, 8, bias=False)
        self.c, self.d = nn.Linear(8, 10, bias=False), nn.Linear(10, 8, bias=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.b(torch.relu(self.a(x)))
        x = x + self.d(torch.relu(self.c(x)))
        return self.out(torch.relu(x))  # type: ignore[no-any-return]


def chain() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 7, bias=False), nn.ReLU(), nn.Linear(7, 3)]
    return nn.Sequential(*layers)


def data() -> Tensor:
    return torch.randn(64, 6, generator=torch.Generator().manual_seed(1)) + 1


def pruned(model: nn.Module, keep: Any = 0.5, train: Any = lambda model: None, **options: Any) -> ispasp.Result:
    return ispasp.prune(model, [data()], keep, finetune_between=train, progress=False, **options)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (chain, {}),
        (Residual, {}),
        (Residual, {"scope": "all"}),  # the stream is pruned before the layers that write to it gain a bias
        (Residual, {"scope": "all", "refit": "all"}),
        (Residual, {"compensate": None}),
    ],
)
def test_the_plan_and_the_cost_know_the_biases_that_compensation_added(
    build: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    def train(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)

    result = pruned(build(), train=train, **options)
    assert bool(result.plan.structure.biases) == (options.get("compensate", "dense") is not None)
    assert result.cost.params == sum(p.numel() for p in result.model.parameters())
    ispasp.save(result, tmp_path)
    again = ispasp.load(tmp_path, build())
    assert torch.equal(again(data()), result.model(data()))


def test_named_units_stay() -> None:
    result = pruned(chain(), {"0": [0, 1, 5], "*": 0.5})
    assert result.plan.kept["0"] == (0, 1, 5)
    assert len(result.plan.kept["2"]) == 4


def test_without_training_it_is_sequential_pruning() -> None:
    whole = ispasp.prune(chain(), [data()], 0.5, compensate=None, progress=False)
    parts = pruned(chain(), compensate=None)
    assert parts.plan.kept == whole.plan.kept
    assert torch.equal(parts.model(data()), whole.model(data()))


def test_every_layer_is_chosen_in_the_model_that_training_has_made() -> None:
    first: list[int] = []

    def swap(model: nn.Module) -> None:
        """After the first layer: three units of the second become loud."""
        if not first:
            first.append(1)
            with torch.no_grad():
                model[2].weight[[1, 4, 6]] = 50.0  # type: ignore[index, union-attr, operator]

    result = pruned(chain(), {"0": 4, "2": 3}, swap, method="topk", compensate=None)
    assert result.plan.kept["2"] == (1, 4, 6)


def test_a_budget_and_a_loader_as_the_paper_uses_them() -> None:
    x = data()
    batches = list(zip(x.split(16), x[:, :3].argmax(1).split(16), strict=True))
    results = []

    def train(model: nn.Module) -> None:
        results.append(ispasp.finetune(model, batches, epochs=5, recipe=ispasp.train.Sgd(lr=0.05), progress=False))

    model = chain()
    before = [parameter.clone() for parameter in model.parameters()]
    result = pruned(model, ispasp.Params(0.6), train)
    assert result.cost.params <= 0.6 * sum(p.numel() for p in model.parameters()) + 10
    assert len(results) == len(result.layers)
    assert results[-1].losses[-1] < results[0].losses[0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_is_no_function_is_refused_before_pruning() -> None:
    with pytest.raises(ispasp.errors.InputError, match="finetune_between=1: pass a function of the model"):
        pruned(chain(), train=1)
