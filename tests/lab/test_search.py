"""Searches of widths: each meets the budget and improves on a bad start; the interface they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.budget import WidthProblem
from ispasp.budget.search import SEARCHES
from ispasp.errors import InputError
from ispasp_lab.search import AMC, LeGR, MetaPruning
from ispasp_lab.search.legr import Genes, ranked_widths, unit_norms

SMALL = {"legr": LeGR(steps=12, population=6, drawn=3), "amc": AMC(episodes=14, explore=6),
         "meta": MetaPruning(steps=6, population=10, best=3, rounds=3)}  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip
    with torch.no_grad():
        net[9].weight *= 10
    return net


def data() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(32, 3, 6, 6, generator=g) for _ in range(3)]


def solved(search: Any, look: Any = None, **options: Any) -> tuple[ispasp.Result, Mapping[str, int]]:
    """The result and the widths; `look(problem, widths)` is called while the problem is open."""
    seen: list[Mapping[str, int]] = []

    def noted(problem: WidthProblem) -> Mapping[str, int]:
        seen.append(search(problem))
        assert problem.count(seen[-1]) <= problem.limit
        if look is not None:
            look(problem, seen[-1])
        return seen[-1]

    options = {"method": "l2", "refit": "consumers", "progress": False, **options}
    return ispasp.prune(network(), data(), ispasp.Macs(0.5), search=noted, **options), seen[0]


def start(problem: WidthProblem) -> Mapping[str, int]:
    return problem.start


def bad(problem: WidthProblem) -> dict[str, int]:
    """The network with the block that matters as narrow as the limit allows, and all others wide."""
    others = list(problem.units)[1:]
    widths = {**dict(problem.least), **{name: problem.units[name] for name in others}}
    for name in reversed(others):
        if problem.count(widths) > problem.limit:
            widths[name] = problem.least[name]
            widths[name] = problem.widest(name, widths)
    return widths


@pytest.mark.parametrize("name", SMALL)
def test_every_search_meets_the_limit_and_beats_a_bad_start(name: str) -> None:
    def look(problem: WidthProblem, widths: Mapping[str, int]) -> None:
        assert problem.count(bad(problem)) <= problem.limit
        assert problem.error(widths) < problem.error(bad(problem))

    result, widths = solved(SMALL[name], look)
    assert result.cost.macs <= 0.5 * result.cost.dense_macs
    assert {layer.name: layer.kept for layer in result.layers}.items() <= widths.items()
    assert solved(SMALL[name])[1] == widths  # its random numbers are its own


@pytest.mark.parametrize("name", SMALL)
def test_widths_are_multiples_where_they_must_be(name: str) -> None:
    result, widths = solved(SMALL[name], round_to=4)
    assert all(width % 4 == 0 for width in widths.values())
    assert result.cost.macs <= 0.5 * result.cost.dense_macs


@pytest.mark.parametrize("name", SMALL)
def test_evaluate_replaces_the_divergence(name: str) -> None:
    found: dict[float, list[nn.Module]] = {}

    def size(model: nn.Module) -> float:
        with torch.no_grad():
            value = float(model(data()[0][:4]).abs().mean())
        found.setdefault(value, []).append(model)
        return value

    def look(problem: WidthProblem, widths: Mapping[str, int]) -> None:
        best = max(found)
        assert size(problem.network(widths)) == best

    small: Any = SMALL[name]
    solved(replace(small, evaluate=size), look)
    assert len(found) > 1


def test_a_candidate_network_is_the_refitted_one() -> None:
    def look(problem: WidthProblem, widths: Mapping[str, int]) -> None:
        x = data()[0]
        with torch.no_grad():
            whole = problem.network(dict(problem.units))(x)
            small = problem.network(widths)(x[:5])  # of another size than the calibration batches
        assert torch.allclose(whole, network()(x), atol=1e-5)
        assert small.shape == (5, 4)
        assert not torch.allclose(small, whole[:5])

    solved(start, look)


def test_a_ranking_removes_as_few_of_the_smallest_as_the_limit_allows() -> None:
    def look(problem: WidthProblem, _: Mapping[str, int]) -> None:
        norms = unit_norms(problem)
        weight = network()[2].weight.detach().double()
        assert torch.allclose(norms["2"], weight.flatten(1).square().sum(1))
        genes = Genes(torch.ones(len(norms)), torch.zeros(len(norms)))
        widths = ranked_widths(problem, norms, genes)
        ordered = {name: each.sort(descending=True).values for name, each in norms.items()}
        last = [float(ordered[n][w - 1]) for n, w in widths.items() if w > problem.least[n]]
        gone = {n: float(ordered[n][w]) for n, w in widths.items() if w < problem.units[n]}
        assert min(last) > max(gone.values())
        name = max(gone, key=lambda n: gone[n])  # the next to come back
        assert problem.count({**widths, name: widths[name] + 1}) > problem.limit
        other = next(n for n in gone if n != name or len(gone) == 1)
        shift = torch.tensor([1e6 if n == other else 0.0 for n in norms])
        assert ranked_widths(problem, norms, Genes(genes.scale, shift))[other] > widths[other]

    solved(start, look)


def test_amc_never_leaves_a_limit_out_of_reach() -> None:
    def look(problem: WidthProblem, _: Mapping[str, int]) -> None:
        tight = replace(problem, limit=round(1.1 * problem.count(problem.least)))
        assert tight.count(AMC(episodes=3, explore=2)(tight)) <= tight.limit

    solved(start, look)


def test_names_and_functions_and_what_is_refused() -> None:
    assert {"legr", "amc", "meta"} <= SEARCHES.keys()
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def prune(search: Any) -> ispasp.Result:
        return ispasp.prune(net, [torch.randn(16, 4)], ispasp.Macs(0.5), search=search, progress=False)

    assert prune(lambda problem: {"0": 3}).layers[0].kept == 3
    assert "function" in str(prune(lambda problem: {"0": 3}).settings["search"])
    with pytest.raises(InputError, match="search='lgr': choose from .*legr.*import ispasp_lab.search"):
        prune("lgr")
    with pytest.raises(InputError, match="search=-1: pass a number of candidates"):
        prune(-1)
    with pytest.raises(InputError, match="widths count 48, above the limit of 24"):
        prune(lambda problem: {"0": 8})
    with pytest.raises(InputError, match="the search gave 0=0: return 1 to 8 units"):
        prune(lambda problem: {"0": 0})
    with pytest.raises(InputError, match="return a width for each of 0"):
        prune(lambda problem: None)
