"""Models inside wrappers are pruned as the plain models that they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from support.nets import alive, mlp

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(6, 10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def net() -> nn.Module:
    return alive(Net())


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_inside(model: nn.Module) -> nn.Module:
    model.body = compiled(model.body)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "compiled inside": compiled_inside,
    "data parallel": nn.DataParallel,
    "both": lambda model: compiled(nn.DataParallel(model)),
    "twice": lambda model: nn.DataParallel(compiled_inside(model)),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_prune_returns_the_plain_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    want = ispasp.prune(net(), [X], progress=False)
    wrapped = wrap(net())
    names = list(dict(wrapped.named_parameters()))
    found = ispasp.prune(wrapped, [X], progress=False)
    assert type(found.model) is Net
    assert found.plan.to_json() == want.plan.to_json()
    assert list(found.model.state_dict()) == list(want.model.state_dict())
    assert all(torch.equal(value, want.model.state_dict()[name]) for name, value in found.model.state_dict().items())
    assert list(dict(wrapped.named_parameters())) == names
    torch.testing.assert_close(wrapped(X), net()(X))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_prune_in_place_changes_what_the_wrapper_runs(wrap: Callable[[nn.Module], nn.Module]) -> None:
    want = ispasp.prune(net(), [X], progress=False)
    wrapped = wrap(net())
    before = wrapped(X)  # code is compiled for the dense sizes
    result = ispasp.prune_(wrapped, [X], progress=False)
    assert result.plan.to_json() == want.plan.to_json()
    assert sum(p.numel() for p in wrapped.parameters()) == sum(p.numel() for p in want.model.parameters())
    torch.testing.assert_close(wrapped(X), want.model(X))
    assert not torch.allclose(wrapped(X), before)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_survey_apply_save_and_load(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    wrapped = wrap(net())
    plan = ispasp.survey(wrapped, X).plan(0.5)
    assert list(plan.kept) == ["body.0", "body.2"]
    assert ispasp.apply_(wrapped, plan, X) is wrapped
    ispasp.save(wrapped, tmp_path, plan)
    for other in (net(), wrap(net())):
        torch.testing.assert_close(ispasp.load(tmp_path, other)(X), wrapped(X))


def test_a_wrapper_is_as_before_after_a_failure() -> None:
    wrapped = compiled_inside(compiled_in_place(net()))
    call, body = wrapped._compiled_call_impl, wrapped.body
    with pytest.raises(ispasp.errors.InputError):
        ispasp.prune_(wrapped, [X[:, :5]], progress=False)
    assert wrapped._compiled_call_impl is call
    assert wrapped.body is body
