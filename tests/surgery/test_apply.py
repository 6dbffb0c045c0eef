"""Surgery: exact, atomic, and nothing but the units changes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import ispasp
from ispasp.surgery.remove import fitting
from ispasp.surgery.verify import output_of, relative_error


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 2)
    )
    model(torch.randn(8, 3, 4, 4))  # running statistics that mean something
    return model.eval()


IMAGES = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[name], before[name]) for name in before)


def test_weights_biases_and_running_statistics_are_cut() -> None:
    model = cnn()
    dense = copy.deepcopy(model)
    ispasp.apply_(model, ispasp.survey(model, IMAGES).plan({"0": [1, 3, 4], "3": [0, 2]}), IMAGES)
    kept = [1, 3, 4]
    assert torch.equal(model[0].weight, dense[0].weight[kept])
    assert torch.equal(model[0].bias, dense[0].bias[kept])
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(getattr(model[1], name), getattr(dense[1], name)[kept])
    assert torch.equal(model[3].weight, dense[3].weight[[0, 2]][:, kept])
    columns = [4 * c + p for c in (0, 2) for p in range(4)]  # a filter is four columns behind flatten
    assert torch.equal(model[5].weight, dense[5].weight[:, columns])
    assert (model[0].out_channels, model[1].num_features, model[3].in_channels, model[3].out_channels) == (3, 3, 3, 2)
    assert model[5].in_features == 8
    assert list(model.state_dict()) == list(dense.state_dict())


def test_parameters_stay_the_same_objects_with_their_flags() -> None:
    model = mlp().double()
    model[0].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    ispasp.apply_(model, ispasp.survey(model, ROWS.double()).plan(0.5), ROWS.double())
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert [p.requires_grad for p in after.values()] == [False] + [True] * 5
    assert {p.dtype for p in after.values()} == {torch.float64}


def test_convolutions_keep_their_memory_format() -> None:
    model = cnn().to(memory_format=torch.channels_last)
    ispasp.apply_(model, ispasp.survey(model, IMAGES).plan(0.5))
    for layer in (model[0], model[3]):
        assert layer.weight.is_contiguous(memory_format=torch.channels_last) and not layer.weight.is_contiguous()


def test_a_new_bias_of_a_frozen_layer_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)).requires_grad_(False)
    result = ispasp.prune(model, [ROWS], 0.5, progress=False)
    assert result.model[2].bias is not None and not result.model[2].bias.requires_grad


def test_the_optimizer_goes_on_with_the_kept_slices() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(ROWS).square().sum().backward()
        optimizer.step()
    full = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    ispasp.apply_(model, ispasp.survey(model, ROWS).plan({"0": [0, 5, 7]}), ROWS, optimizer=optimizer)
    state = optimizer.state[model[0].weight]
    assert torch.equal(state["exp_avg"], full["0.weight"][[0, 5, 7]])
    assert torch.equal(optimizer.state[model[2].weight]["exp_avg"], full["2.weight"][:, [0, 5, 7]])
    assert model[0].weight.grad.shape == (3, 4)
    optimizer.zero_grad()
    model(ROWS).square().sum().backward()
    optimizer.step()
    assert state["exp_avg"].shape == (3, 4)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 6)
            self.mid = nn.Linear(6, 6)
            self.out = nn.Linear(6, 10, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.mid(self.table(x))))

    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.arange(5)[None]
    survey = ispasp.survey(model, ids)
    ispasp.apply_(model, survey.plan(0.5), ids)
    assert model.out.weight is model.table.weight
    assert model.table.weight.shape[1] == 3 == model.out.in_features == model.table.embedding_dim


class TiedBuffers(nn.Module):
    """Two modules hold the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.one, self.two = nn.Module(), nn.Module()
        offset = torch.rand(8)
        self.one.register_buffer("offset", offset)
        self.two.register_buffer("offset", offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x) + self.one.offset) * self.two.offset)


def test_tied_buffers_stay_tied() -> None:
    model, x = TiedBuffers(), torch.randn(3, 4)
    ispasp.apply_(model, ispasp.survey(model, x).plan(0.5), x)
    assert model.one.offset is model.two.offset
    assert model.one.offset.shape == (4,)


def test_an_exception_in_the_middle_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from ispasp.surgery import remove

    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(IMAGES).sum().backward()
    optimizer.step()
    plan, before, attributes = ispasp.survey(model, IMAGES).plan(0.5), snapshot(model), repr(model)
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    grads = [p.grad.clone() for p in model.parameters()]
    calls = []

    def failing(module: nn.Module) -> dict[str, int]:
        calls.append(module)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(module)

    original = remove.own_sizes
    monkeypatch.setattr(remove, "own_sizes", failing)
    with pytest.raises(KeyboardInterrupt):
        ispasp.apply_(model, plan, IMAGES, optimizer=optimizer)
    assert unchanged(model, before) and repr(model) == attributes
    assert all(
        torch.equal(optimizer.state[p]["momentum_buffer"], m) for p, m in zip(model.parameters(), momentum, strict=True)
    )
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_a_wrong_plan_is_caught_and_names_the_guilty_dimension() -> None:
    model = mlp()
    survey = ispasp.survey(model, ROWS)
    data = json.loads(survey.plan(0.5).to_json())
    # Claim that the second hidden layer's units lie the other way round in the consumer: slices no longer match.
    data["tensors"]["4.weight"]["axes"]["1"] = [[[None, 3]], [[None, 3]]]
    data["tensors"]["2.weight"]["axes"] = {"1": data["tensors"]["2.weight"]["axes"]["1"]}
    data["tensors"]["2.bias"]["axes"] = {}
    wrong = ispasp.Plan.from_json(json.dumps(data))
    before = snapshot(model)
    with pytest.raises(ispasp.errors.SurgeryError, match="'2' does not equal masking"):
        ispasp.apply_(model, wrong, ROWS)
    assert unchanged(model, before)


