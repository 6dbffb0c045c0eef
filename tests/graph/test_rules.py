"""Single rules on networks of a few lines: the right units are found, and removing them equals masking."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ispasp
from ispasp.graph.track import RULES


class Net(nn.Module):
    """Two linear layers around an op; more layers by name."""

    def __init__(
        self, between: Callable[[Net, Tensor], Tensor], hidden: int = 12, out: int = 12, **more: object
    ) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, hidden), nn.Linear(out, 3)
        self.between = between
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self, self.a(x)))


def conv2(m: nn.Module, x: Tensor) -> Tensor:
    return F.fold(F.unfold(x[..., None, None].expand(-1, -1, 3, 3), 3), 3, 3).mean([2, 3])


ROWS = torch.tensor([0, 1, 1, 0])
NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "tensordot": (
        lambda: Net(lambda m, h: torch.tensordot(h.relu(), m.w, 1), w=nn.Parameter(torch.randn(12, 12))),
        {"a": 12, "w": 12},
    ),
    "einsum with dots": (
        lambda: Net(
            lambda m, h: torch.einsum("... i, oi -> ... o", h.relu(), m.w), w=nn.Parameter(torch.randn(12, 12))
        ),
        {"a": 12, "w": 12},
    ),
    "einsum without a right side": (
        lambda: Net(lambda m, h: torch.einsum("i...,ij", h.relu().T, m.w), w=nn.Parameter(torch.randn(12, 12))),
        {"a": 12, "w": 12},
    ),
    "index_add": (lambda: Net(lambda m, h: h.new_zeros(2, h.shape[1]).index_add_(0, ROWS, h.relu())), {"a": 12}),
    "scatter_add": (
        lambda: Net(lambda m, h: h.new_zeros(2, h.shape[1]).scatter_add(0, ROWS[:, None].expand_as(h), h.relu())),
        {"a": 12},
    ),
    "scatter_reduce": (
        lambda: Net(lambda m, h: torch.scatter_reduce(h[:2], 0, ROWS[:, None].expand_as(h), h, "amax")),
        {"a": 12},
    ),
    "transposed": (lambda: Net(lambda m, h: h.T[None].mT.swapaxes(0, 1).transpose(0, 2).permute(2, 1, 0)), {"a": 12}),
    "bilinear": (
        lambda: Net(lambda m, h: m.two(h.relu(), m.c(h).relu()), out=4, c=nn.Linear(12, 6), two=nn.Bilinear(12, 6, 4)),
        {"a": 12, "c": 6, "two": 4},
    ),
    "movedim": (lambda: Net(lambda m, h: h[..., None].movedim(1, 0).movedim(0, -1).squeeze(1)), {"a": 12}),
    "unfold and fold": (lambda: Net(conv2), {"a": 12}),
    "repeat": (lambda: Net(lambda m, h: h.repeat(1, 2), out=24), {"a": 12}),
    "tile and cat": (lambda: Net(lambda m, h: torch.cat([h.tile(1, 2), h], 1), out=36), {"a": 12}),
    "stack and sum": (lambda: Net(lambda m, h: torch.stack([h, h.sin()]).sum(0)), {"a": 12}),
    "complex numbers": (lambda: Net(lambda m, h: (torch.complex(h, h.sin()) * 1j).imag), {"a": 12}),
    "where": (lambda: Net(lambda m, h: torch.where(h > 0, h, h.exp() - 1)), {"a": 12}),
    "maximum of two": (lambda: Net(lambda m, h: torch.maximum(h, m.c(h.relu())), c=nn.Linear(12, 12)), {"a": 12}),
    "addcmul": (lambda: Net(lambda m, h: torch.addcmul(h, h, m.s), s=nn.Parameter(torch.randn(12))), {"a": 12}),
    "pixel shuffle": (
        lambda: Net(lambda m, h: F.pixel_shuffle(h[..., None, None].expand(-1, -1, 2, 2), 2).mean([2, 3]), out=3),
        {"a": 3},
    ),
    "glu": (lambda: Net(lambda m, h: F.glu(h), out=6), {"a": 6}),
    "pad": (lambda: Net(lambda m, h: F.pad(h, (1, 2)), out=15), {"a": 12}),
    "op of two numbers": (
        lambda: Net(lambda m, h: h.relu() * torch.ops.aten.div(8, 2, rounding_mode="trunc")),
        {"a": 12},
    ),
    "running buffer": (lambda: Net(lambda m, h: m.norm(h).relu(), norm=nn.BatchNorm1d(12)), {"a": 12}),
    "group norm": (lambda: Net(lambda m, h: m.norm(h).relu(), norm=nn.GroupNorm(4, 12)), {"a": 4}),
    "zeros to write on": (lambda: Net(lambda m, h: torch.zeros_like(h).copy_(h).relu()), {"a": 12}),
    "in place": (lambda: Net(lambda m, h: h.mul_(2).add_(1).relu_()), {"a": 12}),
    "unread mean": (lambda: Net(lambda m, h: (h.mean(-1), h.relu())[1]), {"a": 12}),
}


@pytest.mark.parametrize("name", NETS)
def test_units_are_found_and_removing_equals_masking(name: str) -> None:
    build, units = NETS[name]
    torch.manual_seed(0)
    model, x = build().double().eval(), torch.randn(4, 5, dtype=torch.float64)
    survey = ispasp.survey(model, x, scope="all")
    assert {d.name: d.units for d in survey.dimensions} == units
    dense = copy.deepcopy(model)(x)
    ispasp.apply_(model, survey.plan({d.name: range(1, d.units, 2) for d in survey.dimensions}), x, checked_by=survey)
    assert model(x).shape == dense.shape
    assert not torch.allclose(model(x), dense)


FROZEN: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "softmax": (lambda m, h: h.softmax(-1), "softmax runs over this axis"),
    "mean": (lambda m, h: h - h.mean(-1, keepdim=True), "mean runs over this axis"),
    "norm": (lambda m, h: F.normalize(h), "linalg_vector_norm runs over this axis"),
    "cumsum": (lambda m, h: h.cumsum(-1), "cumsum runs over this axis"),
    "sort": (lambda m, h: h.sort(-1).values, "sort runs over this axis"),
    "flip": (lambda m, h: h.flip(-1), "flip runs over this axis"),
    "roll": (lambda m, h: h.roll(1, -1), "roll runs over this axis"),
    "layer norm": (lambda m, h: F.layer_norm(h, [12]), "layer_norm normalises over this axis"),
    "batch statistics": (
        lambda m, h: F.batch_norm(h[:, None], None, None, training=True)[:, 0],
        "batch statistics average over this axis",
    ),
    "summed by position": (lambda m, h: h.index_add(1, torch.arange(12), h), "is indexed by position"),
    "by position": (lambda m, h: h[:, torch.arange(11, -1, -1)], "is indexed by position"),
    "every second": (lambda m, h: h[:, ::2].repeat_interleave(2, 1), "is sampled by position"),
    "a vector of its own": (lambda m, h: h * torch.arange(12.0, dtype=h.dtype), "has a size written in the forward"),
    "activations with each other": (lambda m, h: h * (h @ h.T)[:, :1], "is summed over between activations"),
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_depends_on_the_whole_axis_is_frozen_with_the_reason(name: str) -> None:
    between, reason = FROZEN[name]
    torch.manual_seed(0)
    with pytest.raises(ispasp.errors.NothingToPruneError, match=reason):
        ispasp.survey(Net(between).double().eval(), torch.randn(4, 5, dtype=torch.float64))


def test_embedding_bags_and_embeddings_are_producers() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.table = nn.EmbeddingBag(20, 8), nn.Embedding(20, 6)
            self.out = nn.Linear(14, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(torch.cat([self.bag(ids), self.table(ids).mean(1)], 1))

    torch.manual_seed(0)
    model, ids = Bags().eval(), torch.randint(0, 20, (3, 4))
    survey = ispasp.survey(model, ids)
    assert {d.name: d.units for d in survey.dimensions} == {"bag": 8, "table": 6}
    ispasp.apply_(model, survey.plan(0.5), ids, checked_by=survey)
    assert (model.bag.weight.shape, model.table.weight.shape) == ((20, 4), (20, 3))
    assert (model.bag.embedding_dim, model.table.embedding_dim, model.out.in_features) == (4, 3, 7)


def test_every_rule_is_keyed_by_an_overload_or_a_name() -> None:
    assert len(RULES) > 500
    assert all(isinstance(op, (str, torch._ops.OpOverload)) for op in RULES)
