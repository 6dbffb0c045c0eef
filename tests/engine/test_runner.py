"""The engine runs a graph as the model does: with edits, beside a dense twin, in float64, on other shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from ispasp.engine.graphs import TracedGraph, TracedGraphs
from ispasp.engine.runner import Edits, Runner
from ispasp.engine.sites import Site, read, sites
from ispasp.graph.analyse import Analysis, analyse
from ispasp.graph.ops import scale
from ispasp.graph.trace import named_tensors
from support.nets import ViewChangedInPlace, alive, mlp

ROWS = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def surveyed(model: nn.Module, batch: Tensor) -> tuple[Analysis, list[Site]]:
    found = analyse(model.eval(), batch)
    return found, sites(found, set(found.names.values()))


def runner(model: nn.Module, batch: Tensor, edits: Edits | None = None, **options: Any) -> Runner:
    return Runner(
        TracedGraph.of(analyse(model.eval(), batch)), batch, named_tensors(model), edits or Edits(), **options
    )


# The dense twin -------------------------------------------------------------------------------------------------
def test_the_twin_shares_everything_up_to_the_first_edit() -> None:
    model = alive(mlp(5, 9, 8, 3))
    _, (_, second) = surveyed(model, ROWS)
    edits = Edits({second.number: second.cuts({"2": (0, 3)})})
    alone, both = (runner(model, ROWS, edits, twin=twin) for twin in (False, True))
    for each in (alone, both):
        each.advance(each.graph.contractions[second.number])
    assert both.bytes == alone.bytes


def test_the_twin_is_dense_beside_a_cut_or_a_new_bias() -> None:
    model = alive(mlp(5, 9, 3, 2, bias=False))
    _, (first, second) = surveyed(model, ROWS)
    bias = torch.arange(3.0, dtype=torch.float64)
    dense = model[:3](ROWS)
    for edits, changed in (
        (Edits({first.number: first.cuts({"0": ()})}), 0 * dense),
        (Edits(biases={first.number: bias}), dense + bias),
    ):
        run = runner(model, ROWS, edits, twin=True)
        node = run.graph.contractions[first.number]
        run.advance(node)
        assert_close(run.value(node), changed)
        assert_close(run.value(node, dense=True), dense)
        run.advance(run.graph.contractions[second.number])
        assert_close(run.arguments(second.number)["input"], changed.relu())
        assert_close(run.arguments(second.number, dense=True)["input"], dense.relu())


def test_in_place_ops_change_each_network_once() -> None:
    model = alive(ViewChangedInPlace())
    _, found = surveyed(model, ROWS)
    b, c = (next(site for site in found if site.path == path) for path in ("b", "c"))
    run = runner(model, ROWS, Edits({b.number: b.cuts({"a": (1, 2)})}), twin=True)
    run.advance(run.graph.contractions[c.number])
    expected = (-3 * model.a(ROWS)).relu()
    for dense in (False, True):
        assert_close(run.arguments(c.number, dense=dense)["input"], expected)


# Edits ----------------------------------------------------------------------------------------------------------
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 3, padding=1)),
    "groups": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 3, groups=2)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("slicing", [False, True])
def test_a_cut_is_as_if_units_were_zero_whatever_their_values(name: str, slicing: bool) -> None:
    model = alive(LAYERS[name]())
    batch = ROWS if name == "linear" else IMAGES
    found, _ = surveyed(model, batch)
    (site,) = (site for site in sites(found, ["0"]) if site.path == "1")
    (cut,) = site.cuts({"0": (0,)})
    expected = model[1](torch.where(cut.stays.reshape(-1, *(1,) * (batch.ndim - 2)), model[0](batch), 0))
    model[0].bias.data[~cut.stays] = float("inf")
    assert 0 < cut.stays.sum() < 8
    assert_close(runner(model, batch, Edits({site.number: [cut]}), slicing=slicing).output(), expected)


def test_the_magnitude_of_a_sum_that_cancels() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1, bias=False))
    for tensor, values in zip(model.parameters(), ([[1.0], [1.0]], [0.0, 0.0], [[2.0, -2.0]]), strict=True):
        tensor.data.copy_(torch.tensor(values))
    run = runner(model.requires_grad_(False), torch.ones(1, 1))
    assert run.magnitude(1) == 4.0
    assert run.output().item() == 0.0


class Assembled(nn.Module):
    """Writes into a tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 8)
        h[:, :4] = self.a(x)
        return self.b(h)


