"""`recalibrate=True` gives the BatchNorm statistics that torch itself accumulates on the pruned model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from support.nets import ResNet, alive


class CalledTwice(nn.Module):
    """One BatchNorm for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.last = nn.BatchNorm1d(8), nn.BatchNorm1d(3, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.c(torch.relu(self.norm(self.b(torch.relu(self.norm(self.a(x))))))))


def norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def cumulative(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """torch's own: train mode with momentum=None averages over batches."""
    model = copy.deepcopy(model)
    for norm in norms(model).values():
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return model


@pytest.mark.parametrize("build", [ResNet, CalledTwice])
@pytest.mark.parametrize("compensate", [None, "dense"])
def test_statistics_are_those_of_torch(build: type[nn.Module], compensate: str | None) -> None:
    shape = (3, 9, 9) if build is ResNet else (5,)
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(n, *shape, generator=g, dtype=torch.float64) for n in (6, 4, 4)]
    dense = alive(build(small=True) if build is ResNet else build())
    options = {"compensate": compensate, "scope": "all", "progress": False}
    plain = ispasp.prune(dense, batches, **options)
    result = ispasp.prune(dense, batches, recalibrate=True, **options)
    expected = cumulative(plain.model, batches)
    for name, norm in norms(result.model).items():
        assert_close(norm.running_mean, norms(expected)[name].running_mean, rtol=1e-9, atol=1e-10, msg=name)
        assert_close(norm.running_var, norms(expected)[name].running_var, rtol=1e-9, atol=1e-10, msg=name)
        assert norm.num_batches_tracked == norms(dense)[name].num_batches_tracked
        assert not torch.equal(norm.running_mean, norms(plain.model)[name].running_mean)  # off by default
    kept_out = {key: value for key, value in result.model.state_dict().items() if "running" not in key}
    for key, value in kept_out.items():
        assert torch.equal(value, plain.model.state_dict()[key])
    assert not any(module.training for module in result.model.modules())


@pytest.mark.filterwarnings("ignore:var\\(\\)")
def test_a_failure_on_the_way_leaves_the_model_as_it_was() -> None:
    dense = alive(CalledTwice())
    dense.norm.training = True  # each module's own mode comes back, too
    before = {key: value.clone() for key, value in dense.state_dict().items()}
    one = torch.randn(1, 5, dtype=torch.float64)
    with pytest.raises(
        ispasp.errors.InputError, match="batch 1 .*Expected more than 1 value per channel.*pass larger batches"
    ):
        ispasp.prune_(dense, [torch.randn(6, 5, dtype=torch.float64), one], recalibrate=True, progress=False)
    assert dense.state_dict().keys() == before.keys()
    for key, value in dense.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert [m.training for m in (dense, dense.norm, dense.last)] == [False, True, False]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in dense.modules())


def test_norms_without_statistics_are_passed_over() -> None:
    dense = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 3))
    result = ispasp.prune(dense.eval(), [torch.randn(20, 5)], recalibrate=True, progress=False)
    assert result.model[1].running_mean is None
