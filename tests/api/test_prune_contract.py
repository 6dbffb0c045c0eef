"""What `prune` and `prune_` promise about the model they are given, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from support.nets import ResNet, alive


class Bomb(nn.Module):
    """Counts its calls and goes off from one of them on. All bombs count together: pruning puts attributes back."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.at = -1
        self.error: type[BaseException] = KeyboardInterrupt
        Bomb.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            Bomb.calls += 1
            if 0 < self.at <= self.calls:
                raise self.error("stop")
        return x


class Net(nn.Module):
    """A network with parts in train mode, frozen parameters, gradients, hooks and a bomb."""

    def __init__(self) -> None:
        super().__init__()
        body = ResNet(small=True)
        body.layer1 = body.layer1[:1]  # one block will do
        self.body, self.bomb = alive(body), Bomb()
        self.train()
        self.body.layer1.eval()
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(number % 3 != 0)
            parameter.grad = torch.randn_like(parameter) if number % 3 == 1 else None
        self.seen = 0
        self.body.fc.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.bomb(self.body(x))


def state(model: Net) -> dict[str, Any]:
    """Everything that must come back; tensors by value and identity."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors},
        "objects": {name: id(tensor) for name, tensor in tensors},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "flags": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks]
            for name, module in model.named_modules()
        },
        "attributes": {
            name: {k: v for k, v in vars(m).items() if isinstance(v, (int, tuple, str)) and k not in ("calls", "seen")}
            for name, m in model.named_modules()
        },
        "modules": {name: id(module) for name, module in model.named_modules()},
        "random": torch.get_rng_state(),
        "gradients on": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where} {key}")
    else:
        assert found == expected, where


def batches() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, 3, 9, 9, generator=g, dtype=torch.float64) for n in (4, 3)]


OPTIONS = [
    {"compensate": "dense"},
    {"compensate": "local", "order": "oneshot", "recalibrate": True},
    {"compensate": None, "memory": 1, "scope": "all"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_prune_leaves_the_model_alone(options: dict[str, Any]) -> None:
    model = Net()
    before = state(model)
    result = ispasp.prune(model, batches(), progress=False, **options)
    assert_same(state(model), before)
    assert result.model is not model
    assert not {id(p) for p in model.parameters()} & {id(p) for p in result.model.parameters()}
    after = state(result.model)
    for what in ("flags", "modes", "hooks"):
        assert_same(after[what], before[what], what)
    assert result.model.body.layer1[0].conv1.out_channels < model.body.layer1[0].conv1.out_channels


def test_prune_in_place() -> None:
    model = Net()
    before = state(model)
    result = ispasp.prune_(model, batches(), progress=False)
    assert result.model is model
    after = state(model)
    for what in ("flags", "modes", "hooks", "modules", "random", "gradients on", "threads"):
        assert_same(after[what], before[what], what)
    conv = model.body.layer1[0].conv1
    assert conv.weight.shape[0] == conv.out_channels == 4
    parameters = {name: id(p) for name, p in model.named_parameters()}
    assert parameters == {
        name: i for name, i in before["objects"].items() if name in parameters
    }  # optimizers hold them
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.shape == parameter.shape, name
        assert (parameter.grad is None) == (before["grads"][name] is None)


def test_an_optimizer_goes_on_with_the_pruned_model() -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters())
    x = batches()[0]
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    ispasp.prune_(model, batches(), optimizer=optimizer, progress=False)
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_mode_comes_back_and_nothing_hangs_on_a_graph(mode: Callable[[], Any]) -> None:
    model = alive(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    x = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    with mode():
        on = torch.is_grad_enabled()
        result = ispasp.prune(model, [x], progress=False)
        assert torch.is_grad_enabled() == on
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in result.model.parameters())
    assert x.grad is None
    result.model(torch.randn(3, 4, dtype=torch.float64)).sum().backward()


@cache
def count_calls() -> int:
    """How often pruning runs the forward."""
    model = Net()
    ispasp.prune_(model, batches(), recalibrate=True, progress=False)
    return model.bomb.calls


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_a_failure_inside_the_forward_leaves_everything_as_it_was(at: str, error: type[BaseException]) -> None:
    calls = count_calls()
    assert calls >= 4
    model = Net()
    model.bomb.at = {"first": 1, "middle": calls - 2, "last": calls}[at]
    model.bomb.error = error
    before = state(model)
    told = ispasp.errors.IspaspError if error is ValueError else error  # nobody may swallow Ctrl-C
    with pytest.raises(told, match="stop"):
        ispasp.prune_(model, batches(), recalibrate=True, progress=False)
    assert_same(state(model), before)


@pytest.mark.long
def test_after_a_failure_the_model_can_be_pruned() -> None:
    calls = count_calls()
    model = Net()
    model.bomb.at = calls - 1
    with pytest.raises(KeyboardInterrupt):
        ispasp.prune_(model, batches(), recalibrate=True, progress=False)
    model.bomb.at = -1
    found = ispasp.prune_(model, batches(), recalibrate=True, progress=False)
    expected = ispasp.prune_(Net(), batches(), recalibrate=True, progress=False)
    for key, value in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[key], value), key


class Interrupted:
    """Batches of which the k-th of all that are asked for brings Ctrl-C."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in batches():
            self.asked += 1
            torch.rand(3)  # as loaders that shuffle do
            if self.asked == self.at:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.parametrize("options", [OPTIONS[0], *(pytest.param(o, marks=pytest.mark.long) for o in OPTIONS[1:])])
def test_ctrl_c_while_a_batch_is_loaded(options: dict[str, Any]) -> None:
    whole = Interrupted(at=-1)
    ispasp.prune(Net(), whole, progress=False, **options)
    for at in {1, 2, whole.asked}:
        model = Net()
        before = state(model)
        with pytest.raises(KeyboardInterrupt):
            ispasp.prune_(model, Interrupted(at), progress=False, **options)
        assert_same(state(model), before)


@pytest.mark.parametrize("step", ["remove_", "expect", "compared", "recalibrate_"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_in_any_step_is_taken_back(step: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ispasp._prune as module

    original = getattr(module, step)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            original(*args, **kwargs)
        raise MemoryError("the machine is full")

    monkeypatch.setattr(module, step, failing)
    model = Net()
    before = state(model)
    with pytest.raises(MemoryError):
        ispasp.prune_(model, batches(), recalibrate=True, progress=False)
    assert_same(state(model), before)
