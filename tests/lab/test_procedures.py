"""Procedures against their definitions: NISP, SNIP, GraSP, discrimination-aware pruning, early-bird tickets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import ispasp
from ispasp.errors import InputError
from ispasp.train import Sgd
from ispasp_lab.procedures import Growth, discrimination_aware, early_bird, grasp, nisp, snip
from ispasp_lab.procedures.early_bird import gammas_of
from ispasp_lab.procedures.nisp import importances, infinite_feature_selection
from ispasp_lab.procedures.scores import plan_by

Batches = list[tuple[Tensor, Tensor]]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batches(n: int = 24) -> Batches:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(zip(x.split(8), (x[:, :3].argmax(1)).split(8), strict=True))


def mean_loss(net: nn.Module, temperature: float = 1.0) -> Tensor:
    return torch.stack([functional.cross_entropy(net(x) / temperature, y) for x, y in batches()]).mean()


def test_snip_sums_what_each_weight_times_its_gradient_is() -> None:
    net = network()
    mean_loss(net).backward()
    scores = {name: (net[int(name)].weight * net[int(name)].weight.grad).abs().sum(1).detach() for name in "02"}
    net.zero_grad()
    found = ispasp.survey(net, batches()[0][0])
    assert snip(net, batches(), 0.5, together=False).kept == plan_by(found, scores, 0.5).kept
    ranked = snip(net, batches(), 0.5).kept
    threshold = torch.cat([*scores.values()]).sort(descending=True).values[6]
    assert ranked == {name: tuple(torch.nonzero(s >= threshold).flatten().tolist()) for name, s in scores.items()}
    assert all(p.grad is None for p in net.parameters())


def test_grasp_is_the_change_of_the_gradients_norm() -> None:
    net, h = network(), 1e-5

    def flow(net: nn.Module) -> float:
        g = torch.autograd.grad(mean_loss(net, 2.0), list(net.parameters()))
        return float(torch.stack([each.square().sum() for each in g]).sum())

    scores = {}
    for name in "02":
        changes = []
        for unit in range(len(net[int(name)].weight)):
            less, more = copy.deepcopy(net), copy.deepcopy(net)
            with torch.no_grad():
                less[int(name)].weight[unit] *= 1 - h
                more[int(name)].weight[unit] *= 1 + h
            changes.append((flow(more) - flow(less)) / (4 * h))  # half the derivative along the unit's weights
        scores[name] = torch.tensor(changes)
    found = ispasp.survey(net, batches()[0][0])
    assert grasp(net, batches(), 0.5, temperature=2.0, together=False).kept == plan_by(found, scores, 0.5).kept


def test_nisp_propagates_through_absolute_weights() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)
    ).eval()  # fmt: skip
    with torch.no_grad():
        for t in (net[1].weight, net[1].bias, net[1].running_mean):
            t.copy_(torch.randn(8))
        net[1].running_var.copy_(torch.rand(8) + 0.5)
    scores, x = torch.rand(6), torch.rand(32, 5)
    found = importances(net, ispasp.survey(net, x[:2]), x[:1], scores)
    assert_close(found["3"], scores.double())
    assert_close(found["0"], (net[3].weight.abs().T @ scores).double().detach(), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        features = net[:5](x)
    s = infinite_feature_selection(features)
    expected = {"0": net[3].weight.abs().T.double() @ s, "3": s}
    assert nisp(net, [x[:16], x[16:]], 0.5).kept == plan_by(ispasp.survey(net, x[:2]), expected, 0.5).kept


class Residual(nn.Module):
    """A skip connection around a convolution, and another block behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 2, 3, padding=1, bias=False)
        self.c, self.d = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 2, 1)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(torch.relu(self.a(x)))
        x = x + self.d(torch.relu(self.c(x)))
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def test_nisp_follows_skip_connections_and_positions() -> None:
    torch.manual_seed(0)
    net, x = Residual().eval(), torch.rand(2, 2, 4, 4)
    s = torch.tensor([0.3, 0.7], dtype=torch.float64)
    found = importances(net, ispasp.survey(net, x), x, s)
    each = s / 16  # the mean over 16 positions
    at_c = net.d.weight[:, :, 0, 0].abs().double().T @ each  # of each position
    assert_close(found["c"], 16 * at_c.detach())
    at_stream = each + net.c.weight[:, :, 0, 0].abs().double().T @ at_c
    maps = at_stream[None, :, None, None].expand(1, 2, 4, 4)
    back = functional.conv_transpose2d(maps, net.b.weight.abs().double(), padding=1)
    assert_close(found["a"], back.sum((0, 2, 3)).detach())


def test_nisp_refuses_what_its_propagation_does_not_hold_for() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    with pytest.raises(InputError, match="Sequential with absolute weights is not positively homogeneous"):
        nisp(net, [torch.rand(8, 3)], 0.5)


