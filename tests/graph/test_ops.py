"""The table of contraction ops, and what follows a layer in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ispasp.graph.analyse import retracked
from ispasp.graph.ops import Tail, forms, given_to, op_of, output_channels, scale, tail
from ispasp.graph.trace import trace

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A linear layer and what comes after it."""

    def __init__(self, after: Callable[[Layer, Tensor, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(4, 4), after
        self.norm = norm or nn.Identity()
        self.gamma = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.layer(x), x)


def tail_of(model: nn.Module, training: bool = False) -> tuple[Tail, dict[Any, Tensor]]:
    traced = trace(model, X, training=training)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {n: tensors.get(traced.sources[n.name].name) for n in traced.graph.find_nodes(op="placeholder")}
    node = next(node for node in traced.graph.nodes if op_of(node))
    channel = output_channels(node)
    assert channel == -1
    return tail(node, channel, traced.sources), values


CASES: dict[str, tuple[Callable[[Layer, Tensor, Tensor], Tensor], Any, str]] = {
    "norm": (lambda m, y, x: m.norm(y), nn.BatchNorm1d(4), "norm"),
    "norm and skip": (lambda m, y, x: m.norm(y) + x, nn.BatchNorm1d(4), "norm other"),
    "skip first": (lambda m, y, x: x + y, None, "other"),
    "layer scale": (lambda m, y, x: x + m.gamma * y, None, "factors other"),
    "dropout in eval mode": (lambda m, y, x: x + m.norm(y).clone(), nn.Dropout(), "other"),
    "batch statistics": (lambda m, y, x: m.norm(y) + x, nn.BatchNorm1d(4, track_running_stats=False), ""),
    "two users": (lambda m, y, x: m.norm(y) + y.sum(), nn.BatchNorm1d(4), ""),
    "factor from the data": (lambda m, y, x: y * x, None, ""),
    "scaled skip": (lambda m, y, x: torch.add(y, x, alpha=2), None, ""),
    "twice itself": (lambda m, y, x: y + y, None, ""),
    "broadcast skip": (lambda m, y, x: y + x[:1], None, ""),
    "nonlinearity": (lambda m, y, x: x + m.norm(y.relu()), nn.BatchNorm1d(4), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_layer(name: str) -> None:
    after, norm, expected = CASES[name]
    found, _ = tail_of(Layer(after, norm).eval())
    assert [key for key in ("norm", "factors", "other") if getattr(found, key)] == expected.split()


def test_norm_and_dropout_in_training_end_the_tail() -> None:
    for norm in (nn.BatchNorm1d(4), nn.Dropout()):
        found, _ = tail_of(Layer(lambda m, y, x: m.norm(y) + x, norm), training=True)
        assert (found.norm, found.factors, found.other) == (None, (), None)


def test_scale_is_the_factor_on_each_output_channel() -> None:
    model = Layer(lambda m, y, x: m.gamma * m.norm(y), nn.BatchNorm1d(4)).eval()
    model.norm.weight.data.uniform_(1, 2)
    model.norm.running_var.uniform_(1, 2)
    found, values = tail_of(model)
    y = torch.eye(4)
    with torch.no_grad():
        expected = model.after(model, y, y) - model.after(model, torch.zeros(4, 4), y)
    torch.testing.assert_close(scale(found, values), expected.diagonal().double(), rtol=1e-5, atol=1e-6)


W = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "matmul from the left": lambda x, w: (w.T @ x.T).T,
    "einsum": lambda x, w: torch.einsum("tk,ko->to", x, w),
    "einsum, weight first": lambda x, w: torch.einsum("ko,tk->to", w, x),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([-1], [0])),
    "tensordot, weight first": lambda x, w: torch.tensordot(w, x, dims=([0], [-1])).T,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_linear_form_is_the_op(name: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(W)

        def forward(self, x: Tensor) -> Tensor:
            return PRODUCTS[name](x, self.w)

    model = Product()
    traced = trace(model, X)
    node = next(node for node in traced.graph.nodes if op_of(node))
    (contraction,) = retracked(model, traced).contractions
    env = {n: W if traced.sources[n.name].kind == "parameter" else X for n in traced.graph.find_nodes(op="placeholder")}
    for n in traced.graph.nodes:
        if n.op == "call_function" and n not in env:
            env[n] = n.target(*torch.fx.node.map_arg(n.args, env.__getitem__))
    given = torch.fx.node.map_arg(given_to(node), env.__getitem__)
    (form,) = forms(node, given, contraction.data)
    rows = form.arrange(contraction.data.get(given)).reshape(-1, 4)
    torch.testing.assert_close(rows @ form.consumer.weight.reshape(5, 4).T, X @ W)


@pytest.mark.parametrize(("factors", "count"), [({}, 1), ({"alpha": 2}, 0), ({"beta": 0.5}, 0)])
def test_a_scaled_addmm_has_no_linear_form(factors: dict[str, float], count: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.w = nn.Parameter(torch.ones(5)), nn.Parameter(W)

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.b, x, self.w, **factors)

    model = Scaled()
    traced = trace(model, X)
    (contraction,) = retracked(model, traced).contractions
    values = {"b": model.b, "w": model.w}
    env = {n: values.get(traced.sources[n.name].name, X) for n in traced.graph.find_nodes(op="placeholder")}
    given = torch.fx.node.map_arg(given_to(contraction.node), env.__getitem__)
    assert len(forms(contraction.node, given, contraction.data)) == count
