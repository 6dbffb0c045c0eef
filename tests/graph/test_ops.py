"""The table of contraction ops, and what follows a layer in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ispasp.graph.analyse import retracked
from ispasp.graph.ops import OPS, Operand, Tail, forms, given_to, op_of, output_channels, scale, tail, without_bias
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
    "one factor for all": (lambda m, y, x: m.norm.weight * y + x, nn.PReLU(1), ""),
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
    model = Layer(lambda m, y, x: m.gamma * m.norm(y), nn.BatchNorm1d(4, eps=0.5)).eval()
    model.norm.weight.data.uniform_(1, 2)
    model.norm.running_var.uniform_(1, 2)
    found, values = tail_of(model)
    y = torch.eye(4)
    with torch.no_grad():
        expected = model.after(model, y, y) - model.after(model, torch.zeros(4, 4), y)
    torch.testing.assert_close(scale(found, values), expected.diagonal().double(), rtol=1e-5, atol=1e-6)


class Product(nn.Module):
    """A product with a parameter."""

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor], Tensor], w: Tensor) -> None:
        super().__init__()
        self.b, self.w, self.product = nn.Parameter(torch.ones(5)), nn.Parameter(w), product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.w, self.b)


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
    model = Product(lambda x, w, _: PRODUCTS[name](x, w), W)
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


def only_contraction(model: Product, x: Tensor) -> tuple[Any, dict[str, Any]]:
    """The one contraction of the model, and its arguments."""
    traced = trace(model, x)
    (found,) = retracked(model, traced).contractions
    values = {"b": model.b, "w": model.w}
    env = {n: values.get(traced.sources[n.name].name, x) for n in traced.graph.find_nodes(op="placeholder")}
    return found, torch.fx.node.map_arg(given_to(found.node), env.__getitem__)


FORMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor, Tensor, int]] = {
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), X, W, 1),
    "addmm with alpha": (lambda x, w, b: torch.addmm(b, x, w, alpha=2), X, W, 0),
    "addmm with beta": (lambda x, w, b: torch.addmm(b, x, w, beta=0.5), X, W, 0),
    "a matrix for each group": (lambda x, w, b: x @ w, X.expand(2, 3, 4), W.expand(2, 4, 5), 1),
    "the same matrices for all": (lambda x, w, b: x @ w, X.expand(6, 2, 3, 4), W.expand(2, 4, 5), 0),
    "linear": (lambda x, w, b: nn.functional.linear(x, w), X, W.T, 1),
    "activations as a weight": (lambda x, w, b: nn.functional.linear(w, x), X, W.T, 0),
    "einsum": (lambda x, w, b: torch.einsum("tk,ko->to", x, w), X, W, 1),
    "einsum that broadcasts": (lambda x, w, b: torch.einsum("tk,ko->to", x, w), X, W[:1], 0),
    "einsum that sums rows": (lambda x, w, b: torch.einsum("tk,ko->o", x, w), X, W, 0),
}


@pytest.mark.parametrize("name", FORMS)
def test_only_plain_products_have_a_linear_form(name: str) -> None:
    product, x, w, count = FORMS[name]
    found, given = only_contraction(Product(product, w.clone()), x.clone())
    assert len(forms(found.node, given, found.data)) == count


def test_experts_read_their_own_rows() -> None:
    op = OPS["transformers.grouped_mm_fallback.default"]
    experts = torch.randn(3, 4, 5)
    made = op.form({"self": X, "mat2": experts, "offs": torch.tensor([1, 1, 3])}, Operand("self"))
    expected = [X[:1] @ experts[0], X[1:1] @ experts[1], X[1:] @ experts[2]]
    for form, y in zip(made, expected, strict=True):
        torch.testing.assert_close(form.arrange(X) @ form.consumer.weight.T, y)


@pytest.mark.parametrize(("bias", "taken"), [(torch.arange(5.0), True), (torch.ones(3, 5), False)])
def test_one_bias_for_each_output_is_taken_off(bias: Tensor, taken: bool) -> None:
    model = Product(lambda x, w, b: torch.addmm(b, x, w), W)
    model.b = nn.Parameter(bias)
    found, given = only_contraction(model, X)
    torch.testing.assert_close(without_bias(found.node, model(X), given), X @ W if taken else X @ W + bias)
