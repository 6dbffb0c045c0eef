"""Models inside wrappers are pruned as the plain models that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

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
    "distributed": nn.parallel.DistributedDataParallel,
    "compiled and distributed": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
    "both": lambda model: compiled(nn.DataParallel(model)),
    "twice": lambda model: nn.DataParallel(compiled_inside(model)),
}


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Nothing is compiled yet, and DistributedDataParallel finds a group of one process."""
    torch._dynamo.reset()
    together = "distributed" in request.node.name
    if together:
        distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    if together:
        distributed.destroy_process_group()


@cache
def expected() -> ispasp.Result:
    return ispasp.prune(net(), [X], progress=False)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_prune_returns_the_plain_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    want = expected()
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
    want = expected()
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


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_mask(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(net())
    plan = ispasp.survey(net(), X).plan(0.5)
    with ispasp.mask(wrapped, plan, (X, X[:, 0])) as masked:
        assert masked is wrapped
        torch.testing.assert_close(masked(X), ispasp.apply_(net(), plan)(X))
    torch.testing.assert_close(wrapped(X), net()(X))


@pytest.mark.long
def test_export(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="needs pip install 'ispasp[onnx]'")
    wrapped = compiled_inside(net())
    body = wrapped.body
    labelled = [(X, torch.zeros(len(X), dtype=torch.long))]
    assert ispasp.export_onnx(compiled(wrapped), labelled, tmp_path / "net.onnx") < 1e-5
    assert wrapped.body is body


def test_a_wrapped_module_is_skipped() -> None:
    model = net()
    layer = model.body[0] = compiled(model.body[0])
    for skip in (layer, [layer], [layer._orig_mod]):
        assert list(ispasp.prune(model, [X], skip=skip, progress=False).plan.kept) == ["body.2"]


def test_a_wrapper_is_as_before_after_a_failure() -> None:
    wrapped = compiled_inside(compiled_in_place(net()))
    call, body = wrapped._compiled_call_impl, wrapped.body
    with pytest.raises(ispasp.errors.InputError):
        ispasp.prune_(wrapped, [X[:, :5]], progress=False)
    assert wrapped._compiled_call_impl is call
    assert wrapped.body is body
