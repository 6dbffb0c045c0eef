"""`obs-fisher`: gradients from the definition, and the unit that exhaustive search removes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from ispasp._evaluate import own_labels
from ispasp.errors import InputError
from ispasp.select import OBS, FisherOBS, LinearConsumer, Reading, Statistics, measure, select_units
from ispasp.types import Fisher

OPTIONS: dict[str, Any] = {"progress": False, "hold_out": False}


class Split(nn.Module):
    """A hidden dimension with two consumers, one in two groups and with a BatchNorm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.plain = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.grouped, self.norm, self.head = nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Linear(8, 3)
        self.norm.running_var.uniform_(0.2, 2.0)

    def consumers(self) -> list[nn.Module]:
        return [self.plain, self.grouped]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.make(x))
        a, b = self.plain(h).mean((2, 3)), torch.relu(self.norm(self.grouped(h))).mean((2, 3))
        return self.head(torch.cat([a, b], 1))


class Tokens(nn.Module):
    """Reads every token by itself; returns no classes, but signals."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down, self.last = (
            nn.Embedding(9, 4),
            nn.Linear(4, 6),
            nn.Linear(6, 5),
            nn.Linear(5, 1),
        )

    def consumers(self) -> list[nn.Module]:
        return [self.down]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.last(torch.tanh(self.down(torch.relu(self.up(self.embed(input_ids))))))


def case(kind: str) -> tuple[Any, list[Any], Tensor | None]:
    """A network with consumers, its batches, and which tokens of all batches are real."""
    torch.manual_seed(0)
    if kind == "images":
        return Split().double().eval(), [torch.randn(40, 2, 6, 6).double() for _ in range(2)], None
    ids = [torch.randint(0, 9, (30, 7)) for _ in range(2)]
    masks = [(torch.arange(7)[None] < torch.randint(2, 8, (30, 1))).long() for _ in range(2)]
    batches = [{"input_ids": i, "attention_mask": m} for i, m in zip(ids, masks, strict=True)]
    return Tokens().double().eval(), batches, torch.cat(masks).bool()


def reads_and_gradients(net: Any, batches: list[Any]) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """What each consumer reads, and the gradients of every example's own loss at its output."""
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {module: [] for module in net.consumers()}

    def note(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        y.retain_grad()
        seen[module].append((args[0].detach(), y))

    hooks = [module.register_forward_hook(note) for module in seen]
    for batch in batches:
        own_labels(net(**batch) if isinstance(batch, dict) else net(batch), batch).backward()
    for hook in hooks:
        hook.remove()
    found = {}
    for module, rows in seen.items():
        gradients = [y.grad * len(y) for _, y in rows if y.grad is not None]
        found[module] = torch.cat([x for x, _ in rows]), torch.cat(gradients)
    return found


def left(X: Tensor, gone: list[int], W: Tensor, f: Tensor) -> float:
    """The weighted error of least squares to X W^T without some columns of X."""
    kept = [column for column in range(X.shape[1]) if column not in gone]
    error = X @ W.T - X[:, kept] @ torch.linalg.lstsq(X[:, kept], X @ W.T).solution
    return float((f * error.square().sum(0)).sum())


def cost(module: Any, x: Tensor, g: Tensor, channels: list[int], real: Tensor | None) -> float:
    """What it costs that a consumer loses these channels, from the patches of the data."""
    W = module.weight.detach()
    if isinstance(module, nn.Linear):
        assert real is not None
        return left(x[real], channels, W, g[real].square().sum(0))
    total, taps = 0.0, W[0, 0].numel()
    for xs, gs, w in zip(x.chunk(module.groups, 1), g.chunk(module.groups, 1), W.chunk(module.groups), strict=True):
        mine = {channel % xs.shape[1] for channel in channels}
        X = nn.functional.unfold(xs, module.kernel_size, padding=module.padding).mT.flatten(0, 1)
        gone = [channel * taps + tap for channel in mine for tap in range(taps)]
        total += left(X, gone, w.flatten(1), gs.square().sum((0, 2, 3)))
    return total


@pytest.mark.parametrize(
    ("kind", "name", "units"), [("images", "make", [[0, 3], [1, 4], [2, 5]]), ("tokens", "up", [[u] for u in range(6)])]
)
def test_the_cheapest_unit_by_exhaustive_search_goes_first(kind: str, name: str, units: list[list[int]]) -> None:
    net, batches, real = case(kind)
    seen = reads_and_gradients(net, batches)
    costs = [sum(cost(module, x, g, channels, real) for module, (x, g) in seen.items()) for channels in units]
    kept = ispasp.prune(net, batches, {name: len(units) - 1}, method=FisherOBS(ridge=1e-9), **OPTIONS).plan.kept[name]
    assert set(range(len(units))) - set(kept) == {int(torch.tensor(costs).argmin())}


def test_it_follows_the_outputs_that_matter() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    with torch.no_grad():
        net[2].weight[:4, 6:] = net[2].weight[4:, :6] = 0  # the first units feed the first outputs only
        net[2].weight[4:] *= 3
        net[4].weight[:, 4:] *= 1e-3  # and the predictions hardly depend on the others
    data = [torch.randn(64, 6).double()]
    kept = {m: ispasp.prune(net, data, {"0": 6}, method=m, **OPTIONS).plan.kept["0"] for m in ("obs", "obs-fisher")}
    assert sum(u < 6 for u in kept["obs-fisher"]) > sum(u < 6 for u in kept["obs"])


def test_equal_weights_or_none_at_all_are_plain_obs() -> None:
    torch.manual_seed(0)
    A = LinearConsumer(torch.randn(5, 8).double())
    reading = measure(A, torch.randn(50, 8).double(), ["gram"])
    plain = OBS().select(Statistics(8, (reading,)), 3).kept
    for f in (torch.full((5,), 7.0), torch.zeros(5)):
        felt = Reading(A, *reading.statistics.values(), Fisher(f, 50))
        assert FisherOBS().select(Statistics(8, (felt,)), 3).kept == plain


def test_outputs_that_are_gone_do_not_count() -> None:
    torch.manual_seed(0)
    W, H, f = torch.randn(5, 8).double(), torch.randn(50, 8).double(), torch.rand(5)
    gone = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0])

    def kept(A: LinearConsumer, f: Tensor) -> tuple[int, ...]:
        return FisherOBS().select(
            Statistics(8, (Reading(A, *measure(A, H, ["gram"]).statistics.values(), Fisher(f, 50)),)), 3
        ).kept  # fmt: skip

    assert kept(LinearConsumer(W, scale=gone), f) == kept(LinearConsumer(W[gone > 0]), f[gone > 0])


def test_activations_alone_are_refused() -> None:
    with pytest.raises(InputError, match="consumer 0 has no fisher"):
        select_units(torch.eye(3), torch.ones(2, 3), 1, "obs-fisher")
    with pytest.raises(InputError, match="backward pass"):
        Fisher.measure(LinearConsumer(torch.eye(3)), torch.ones(2, 3))
    assert_close((Fisher(torch.ones(2), 3) + Fisher(torch.ones(2), 4)).total, torch.full((2,), 2.0))
