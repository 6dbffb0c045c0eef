"""Forwards that count, average, remember and call hooks: the model is as before, and hooks get no fake tensors."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ispasp
from ispasp.errors import InputError, IspaspError, TraceError
from soak.state import model_unchanged


class Remembering(nn.Module):
    """Changes whatever a forward can change in its module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("swapped", torch.zeros(1))
        self.calls, self.last, self.kept, self.cache = 0, None, [], {}
        self.tally, self.window, self.seen, self.notes = Counter(), deque(maxlen=3), set(), SimpleNamespace(n=0)
        self.random, self.generator = random.Random(0), torch.Generator().manual_seed(0)  # noqa: S311

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        self.count += 1
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.swapped: Tensor = self.swapped + 1
        self.calls, self.last, self.new = self.calls + 1, h, 1
        self.kept.append(h)
        self.cache["h"] = h.detach().sum()
        self.tally["calls"] += 1
        self.window.append(h)
        self.seen.add(len(self.seen))
        self.notes.n += 1
        self.random.random()
        torch.rand(1, generator=self.generator)
        return self.b(h - self.mean)


X = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))


def failing(model: nn.Module) -> float:
    if model.a.out_features == 16:
        return 1.0
    raise ZeroDivisionError


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "survey": lambda model: ispasp.survey(model, X),
    "prune": lambda model: ispasp.prune(model, [X], progress=False),
    "prune_, refused": lambda model: ispasp.prune_(model, [X], {"nothing": 0.5}, progress=False),
    "prune_, a wrong batch": lambda model: ispasp.prune_(model, [X, X[:, :3]], progress=False),
    "prune_, after surgery": lambda model: ispasp.prune_(model, [X], evaluate=failing, progress=False),
    "apply_": lambda model: ispasp.apply_(model, ispasp.survey(nn.Sequential(*two()), X).plan(0.5), X),
}


def two() -> tuple[nn.Module, ...]:
    return nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)


@pytest.mark.parametrize("call", CALLS)
def test_what_a_forward_changes_is_put_back(call: str) -> None:
    model = Remembering()
    states = model.random.getstate(), model.generator.get_state()
    with model_unchanged(model, call):
        try:
            CALLS[call](model)
            failed = False
        except (IspaspError, ZeroDivisionError):
            failed = True
    assert failed == (call not in ("survey", "prune"))
    assert model.random.getstate() == states[0]
    assert torch.equal(model.generator.get_state(), states[1])


def test_a_pruned_model_has_no_memory_of_our_calls() -> None:
    model = Remembering()
    small = ispasp.prune_(model, [X], compensate=None, progress=False).model
    assert small.a.out_features == small.mean.shape[0] == 8
    assert (small.count.item(), small.calls, small.last, small.kept, small.cache) == (0, 0, None, [], {})
    assert not small.mean.any()
    small(X)
    assert (small.count.item(), small.calls) == (1, 1)


def test_moving_averages_are_subtracted_as_in_the_first_call() -> None:
    """The masked network and the pruned one start from the same average, so they agree."""
    result = ispasp.prune(Remembering().double(), [X.double()], compensate=None, progress=False)
    assert result.verified < 1e-12


def test_a_forward_that_writes_into_parameters_is_refused() -> None:
    class Clamping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self[0].weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Clamping(*two())
    with model_unchanged(model, "survey"), pytest.raises(TraceError, match="writes into its parameter '0.weight'"):
        ispasp.survey(model, X)


# Hooks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["survey", "prune", "prune_"])
def test_hooks_that_look_on_get_no_fake_tensors(verb: str) -> None:
    seen: set[type] = set()
    model, threads = nn.Sequential(*two()), threading.active_count()
    model[0].register_forward_hook(lambda module, args, out: seen.add(type(out)))
    model[2].register_forward_pre_hook(lambda module, args: seen.add(type(args[0])))
    model[1].register_forward_hook(lambda module, args, kwargs, out: seen.add(type(out)), with_kwargs=True)
    model[0].register_forward_hook(lambda module, args, out: out * 2)  # this one takes part
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.add(type(out)))
    try:
        if verb == "survey":
            ispasp.survey(model, X)
        else:
            result = getattr(ispasp, verb)(model, [X], progress=False)
            assert result.model[0].out_features == 6
            assert len(result.model[0]._forward_hooks) == 2
    finally:
        everywhere.remove()
    assert seen == {Tensor}
    assert threading.active_count() == threads  # fx.Interpreter would start one


def test_a_hook_that_keeps_an_activation_for_the_forward_takes_part() -> None:
    kept: dict[str, Tensor] = {}

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(16, 12)
            self.a.register_forward_hook(lambda module, args, out: kept.__setitem__("a", out))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x))) + self.c(kept["a"])

    result = ispasp.prune(Skip().double(), [X.double()], compensate=None, progress=False)
    assert result.model.a.out_features == result.model.b.in_features == result.model.c.in_features == 8
    assert result.verified < 1e-12


# torch.vmap ---------------------------------------------------------------------------------------------------------


