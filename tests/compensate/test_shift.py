"""Where the shift of a compensated consumer goes: its bias, the BatchNorm after it, a new bias, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import ispasp
from ispasp.surgery.verify import Comparison
from support.direct import fitted, seen_by
from support.nets import Attention, alive, mlp


def data(*shape: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(n, *shape, generator=g, dtype=torch.float64) for n in (12, 9)]


def pruned(model: nn.Module, batches: list[Tensor], **options: object) -> ispasp.Result:
    return ispasp.prune(model, batches, **{"keep": 0.5, "ridge": 1e-4, "progress": False, **options})


@pytest.mark.parametrize("compensate", ["local", "dense"])
def test_a_batchnorm_after_the_consumer_takes_the_shift(compensate: str) -> None:
    dense = alive(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
    )
    batches = data(3, 7, 7)
    bare, result = pruned(dense, batches, compensate=None), pruned(dense, batches, compensate=compensate)
    inputs, _ = seen_by(bare.model, "2", batches)
    _, targets = seen_by(dense, "2", batches)
    expected = fitted(bare.model[2], inputs, targets, ridge=1e-4)
    assert result.model[2].bias is None
    assert_close(result.model[2].weight.detach(), expected.weight, rtol=1e-7, atol=1e-9)
    assert_close(result.model[3].running_mean, dense[3].running_mean - expected.bias, rtol=1e-7, atol=1e-9)
    for name in ("weight", "bias", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(result.model[3], name), getattr(dense[3], name))
    assert result.layers[0].notes == ()


@pytest.mark.parametrize(
    ("build", "shape", "consumer"),
    [
        (lambda: mlp(6, 10, 8, 3, bias=False), (6,), ("2", "4")),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)), (3, 6, 6), ("2",)),
        (
            lambda: nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, bias=False), nn.ReLU(), nn.Conv2d(6, 2, 1)
            ),
            (3, 5, 5),
            ("2",),
        ),
        (
            lambda: nn.Sequential(
                nn.Conv1d(3, 8, 3),
                nn.ReLU(),
                nn.ConvTranspose1d(8, 6, 2, groups=2, bias=False),
                nn.ReLU(),
                nn.Conv1d(6, 2, 1),
            ),
            (3, 7),
            ("2",),
        ),
        (lambda: Attention(12, 4), (5, 12), ("out",)),
    ],
    ids=["linear", "conv", "transposed", "transposed groups", "heads"],
)
def test_a_consumer_without_a_bias_gains_one(
    build: Callable[[], nn.Module], shape: tuple[int, ...], consumer: tuple[str, ...], tmp_path: Path
) -> None:
    dense, batches = alive(build()), data(*shape)
    result = pruned(dense, batches)
    for path in consumer:
        assert dense.get_submodule(path).bias is None
        assert isinstance(result.model.get_submodule(path).bias, nn.Parameter)
        assert any(note == f"{path}: gained a bias" for layer in result.layers for note in layer.notes)
    assert result.plan.structure.biases == consumer
    assert result.cost.params == sum(p.numel() for p in result.model.parameters())
    with torch.no_grad():
        expected = result.model(batches[0])

    ispasp.save(result, tmp_path)
    fresh = alive(build(), seed=1)
    assert torch.equal(ispasp.load(tmp_path, fresh)(batches[0]).detach(), expected)

    again = alive(build())
    ispasp.apply_(again, ispasp.Plan.from_json(result.plan.to_json()))
    for path in consumer:  # surgery alone knows no values
        assert again.get_submodule(path).bias.shape == result.model.get_submodule(path).bias.shape
        assert not again.get_submodule(path).bias.detach().any()


def test_a_new_bias_is_like_its_weight() -> None:
    dense = mlp(6, 10, 3, bias=False).to(torch.bfloat16)
    dense[2].weight.requires_grad_(False)
    result = pruned(dense, [torch.randn(30, 6, dtype=torch.bfloat16)])
    assert (result.model[2].bias.dtype, result.model[2].bias.requires_grad) == (torch.bfloat16, False)


def test_a_new_bias_goes_again_when_pruning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = alive(mlp(6, 10, 3, bias=False))
    before = {key: value.clone() for key, value in dense.state_dict().items()}
    monkeypatch.setattr("ispasp._proof.compare", lambda *_: Comparison(1.0, 1))
    with pytest.raises(ispasp.errors.SurgeryError):
        ispasp.prune_(dense, data(6), progress=False)
    assert dense[2].bias is None
    assert dense.state_dict().keys() == before.keys()
    assert all(torch.equal(dense.state_dict()[key], value) for key, value in before.items())


class Bare(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class NoPlace(nn.Module):
    """A layer whose bias nobody would look at."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a = how, nn.Linear(6, 10)
        self.b = Bare(10, 4, bias=False) if how == "own forward" else nn.Linear(10, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.b(h) if self.how == "own forward" else F.linear(h, self.b.weight)


@pytest.mark.parametrize("how", ["weight only", "own forward"])
def test_a_module_that_cannot_hold_a_bias_says_so(how: str) -> None:
    dense, batches = alive(NoPlace(how)), data(6)
    result = pruned(dense, batches)
    assert result.layers[0].notes == ("b: no shift: its module has no place for a bias",)
    assert result.model.b.bias is None
    assert result.layers[0].relative_error < result.layers[0].uncompensated_error
    bare = pruned(dense, batches, compensate=None)
    with torch.no_grad():
        inputs, targets = [torch.relu(bare.model.a(x)) for x in batches], [dense(x) for x in batches]
    layer = nn.Linear(5, 4, bias=False, dtype=torch.float64)
    layer.weight.data = bare.model.b.weight.detach()
    expected = fitted(layer, inputs, targets, ridge=1e-4, intercept=False)
    assert_close(result.model.b.weight.detach(), expected.weight, rtol=1e-7, atol=1e-9)


def test_a_batchnorm_that_is_used_twice_does_not_take_the_shift() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(10, 4, bias=False), nn.Linear(6, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.b(torch.relu(self.a(x)))) + self.norm(self.c(x))

    dense = alive(Twice())
    result = pruned(dense, data(6))
    assert torch.equal(result.model.norm.running_mean, dense.norm.running_mean)
    assert result.layers[0].notes == ("b: gained a bias",)


def test_multihead_attention_built_without_biases_gains_one() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(12, 4, bias=False, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    result = pruned(alive(Attending()), data(5, 12))
    assert result.layers[0].notes == ("attention.out_proj: gained a bias",)
    assert result.model.attention.out_proj.bias.detach().abs().max() > 0
