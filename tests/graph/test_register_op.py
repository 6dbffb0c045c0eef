"""Rules for custom ops from outside the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.errors import InputError, NothingToPruneError
from ispasp.graph import Op, elementwise, linear_like, register_op, unregister_op


@torch.library.custom_op("ispasp_tests::bent", mutates_args=())
def bent(x: Tensor, slope: float) -> Tensor:
    return torch.where(x > 0, x, slope * x) + 0.1  # not zero at zero


@torch.library.custom_op("ispasp_tests::product", mutates_args=())
def product(rows: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return rows @ W.T + b


@torch.library.custom_op("ispasp_tests::share", mutates_args={"x"})
def share(x: Tensor) -> None:
    x.copy_(x.softmax(-1))


bent.register_fake(lambda x, slope: torch.empty_like(x))
product.register_fake(lambda rows, W, b: rows.new_empty(*rows.shape[:-1], W.shape[0]))


class Bent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return bent(x, 0.2)


class Product(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W, self.b = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.W, self.b)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6, dtype=torch.complex64), nn.Linear(6, 4, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x.to(torch.complex64)))
        return out.abs()


class Share(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        share(x)
        return x


def network(*layers: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in layers)).eval()


def bent_network() -> nn.Sequential:
    return network(lambda: nn.Linear(4, 8), Bent, lambda: nn.Linear(8, 3))


def product_network() -> nn.Sequential:
    return network(lambda: Product(4, 8), nn.ReLU, lambda: Product(8, 3))


X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


@contextmanager
def registered(target: Any, rule: Any, contraction: Any = None) -> Iterator[None]:
    register_op(target, rule, contraction)
    try:
        yield
    finally:
        unregister_op(target)


CASES: dict[str, tuple[Callable[[], nn.Sequential], Any, tuple[Any, ...], str]] = {
    "element-wise": (bent_network, bent, (elementwise,), "ispasp_tests.bent.default"),
    "linear": (product_network, torch.ops.ispasp_tests.product, linear_like("rows", "W", "b"), "ispasp_tests.product"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compensate", [None, "dense"])
def test_networks_with_a_registered_op_lose_units(case: str, compensate: Any) -> None:
    make, target, given, _ = CASES[case]
    model = make()
    with registered(target, *given):
        result = ispasp.prune(model, [X[:16], X[16:]], 0.5, compensate=compensate, progress=False)
    assert [(layer.units, layer.kept) for layer in result.layers] == [(8, 4)]
    first = next(result.model[0].parameters())
    assert first.shape == (4, 4)
    assert result.model(X).shape == (32, 3)
    assert 2 * result.cost.macs == result.cost.dense_macs == 56
    if compensate is None:
        (kept,) = result.plan.kept.values()
        with torch.no_grad():
            H = model[:2](X)
            masked = torch.zeros_like(H)
            masked[:, list(kept)] = H[:, list(kept)]
            torch.testing.assert_close(result.model(X), model[2](masked))


@pytest.mark.parametrize("case", CASES)
def test_without_a_rule_they_are_frozen(case: str) -> None:
    make, _, _, name = CASES[case]
    with pytest.raises(NothingToPruneError, match=f"0: no rule for {name}"):
        ispasp.survey(make(), X)


def test_an_op_that_writes_into_its_argument_needs_a_rule() -> None:
    with pytest.raises(NothingToPruneError, match="0: no rule for ispasp_tests.share"):
        ispasp.survey(network(lambda: nn.Linear(4, 8), Share, lambda: nn.Linear(8, 3)), X)


def test_a_name_stands_for_an_op() -> None:
    with registered("ispasp_tests.bent.default", elementwise):
        assert [d.units for d in ispasp.survey(bent_network(), X).dimensions] == [8]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: register_op(bent, "elementwise"), "'elementwise': pass a function"),
        (lambda: register_op(bent, elementwise, "linear"), "is a str: pass an ispasp.graph.Op"),
        (lambda: register_op(torch.relu, elementwise), "is not an op: pass one as torch.ops.mylib.swish"),
        (lambda: register_op("bent", elementwise), "'bent' is not an op"),
        (lambda: register_op(torch.ops.aten.relu.default, elementwise), "aten.relu.default has a rule already"),
        (lambda: unregister_op(torch.ops.aten.relu.default), "aten.relu.default was not added by register_op"),
        (lambda: unregister_op(bent), "ispasp_tests.bent.default was not added"),
    ],
)
def test_what_is_refused(act: Callable[[], None], message: str) -> None:
    with pytest.raises(InputError, match=message):
        act()


def test_an_op_is_registered_once() -> None:
    with registered(bent, elementwise), pytest.raises(InputError, match=r"bent.default has a rule already: call .*un"):
        register_op(torch.ops.ispasp_tests.bent, elementwise)


def test_a_rule_that_does_not_fit_is_refused() -> None:
    with registered(product, lambda t, node, rows, W, b: rows):  # noqa: SIM117
        with pytest.raises(InputError, match=r"product.default gives lengths \(32, 4\)"):
            ispasp.survey(product_network(), X)
    with registered(product, *linear_like("rows", "weight")):  # noqa: SIM117
        with pytest.raises(InputError, match="no argument 'weight': pass linear_like some of rows, W, b"):
            ispasp.survey(product_network(), X)


def test_a_linear_op_without_its_contraction_is_not_calibrated() -> None:
    rule, contraction = linear_like("rows", "W", "b")
    assert isinstance(contraction, Op)
    with registered(product, rule):
        assert [d.units for d in ispasp.survey(product_network(), X).dimensions] == [8]
        for keep in (0.5, ispasp.Params(0.5)):
            with pytest.raises(
                NothingToPruneError, match=r"by ispasp_tests.product.default in a way calibration cannot"
            ):
                ispasp.prune(product_network(), [X], keep, progress=False)


def test_layers_of_complex_numbers_stay_whole() -> None:
    model = network(Complex, lambda: nn.Linear(4, 9), nn.ReLU, lambda: nn.Linear(9, 2))
    result = ispasp.prune(model, [X], 0.5, progress=False)
    assert [row.name for row in result.layers] == ["0.b", "1"]
    assert any(
        "0.b reads it by aten.linear.default in a way calibration cannot follow" in f.reason for f in result.frozen
    )