def test_writes_into_a_new_tensor_are_kept_in_float64() -> None:
    model = Assembled()
    assert_close(runner(model, ROWS.float(), precise=True).output(), model(ROWS.float()).double(), rtol=1e-5, atol=1e-5)


# Graphs ---------------------------------------------------------------------------------------------------------
class Counter(nn.Module):
    """Counts its calls in a buffer, and adds the number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.b(self.a(x) + self.calls)


def test_a_run_does_not_write_into_buffers_of_the_model() -> None:
    model = Counter()
    run = [runner(model, ROWS.float()).output() for _ in range(2)]
    assert model.calls == 0
    assert torch.equal(*run)


class Parts(nn.Module):
    """Changes a tensor through one of its parts, or through a dropout that does nothing."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.part(h).mul_(2)
        return self.b(h)


@pytest.mark.parametrize("part", [lambda h: h.split(4, 1)[1], lambda h: nn.functional.dropout(h, training=False)])
def test_writes_through_parts_and_dropout_are_known(part: Callable[[Tensor], Tensor]) -> None:
    graph = runner(Parts(part), ROWS.float()).graph
    made = next(node for node in graph.nodes if node.target is torch.ops.aten.linear.default)
    assert [str(node.target) for node in graph.writes[made]] == ["aten.mul_.Tensor"]


class ByRows(nn.Module):
    """Runs its layers in another order on few examples, or leaves one out."""

    def __init__(self, omits: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.omits = omits

    def forward(self, x: Tensor) -> Tensor:
        few = [self.a] if self.omits else [self.b, self.a]
        for layer in few if len(x) < 3 else [self.a, self.b]:
            x = layer(x).relu()
        return self.c(x)


@pytest.mark.parametrize("omits", [False, True])
def test_a_batch_that_takes_another_path_is_refused(omits: bool) -> None:
    model = ByRows(omits).double()
    graphs = TracedGraphs(model, analyse(model, ROWS), ROWS)
    assert graphs.of(ROWS[:3].clone()) is graphs.first
    with pytest.raises(ispasp.errors.InputError, match="takes another path through the model"):
        graphs.of(ROWS[:2])


# Sites ----------------------------------------------------------------------------------------------------------
def test_a_grouped_convolution_does_not_read_whole_groups() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=4), nn.Conv2d(8, 2, 1)).double()
    _, found = surveyed(model, IMAGES)
    assert [(site.path, set(site.names)) for site in found] == [("2", {"0"})]


def test_forms_follow_the_weight() -> None:
    model = alive(mlp(5, 9, 3))
    _, (site,) = surveyed(model, ROWS)
    given = runner(model, ROWS).arguments(site.number)
    for weight in (given["weight"], given["weight"] + 1, given["weight"][:2]):
        (form,) = site.forms({**given, "weight": weight})
        assert torch.equal(form.consumer.weight, weight)


def test_factors_on_outputs_multiply_those_of_a_norm() -> None:
    model = alive(nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    _, (site, _) = surveyed(model, ROWS)
    run, mask = runner(model, ROWS), torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    run.advance(run.graph.contractions[site.number])
    norm = scale(run.graph.tails[site.number], run.fixed)
    (reading,) = read(site, ["0"], run, ("moment",), 0, mask)["0"]
    assert norm is not None
    assert_close(reading.consumer.scale, norm * mask)