def test_infinite_feature_selection_is_the_sum_over_paths() -> None:
    X = torch.randn(50, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sd = X.std(0) / X.std(0).max()
    A = 0.5 * torch.maximum(sd[:, None], sd) + 0.5 * (1 - torch.corrcoef(X.T).abs())
    r = 0.9 / float(torch.linalg.eigvalsh(A).abs().max())
    total, power = torch.zeros_like(A), torch.eye(5, dtype=torch.float64)
    for _ in range(400):
        power = power @ (r * A)
        total = total + power
    assert_close(infinite_feature_selection(X), total.sum(1))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def floats() -> Batches:
    return [(x.float(), y) for x, y in batches()]


def test_an_early_bird_is_drawn_when_the_masks_are_at_rest() -> None:
    net = normed()
    ticket = early_bird(
        net, floats(), 0.5, epochs=40, recipe=Sgd(lr=0.05, schedule="constant"), window=3, progress=False
    )
    assert ticket.found
    assert ticket.epoch == len(ticket.distances) < 40
    assert ticket.distances[-1] < 0.1
    assert all(distance >= 0.1 for distance in ticket.distances[2:-1])
    found = ispasp.survey(net, floats()[0][0])
    assert ticket.plan.kept == plan_by(found, gammas_of(net, found), 0.5).kept  # one dimension: the same ranking
    gamma = net[1].weight.detach().abs()
    assert ticket.plan.kept["0"] == tuple(sorted(gamma.argsort(descending=True)[:4].tolist()))


def test_a_mask_that_never_rests_is_said_to() -> None:
    ticket = early_bird(normed(), floats(), 0.5, epochs=2, window=3, progress=False)
    assert (ticket.found, ticket.epoch) == (False, 2)
    with pytest.raises(InputError, match="no BatchNorm follows what makes '0'"):
        early_bird(network().float(), floats(), 0.5, epochs=1, progress=False)


def test_one_ranking_leaves_at_least_one_unit_of_each() -> None:
    found = ispasp.survey(network(), batches()[0][0])
    scores: dict[str, Any] = {"0": torch.arange(8.0), "2": torch.arange(6.0) - 100}
    assert plan_by(found, scores, 0.5, together=True).kept == {"0": (2, 3, 4, 5, 6, 7), "2": (5,)}
    with pytest.raises(InputError, match="keep=0: pass a fraction"):
        plan_by(found, scores, 0)


def test_discrimination_aware_takes_the_unit_of_largest_gradient() -> None:
    net = network()
    ((x, y),) = [batches()[0]]
    H = net[1](net[0](x)).detach()  # what the second layer reads
    W, b = net[2].weight.detach(), net[2].bias.detach()
    Z = torch.zeros_like(W).requires_grad_()
    rebuilt = (H @ W.T + b - (H @ Z.T + b)).square().mean() / 2
    logits = net[4](torch.tanh(H @ Z.T + b))
    (G,) = torch.autograd.grad(rebuilt + 3.0 * functional.cross_entropy(logits, y), Z)
    plan = discrimination_aware(net, [(x, y)], 1 / 8, Growth(heads=0, balance=3.0))
    assert plan.kept["0"] == (int(G.square().sum(0).argmax()),)


def test_discrimination_aware_sees_what_tells_classes_apart() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
        net[2].weight.copy_(torch.tensor([[1.0, -1.0], [1.0, 1.0]]))  # the first unit moves both classes alike
    y = torch.arange(20) % 2
    data = [(torch.stack([torch.full((20,), 5.0), y.float()], 1), y)]
    assert discrimination_aware(net, data, 0.5, Growth(balance=0.0)).kept == {"0": (0,)}
    assert discrimination_aware(net, data, 0.5, Growth(balance=100.0)).kept == {"0": (1,)}


def test_discrimination_aware_trains_classifiers_and_leaves_the_network() -> None:
    torch.manual_seed(0)
    net, x = Residual().eval(), torch.rand(12, 2, 4, 4)
    data = list(zip(x.split(4), (torch.arange(12) % 3).split(4), strict=True))
    before = copy.deepcopy(net.state_dict())
    plan = discrimination_aware(net, data, 0.5, Growth(heads=1, head_steps=5, at_once=2))
    assert {name: len(kept) for name, kept in plan.kept.items()} == {"a": 3, "c": 2}
    assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    torch.manual_seed(7)
    assert discrimination_aware(net, data, 0.5, Growth(heads=1, head_steps=5, at_once=2)) == plan
    smaller = ispasp.apply_(copy.deepcopy(net), plan, x[:2])
    assert smaller.a.out_channels == 3


def test_discrimination_aware_refuses_other_layers() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 1), nn.Flatten(), nn.Linear(32, 2))
    with pytest.raises(InputError, match="'0' is read by 2: discrimination-aware pruning is for units that Linear"):
        discrimination_aware(net, [(torch.rand(4, 2, 4, 4), torch.arange(4) % 2)], 0.5)
