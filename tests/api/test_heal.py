"""`ispasp.heal`: towards the dense network, without labels."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ispasp
from ispasp import Heal, heal
from ispasp.errors import InputError
from ispasp.train.loader import Examples
from ispasp.train.mimic import pair

STEPS = Heal(steps=60, lr=3e-3)


class Block(nn.Module):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(6, hidden, 3, padding=1), nn.BatchNorm2d(hidden)
        self.conv2, self.bn2 = nn.Conv2d(hidden, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 6, 3), nn.Sequential(Block(), Block()), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Encoder(nn.Module):
    """One attention block over tokens, with rotations that are no features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        q = self.q(x)
        q = q * 0.5 + q.flip(-1) * 0.25
        mask = attention_mask[:, None, :].bool().expand(-1, x.shape[1], -1)
        x = x + self.out(functional.scaled_dot_product_attention(q, x, x, attn_mask=mask))
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return {"last_hidden_state": self.norm(x)}


@pytest.fixture(scope="module")
def dense() -> Net:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.train()(torch.randn(64, 3, 10, 10))
    return net.eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(160, 3, 10, 10, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def small(dense: Net, images: Tensor) -> nn.Module:
    return ispasp.prune(dense, images, keep=0.4, method="random", refit="consumers", progress=False).model


@pytest.fixture
def pruned(small: nn.Module) -> nn.Module:
    return copy.deepcopy(small)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@torch.no_grad()
def error(model: nn.Module, teacher: nn.Module, x: Tensor) -> float:
    return float((model(x) - teacher(x)).square().mean())


def test_gains_and_says_so(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    before, theirs = state(pruned), state(dense)
    apart = error(pruned, dense, images[140:])
    result = heal(pruned, dense, list(images.split(32)), STEPS, progress=False)
    assert result.model is pruned
    assert result.after < 0.8 * result.before
    assert result.gained == pytest.approx(1 - result.after / result.before)
    assert (result.examples, result.held_out) == (128, 32)
    assert result.steps == 60  # in two cycles
    assert f"{result.before:.4g} -> {result.after:.4g} on 32 held-out examples" in str(result)
    assert error(pruned, dense, images[140:]) < apart
    assert_same(dense, theirs)
    for name, value in pruned.state_dict().items():  # statistics of BatchNorm are frozen
        assert torch.equal(value, before[name]) == ("running" in name or "num_batches" in name), name


def test_finds_a_rate(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    result = heal(pruned, dense, images, Heal(steps=40), progress=False)
    assert result.gained > 0.1
    assert 1e-4 <= result.lr <= 1e-2
    assert result.history[0] == (0, result.before)
    assert min(apart for _, apart in result.history) == result.after


def test_a_network_that_is_nearly_right_takes_small_steps(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    close = copy.deepcopy(dense)
    with torch.no_grad():
        for parameter in close.parameters():
            parameter.mul_(1.03)
    lost, gentle = (heal(net, dense, images, Heal(steps=40), progress=False) for net in (pruned, close))
    assert 0 < gentle.lr < 0.3 * lost.lr
    assert gentle.gained > 0.1


def test_the_sizes_of_weights_do_not_matter() -> None:
    """A ReLU network is the same function with one layer eight times larger and the next one eight times smaller."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(6, 24, bias=False), nn.ReLU(), nn.Linear(24, 3, bias=False))
    student = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    scaled = copy.deepcopy(student)
    with torch.no_grad():
        scaled[0].weight *= 8
        scaled[2].weight /= 8
    images = torch.randn(128, 6)
    plain, other = (heal(net, teacher, images, Heal(steps=40), progress=False) for net in (student, scaled))
    assert plain.gained > 0.1
    assert other.after == pytest.approx(plain.after, rel=1e-3)


def test_the_same_again(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    other = copy.deepcopy(pruned)
    for model in (pruned, other):
        torch.manual_seed(int(model is other))
        heal(model, dense, images, Heal(steps=10, augment="flip"), progress=False)
    assert_same(other, state(pruned))


@pytest.mark.parametrize("config", [Heal(steps=10, lr=1e3), Heal(steps=10, lr=1e30)])
def test_never_worse(config: Heal, dense: Net, pruned: nn.Module, images: Tensor) -> None:
    before = state(pruned)
    result = heal(pruned, dense, images, config, progress=False)
    assert result.after == result.before
    assert "gained nothing" in str(result)
    assert_same(pruned, before)


def test_nothing_to_gain(dense: Net, images: Tensor) -> None:
    twin = copy.deepcopy(dense)
    result = heal(twin, dense, images, Heal(steps=10), progress=False)
    assert result.before == result.gained == 0
    assert_same(twin, state(dense))


def test_leaves_everything_else_alone(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    pruned.train()
    pruned.blocks[0].bn1.eval()
    frozen = pruned.head.weight.requires_grad_(False)
    before, random = frozen.clone(), torch.get_rng_state()
    with torch.no_grad():
        heal(pruned, dense, images, STEPS, progress=False)
    assert pruned.blocks[1].bn1.training
    assert not pruned.blocks[0].bn1.training
    assert torch.equal(frozen, before)
    assert not frozen.requires_grad
    assert all(p.grad is None for p in (*pruned.parameters(), *dense.parameters()))
    assert torch.equal(torch.get_rng_state(), random)


def test_labels_are_left_out(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    batches = [(x, torch.zeros(len(x)).long()) for x in images.split(32)]
    assert heal(pruned, dense, batches, STEPS, progress=False).gained > 0
    named = [{"images": x} for x in images.split(32)]
    assert heal(pruned, dense, named, STEPS, input_of=lambda batch: batch["images"], progress=False).after > 0


def test_half_precision(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    small, large = copy.deepcopy(pruned).bfloat16(), copy.deepcopy(dense).bfloat16()
    result = heal(small, large, images.bfloat16(), Heal(steps=60, lr=1e-3), progress=False)
    assert result.gained > 0.1
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}


def test_time_ends_it(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    result = heal(pruned, dense, images, Heal(time=0.5, lr=1e-3), progress=False)
    assert 2 <= result.steps < 1000
    few = heal(pruned, dense, images, Heal(epochs=2, lr=1e-4, batch=16), progress=False)
    assert few.steps <= 18


# Features -------------------------------------------------------------------------------------------------------


def test_features_of_a_residual_network(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    found = pair(pruned, dense, images[:2])
    assert found.features == 4  # stem, two blocks, and what pooling gives
    everywhere = ispasp.prune(dense, images, keep=0.5, scope="all", progress=False).model
    assert pair(everywhere, dense, images[:2]).features < 4


def test_features_are_those_of_the_modules(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    seen: list[Tensor] = []
    hooks = [m.register_forward_hook(lambda _m, _a, y: seen.append(y.clone())) for m in (*pruned.blocks, *dense.blocks)]
    with torch.no_grad():
        stem = (pruned.stem(images[:8]) - dense.stem(images[:8])).square().mean()
        a, b = pruned(images[:8]), dense(images[:8])
    for hook in hooks:
        hook.remove()
    assert stem == 0
    errors = [(x - y).square().mean() / y.var(correction=0) for x, y in zip(seen[:2], seen[2:], strict=True)]
    pooled, expected = seen[1].mean((2, 3)), seen[3].mean((2, 3))
    errors.append((pooled - expected).square().mean() / expected.var(correction=0))
    with torch.no_grad():
        found = pair(pruned, dense, images[:8]).distance(pruned, dense, images[:8])
    assert float(found.features) == pytest.approx(float(sum(errors)) / 4, rel=1e-4)
    kl = functional.kl_div(a.log_softmax(-1), b.log_softmax(-1), reduction="batchmean", log_target=True)
    assert float(found.output) == pytest.approx(float(kl + (a - b).square().mean() / b.var(correction=0)), rel=1e-4)


def tokens(rows: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(20, (rows, 6), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[::2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_padding_does_not_count() -> None:
    torch.manual_seed(0)
    teacher = Encoder().eval()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student.down.weight.mul_(0.5)
    batch = tokens(8, 0)
    found = pair(student, teacher, batch)
    assert found.features == 2  # embeddings, and the stream after attention; not what is rotated
    other = {**batch, "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 7)}
    with torch.no_grad():
        a, b = (found.distance(student, teacher, each) for each in (batch, other))
    assert float(a.output) == pytest.approx(float(b.output), rel=1e-5)
    assert float(a.features) == pytest.approx(float(b.features), abs=1e-7)
    real = batch["attention_mask"].bool()
    y, t = (m(**batch)["last_hidden_state"][real] for m in (student, teacher))
    assert float(a.output) == pytest.approx(float((y - t).square().mean() / t.var(correction=0)), rel=1e-4)


def test_outputs_count_by_their_share_of_positions() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    teacher = nn.Sequential(*layers)
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student[0].weight.mul_(0.5)
        batch = torch.randn(2, 3, 8, 8)
        found = pair(student, teacher, batch)
        a = found.distance(student, teacher, batch)
    share = 3 / (6 * 6 + 4 * 4 + 1)  # two maps and the flat features have so many positions, the logits one
    assert found.features == 3 and float(a.output) > 0
    assert float(a.loss) == pytest.approx(float(a.features) + share * float(a.output), rel=1e-5)


def test_batches_of_several_shapes() -> None:
    torch.manual_seed(0)
    teacher = Encoder().eval()
    batches = [tokens(8, seed) for seed in range(8)]
    batches[0] = {name: value[:, :5] for name, value in batches[0].items()}
    student = ispasp.prune(teacher, batches, keep=0.5, progress=False).model
    result = heal(student, teacher, batches, STEPS, progress=False)
    assert result.gained > 0
    assert result.held_out == 8


def test_logits_by_name_are_judged_by_kl(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    class Named(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

    pruned = copy.deepcopy(pruned)
    with torch.no_grad():
        pruned.head.weight.mul_(5)  # float32 cannot hold a small divergence to 1e-4
    small, large = Named(pruned), Named(dense)
    found = pair(small, large, images[:8]).distance(small, large, images[:8])
    a, b = (m(images[:8]).log_softmax(-1) for m in (pruned, dense))
    assert float(found.output) == pytest.approx(
        float(functional.kl_div(a, b, reduction="batchmean", log_target=True)), rel=1e-4
    )


# Augmentation ---------------------------------------------------------------------------------------------------


def test_flip_and_crop_keep_most_of_an_image(images: Tensor) -> None:
    ramp = torch.arange(1.0, 17).expand(64, 1, 16, 16)
    flipped = Examples([ramp], 64, "flip").batch(0)
    mirrored = flipped[:, 0, 0, 0] == 16
    assert 10 < int(mirrored.sum()) < 54
    assert torch.equal(flipped[mirrored].flip(-1), ramp[mirrored])
    cropped = Examples([ramp], 64, "crop").batch(0)
    assert cropped.shape == ramp.shape
    assert set(cropped[:, 0, 8, 8].tolist()) == {7.0, 8.0, 9.0, 10.0, 11.0}


def test_augment_takes_a_function(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    seen: list[torch.Size] = []

    def brighter(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x * 1.1

    heal(pruned, dense, images, Heal(steps=6, lr=1e-3, augment=brighter), progress=False)
    assert set(seen) == {torch.Size((32, 3, 10, 10))}
    assert heal(pruned, dense, images, Heal(steps=6, augment=("flip", "crop")), progress=False).after > 0


# Bad input ------------------------------------------------------------------------------------------------------


def wrong_shape(x: Tensor) -> Tensor:
    return x[:, :, 1:]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Heal(augment=wrong_shape, lr=1e-3), "keep shape and dtype"),
        (Heal(augment=lambda x: x * float("nan")), "NaN or Inf on a training batch"),
    ],
)
def test_bad_augmentation(config: Heal, text: str, dense: Net, pruned: nn.Module, images: Tensor) -> None:
    before = state(pruned)
    with pytest.raises(InputError, match=text):
        heal(pruned, dense, images, config, progress=False)
    assert_same(pruned, before)


def test_bad_input(dense: Net, pruned: nn.Module, images: Tensor) -> None:
    before = state(pruned)
    other = Net()
    other.head = nn.Linear(6, 5)
    cases: list[tuple[Any, Any, str]] = [
        (other, images, "do not fit.*the dense model that this one was pruned from"),
        (dense, images[:8], "no held-out examples are left.*pass 32 or more"),
        (dense, images * float("nan"), "look for them in the weights"),
        (pruned, images, "the teacher is the model itself"),
    ]
    for teacher, batches, text in cases:
        with pytest.raises(InputError, match=text):
            heal(pruned, teacher, batches, STEPS, progress=False)
    with pytest.raises(InputError, match="take images"):
        heal(Encoder(), Encoder(), tokens(64, 0), Heal(augment="flip"), progress=False)
    with pytest.raises(InputError, match="requires_grad_"):
        heal(copy.deepcopy(pruned).requires_grad_(False), dense, images, progress=False)
    with pytest.raises(InputError, match="pass ispasp.Heal"):
        heal(pruned, dense, images, True, progress=False)
    assert_same(pruned, before)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": -1.0}, {"time": "long"}, {"batch": 0}, {"augment": "blur"}])
def test_bad_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Heal(**wrong)


@pytest.mark.parametrize("call", [2, 25])
def test_ctrl_c_leaves_the_best_state(call: int, dense: Net, pruned: nn.Module, images: Tensor) -> None:
    calls = 0

    def interrupted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return x

    before = state(pruned)
    with pytest.raises(KeyboardInterrupt):
        heal(pruned, dense, images, Heal(steps=70, lr=1e-3, augment=interrupted), progress=False)
    if call == 2:
        assert_same(pruned, before)
    else:  # the first part of the first cycle is done
        assert not torch.equal(pruned.head.weight, before["head.weight"])


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 32), nn.Linear(32, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        return self.head(x + self.down(torch.tanh(2 * self.up(self.norm(x)))))


def test_prune_heals_and_says_what_it_gained() -> None:
    torch.manual_seed(1)
    batches = [torch.randn(64, 6) for _ in range(6)]
    plain = ispasp.prune(Skip(), batches, 0.25, progress=False)
    result = ispasp.prune(Skip(), batches, 0.25, heal=ispasp.Heal(steps=120), progress=False)
    assert plain.healed is None and result.healed is not None
    assert result.healed.after < result.healed.before
    assert plain.agreement is not None and result.agreement is not None
    assert result.agreement.difference < plain.agreement.difference  # type: ignore[operator]
    assert result.plan.kept == plain.plan.kept
    assert "healed: divergence" in str(result)
    assert json.loads(result.to_json())["healed"]["steps"] == result.healed.steps


def test_a_failure_after_healing_takes_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Skip()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def failing(*_: object) -> None:
        raise MemoryError("the machine is full")

    monkeypatch.setattr("ispasp._prune.result_of", failing)
    with pytest.raises(MemoryError):
        ispasp.prune_(model, [torch.randn(64, 6)] * 4, 0.25, heal=ispasp.Heal(steps=20), progress=False)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_heal_and_finetune_between_exclude_each_other() -> None:
    with pytest.raises(ispasp.errors.InputError, match="finetune_between trains already"):
        ispasp.prune(Skip(), [torch.randn(64, 6)], heal=True, finetune_between=lambda _: None)