class Mapped(nn.Module):
    """An MLP, half of it in torch.vmap, with a BatchNorm before and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.c, self.d = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.b(F.relu(self.norm(self.a(x))))
        return torch.vmap(lambda row: self.d(F.relu(self.c(row))))(x) + self.count


def test_vmap_in_a_forward() -> None:
    model, threads = Mapped().double().eval(), threading.active_count()
    with model_unchanged(model, "prune"):
        result = ispasp.prune(model, [X.double()], compensate=None, progress=False)
    assert {name: len(kept) for name, kept in result.plan.kept.items()} == {"a": 8, "b": 4, "c": 6}
    assert result.verified < 1e-12
    assert result.model(X.double()).shape == (9, 4)
    assert threading.active_count() == threads


def test_a_vmap_that_fails_leaves_the_process_as_it_was() -> None:
    class Broken(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda row: self.fail(super(Broken, self).forward(row)))(x)

        def fail(self, x: Tensor) -> Tensor:
            torch._C._functorch._vmap_increment_nesting(3, "error")
            raise ValueError("half-way")

    with pytest.raises(IspaspError, match="half-way"):
        ispasp.survey(Broken(*two()), X)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert ispasp.prune(nn.Sequential(*two()), [X], progress=False).model[0].out_features == 6


# What is no model, no batch -----------------------------------------------------------------------------------------


def test_models_that_cannot_be_looked_at_are_refused() -> None:
    scripted, traced = torch.jit.script(nn.Sequential(*two())), torch.jit.trace(nn.Sequential(*two()), X)
    for model in (scripted, traced):
        with pytest.raises(InputError, match="TorchScript"):
            ispasp.prune(model, [X], progress=False)
        with pytest.raises(InputError, match="TorchScript"):
            ispasp.survey(model, X)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    for call in (lambda: ispasp.survey(lazy, X), lambda: ispasp.prune(lazy, [X], progress=False)):
        with pytest.raises(InputError, match="not initialised"):
            call()
    assert isinstance(lazy[0], nn.LazyLinear)


def test_batches_without_values_are_refused() -> None:
    model = nn.Sequential(*two())
    for batches in ([X.to("meta")], [X, X.to("meta")]):
        with pytest.raises(InputError, match="meta device"):
            ispasp.prune(model, batches, progress=False)
    with pytest.raises(InputError, match="no examples"):
        ispasp.survey(model, X[:0])


def test_calls_inside_a_meta_device_context() -> None:
    model = nn.Sequential(*two())
    with torch.device("meta"):
        result = ispasp.prune(model, [X], progress=False)
        assert torch.get_default_device().type == "meta"
    assert result.verified < 1e-5
    assert all(not tensor.is_meta for tensor in result.model.state_dict().values())


@pytest.mark.parametrize("second", [X.double(), torch.ones(9, 8, dtype=torch.long)])
def test_another_dtype_in_the_second_batch(second: Tensor) -> None:
    with pytest.raises(IspaspError, match="dtype"):
        ispasp.prune(nn.Sequential(*two()), [(X,), (second,)], progress=False)


def test_floats_of_two_dtypes_in_a_list_are_two_batches() -> None:
    with pytest.raises(IspaspError, match="dtype"):
        ispasp.prune(nn.Sequential(*two()), [X, X.double()], progress=False)


def test_a_second_batch_that_an_op_refuses() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), *two())
    with pytest.raises(IspaspError, match="index out of range"):
        ispasp.prune(model, [torch.tensor([[0, 1]]), torch.tensor([[2, 9]])], progress=False)


def test_sparse_and_quantised_outputs_are_compared() -> None:
    class Ends(nn.Sequential):
        end: Callable[[Tensor], Tensor] = staticmethod(Tensor.to_sparse)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(super().forward(x))

    assert ispasp.prune(Ends(*two()), [X], progress=False).evidence.outputs == 8


# Forwards that do not do the same twice -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 14))
def test_a_forward_that_raises_once(at: int) -> None:
    calls = 0

    class Raising(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyError("once")
            return super().forward(x)

    model = Raising(*two())
    with model_unchanged(model, "prune_"):
        try:
            result = ispasp.prune(model, [X], compensate=None, progress=False)
        except IspaspError as error:
            assert "once" in str(error)
        else:
            assert result.verified < 1e-5


def test_a_forward_that_branches_at_random_is_refused() -> None:
    flips = iter([True, False] * 100)

    class Flipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            return self.b(h) if next(flips) else self.c(h)

    with pytest.raises(IspaspError):
        ispasp.prune(Flipping(), [X], progress=False)


def test_ctrl_c_while_corrections_are_tried_leaves_the_numbers_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.heads = nn.Linear(8, 16), nn.Linear(16, 4), 4

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).view(len(x), self.heads, 4).relu().flatten(1))

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    model = Heads()
    monkeypatch.setattr("ispasp.surgery.corrections.runs", interrupted)
    with model_unchanged(model, "survey"), pytest.raises(KeyboardInterrupt):
        ispasp.survey(model, X)
