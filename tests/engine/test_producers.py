"""The weights that make a hidden dimension, for methods that look at nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.engine.graphs import TracedGraph
from ispasp.engine.runner import Edits, Runner
from ispasp.engine.sites import producers
from ispasp.graph.analyse import Analysis
from ispasp.graph.trace import named_tensors
from support.nets import Attention, ResNet, alive


def dense(model: nn.Module, analysis: Analysis, x: Tensor) -> Runner:
    return Runner(TracedGraph.of(analysis), x, named_tensors(model), Edits())


class Embedded(nn.Module):
    """A hidden dimension that two tables make, and no product."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.tokens(x) + self.places(torch.arange(5))))


@pytest.mark.parametrize("method", ["l1", "l2", "fpgm"])
def test_embeddings_are_producers(method: str) -> None:
    model = alive(Embedded())
    x = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(0))
    result = ispasp.prune(model, [x], 0.5, method=method, scope="all", progress=False)
    ((name, kept),) = result.plan.kept.items()
    if method == "l1":
        score = model.tokens.weight.abs().sum(0) + model.places.weight.abs().sum(0)
        assert set(kept) == set(score.topk(4).indices.tolist())
    assert name == "tokens"
    assert result.model.tokens.embedding_dim == result.model.places.embedding_dim == 4


def test_rows_units_and_scales() -> None:
    model = alive(ResNet())
    x = torch.zeros(2, 3, 9, 9, dtype=torch.float64)
    found = ispasp.survey(model, x, scope="all")
    (first,) = producers(found.analysis, "layer1.1.conv1", dense(model, found.analysis, x))
    assert torch.equal(first.weight, model.layer1[1].conv1.weight.detach().flatten(1))
    assert torch.equal(first.scale, model.layer1[1].bn1.weight.detach())
    assert first.unit_of().tolist() == list(range(9))
    stream = producers(found.analysis, "layer1.0.conv2", dense(model, found.analysis, x))
    made = [model.layer1[0].conv2, model.layer1[0].downsample[0], model.layer1[1].conv2]
    assert [p.weight.shape for p in stream] == [m.weight.flatten(1).shape for m in made]
    for producer, module in zip(stream, made, strict=True):
        assert torch.equal(producer.weight, module.weight.detach().flatten(1))


def test_a_head_has_several_rows_in_several_producers() -> None:
    model = alive(Attention(12, 4))
    x = torch.zeros(2, 5, 12, dtype=torch.float64)
    found = ispasp.survey(model, x)
    (name,) = (d.name for d in found.dimensions)
    made = producers(found.analysis, name, dense(model, found.analysis, x))
    assert len(made) == 3
    assert all(p.unit_of().tolist() == [unit for unit in range(4) for _ in range(3)] for p in made)
