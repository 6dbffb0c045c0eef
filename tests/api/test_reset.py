"""New initial weights: those of the classes, at the present shapes; all of them or none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ispasp
from ispasp.errors import InputError
from ispasp.surgery.attention import slim
from support.zoo import case

RESETS = [
    "torchvision/resnet18",
    "timm/vit_tiny_patch16_224",
    "transformers/vit",
    "transformers/bert",
    "transformers/llama",
    "transformers/gpt2",
]


def pruned(name: str) -> nn.Module:
    found = case(name)
    return ispasp.prune(found.build(), found.batch(), keep=0.5, compensate=None, progress=False).model


@pytest.mark.parametrize("name", RESETS)
def test_a_pruned_network_gets_new_weights_at_its_shapes_and_runs(name: str) -> None:
    model = pruned(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    names = dict(model.named_parameters())
    assert ispasp.reset_(model, seed=1) is model
    after = model.state_dict()
    assert {key: value.shape for key, value in after.items()} == {key: value.shape for key, value in before.items()}
    matrices = [key for key, p in names.items() if p.ndim > 1]
    assert matrices
    assert not any(torch.equal(after[key], before[key]) for key in matrices)
    outputs = case(name).run(model)
    first = outputs if isinstance(outputs, torch.Tensor) else next(iter(outputs.values()))
    assert bool(torch.isfinite(first).all())


def test_weights_are_drawn_as_their_classes_draw_them() -> None:
    net = nn.Sequential(nn.Conv2d(3, 400, 3), nn.BatchNorm2d(400), nn.Flatten(), nn.Linear(400, 5))
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.fill_(7)
    ispasp.reset_(net)
    bound = 1 / math.sqrt(27)  # Kaiming with a = sqrt(5): uniform up to 1 / sqrt(fan-in)
    conv, norm = net[0].weight, net[1]
    assert float(conv.detach().abs().max()) == pytest.approx(bound, rel=1e-3)
    assert float(conv.detach().abs().max()) <= bound
    assert float(net[3].weight.detach().abs().max()) <= 1 / 20
    assert all(torch.equal(t, torch.ones(400)) for t in (norm.weight, norm.running_var))
    assert all(torch.equal(t, torch.zeros(400)) for t in (norm.bias, norm.running_mean))


def test_transformers_draw_as_their_configuration_says() -> None:
    model = pruned("transformers/bert")
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # as from_pretrained leaves it: transformers' own functions would skip it
    ispasp.reset_(model)
    weight = dict(model.named_parameters())["bert.encoder.layer.0.intermediate.dense.weight"].detach()
    assert weight.shape[0] == 32  # 64 before
    assert float(weight.std()) == pytest.approx(model.config.initializer_range, rel=0.1)
    assert all(tensor._is_hf_initialized for tensor in model.state_dict(keep_vars=True).values())


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 5}, {"bias": False}, {"add_bias_kv": True}])
def test_attention_with_fewer_heads_draws_as_torchs_does(options: dict[str, int]) -> None:
    def drawn(module: nn.Module) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(7)
        ispasp.reset_(module, seed=3)
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    whole = nn.MultiheadAttention(8, 2, **options)
    expected = drawn(whole)
    found = drawn(slim(whole, 2))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Bare(nn.Module):
    """A parameter that no module re-initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("steps", torch.tensor(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x + self.token)
        return y


def test_what_nothing_sets_is_named_and_the_model_is_as_before() -> None:
    net = Bare()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(InputError, match=r"nothing gives token a new initial value.*leave=\['token'\]"):
        ispasp.reset_(net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_leave_keeps_values_and_init_sets_them() -> None:
    net = ispasp.reset_(Bare(), leave="tok*")
    assert torch.equal(net.token.detach(), torch.full((4,), 2.0))

    def init(module: nn.Module) -> None:
        if isinstance(module, Bare):
            nn.init.zeros_(module.token)
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    ispasp.reset_(net, init=init)
    assert torch.equal(net.token.detach(), torch.zeros(4))
    assert torch.equal(net.fc.weight.detach(), torch.ones(4, 4))
    assert float(net.steps) == 5.0  # buffers that no module resets stay


def test_the_seed_decides_and_the_callers_numbers_stay() -> None:
    a, b, c = (nn.Linear(3, 3) for _ in range(3))
    state = torch.get_rng_state()
    for net, seed in ((a, 0), (b, 0), (c, 1)):
        ispasp.reset_(net, seed=seed)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a.weight, b.weight)
    assert not torch.equal(a.weight, c.weight)


def test_stale_gradients_go_and_trainability_stays() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    net(torch.ones(1, 2)).sum().backward()
    ispasp.reset_(net)
    assert net.weight.grad is None
    assert (net.weight.requires_grad, net.bias.requires_grad) == (True, False)


def test_refuses_what_it_cannot_use() -> None:
    with pytest.raises(InputError, match="fits no parameter: the model has weight, bias"):
        ispasp.reset_(nn.Linear(2, 2), leave=["head.*"])
    with pytest.raises(InputError, match="init is a int: pass a function"):
        ispasp.reset_(nn.Linear(2, 2), init=3)  # type: ignore[arg-type]