def test_a_plan_fits_its_own_dense_model_only() -> None:
    model = mlp()
    plan = ispasp.survey(model, ROWS).plan(0.5)
    ispasp.apply_(model, plan, ROWS)
    with pytest.raises(ispasp.errors.PlanError, match=r"shape \(4, 4\), the plan expects \(8, 4\): apply a plan once"):
        ispasp.apply_(model, plan)
    with pytest.raises(ispasp.errors.PlanError, match="has no"):
        ispasp.apply_(nn.Linear(4, 8), plan)
    with pytest.raises(ispasp.errors.InputError, match="pass an ispasp.Plan"):
        ispasp.apply_(model, {"0": [1]})


class Heads(nn.Module):
    """Attention whose forward reads the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_plan_does_not_fit_a_model_with_another_number() -> None:
    model = Heads()
    plan, before = ispasp.survey(model, torch.randn(2, 3, 8)).plan(0.5), snapshot(model)
    model.heads = 2
    with pytest.raises(ispasp.errors.PlanError, match="heads=2, the plan expects 4"):
        ispasp.apply_(model, plan)
    assert unchanged(model, before) and model.heads == 2


def test_running_out_of_memory_is_not_the_fault_of_a_plan() -> None:
    with pytest.raises(torch.OutOfMemoryError), fitting(mlp()):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("scope", ["blocks", "all"])
def test_residual_streams_are_for_scope_all(scope: str) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
            self.inner = nn.Sequential(
                nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8)
            )
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.head(torch.relu(x + self.inner(x)).mean([2, 3]))

    torch.manual_seed(0)
    model = Residual().train()
    model(torch.randn(8, 3, 4, 4))
    model.eval()
    survey = ispasp.survey(model, IMAGES, scope=scope)
    assert [d.name for d in survey.dimensions] == (["inner.0"] if scope == "blocks" else ["stem.0", "inner.0"])
    ispasp.apply_(model, survey.plan(0.5), IMAGES, checked_by=survey)
    assert model.head.in_features == (8 if scope == "blocks" else 4)


def test_weight_norm_keeps_working() -> None:
    for wrap in (nn.utils.parametrizations.weight_norm, nn.utils.weight_norm):
        torch.manual_seed(0)
        model = nn.Sequential(wrap(nn.Linear(4, 8)), nn.ReLU(), wrap(nn.Linear(8, 6)), nn.ReLU(), wrap(nn.Linear(6, 3)))
        with torch.no_grad():
            model(ROWS)
            dense = copy.deepcopy(model)
            ispasp.apply_(model, ispasp.survey(model, ROWS).plan({"0": [1, 2, 6]}), ROWS)
            model(ROWS)
        torch.testing.assert_close(model[2].weight, dense[2].weight[:, [1, 2, 6]])
        model(ROWS).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_a_weight_that_a_hook_computes_is_small_before_the_next_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.utils.weight_norm(nn.Linear(8, 3)))
    weight = model[2].weight.detach().clone()
    ispasp.apply_(model, ispasp.survey(model, ROWS).plan({"0": [1, 2, 6]}))
    torch.testing.assert_close(model[2].weight, weight[:, [1, 2, 6]])
    assert model[2].in_features == 3


def test_train_mode_grad_and_hooks_are_left_alone() -> None:
    model = cnn().train()
    model[1].eval()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    modes = [m.training for m in model.modules()]
    running = model[1].running_mean.clone()
    survey = ispasp.survey(model, IMAGES)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model[1].running_mean, running)
    ispasp.apply_(model, survey.plan(0.5), IMAGES)
    assert [m.training for m in model.modules()] == modes
    seen.clear()
    model(IMAGES).sum().backward()
    assert seen == [1] and model[0].weight.grad is not None


def test_relative_error_sees_shapes_nan_and_values() -> None:
    x = torch.tensor([3.0, 4.0])
    assert relative_error([x], [x]) == 0
    assert relative_error([x[:1]], [x]) == float("inf")
    assert relative_error([x * float("nan")], [x]) == float("inf")
    assert relative_error([x * 1.1], [x]) == pytest.approx(0.1, rel=1e-5)


def test_a_few_integers_may_flip_and_many_may_not() -> None:
    count = torch.arange(40)
    for flipped, error in ((4, 0.0), (5, 0.125), (40, 1.0)):
        assert relative_error([count + (count < flipped)], [count]) == error
    assert relative_error([torch.ones(2), count + 1], [torch.ones(2), count]) == 1.0
    assert relative_error([count], [count.double()]) == float("inf")


def test_survey_leaves_the_model_bit_identical() -> None:
    model = cnn()
    before, output = snapshot(model), [t.clone() for t in output_of(model, IMAGES)]
    state = torch.get_rng_state()
    ispasp.survey(model, IMAGES)
    assert unchanged(model, before)
    assert all(torch.equal(a, b) for a, b in zip(output_of(model, IMAGES), output, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_without_a_finite_value_proves_nothing() -> None:
    model = mlp()
    plan, before = ispasp.survey(model, ROWS).plan(0.5), snapshot(model)
    nothing = torch.full_like(ROWS, float("nan"))
    with pytest.raises(ispasp.errors.InputError, match="NaN or Inf only, which proves nothing"):
        ispasp.apply_(model, plan, nothing)
    with pytest.raises(ispasp.errors.InputError, match="NaN or Inf only"), ispasp.mask(model, plan, nothing):
        pass
    assert unchanged(model, before)
