"""Budgets on a small residual network: what is returned is the best of all candidates on the judge's examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ispasp
from ispasp import _prune, _widths
from ispasp._steps import Work
from ispasp._widths import Curves
from ispasp.budget import Curve
from ispasp_lab.models import CifarResNet

Judged = list[tuple[Mapping[str, int], float]]


def prune(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[ispasp.Result, Judged]:
    """The result, and every candidate that was run, with its divergence."""
    judged: Judged = []
    divergence = _widths._Judge.divergence

    def noted(judge: _widths._Judge, widths: Mapping[str, int]) -> float:
        judged.append((widths, divergence(judge, widths)))
        return judged[-1][1]

    monkeypatch.setattr(_widths._Judge, "divergence", noted)
    torch.manual_seed(0)
    net, data = CifarResNet(8).eval(), [torch.randn(32, 3, 8, 8) for _ in range(3)]
    with torch.no_grad():
        net.layer1[0].conv2.weight *= 3  # not all blocks matter alike
    options = {"method": "l1", "progress": False, **options}
    result = ispasp.prune(net, data, ispasp.Macs(0.5), **options)
    monkeypatch.undo()
    return result, judged


def of(result: ispasp.Result, judged: Judged) -> float:
    """The divergence of what was returned."""
    kept = {name: len(units) for name, units in result.plan.kept.items()}
    whole = {layer.name: layer.units for layer in result.layers}
    return min(d for widths, d in judged if {n: w for n, w in widths.items() if w < whole.get(n, w)} == kept)


def test_the_best_candidate_is_returned_and_a_uniform_cut_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    result, judged = prune(monkeypatch)
    assert len(judged) == 3  # by the curves, never far below uniform, and uniform
    assert of(result, judged) == min(d for _, d in judged)


def mislead(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The curve of the last dimension comes out too high."""
    measured = _prune.output_curves

    def misled(work: Work, found: Curves, batch: Any) -> Curves:
        found = measured(work, found, batch)
        name = list(found.curves)[-1]
        curve = found.curves[name]
        high = Curve(curve.kept, tuple(factor * error for error in curve.error))
        return replace(found, curves={**found.curves, name: high})

    monkeypatch.setattr(_prune, "output_curves", misled)


def test_the_uniform_cut_wins_where_the_curves_mislead(monkeypatch: pytest.MonkeyPatch) -> None:
    mislead(monkeypatch, 1e9)
    monkeypatch.setattr(_widths, "_FLOORS", (0.0, 1.0))  # without the one in between
    result, judged = prune(monkeypatch, refit="consumers")  # a refit of all layers makes up for misled curves
    (_, by_curves), (_, even) = judged
    assert even < by_curves
    assert of(result, judged) == even
    assert min(layer.kept / layer.units for layer in result.layers) > 0.3


def test_all_dimensions_are_never_worse_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, judged_blocks = prune(monkeypatch)
    everything, judged = prune(monkeypatch, scope="all")
    assert len(judged_blocks) < len(judged) <= 6  # candidates of the same widths are judged once
    for _, divergence in judged_blocks:  # the candidates of scope="blocks" are among those of scope="all"
        assert divergence in [pytest.approx(d, rel=1e-6) for _, d in judged]
    assert min(d for _, d in judged) == of(everything, judged) <= of(blocks, judged_blocks) * (1 + 1e-6)


def test_a_search_lowers_the_divergence_where_the_curves_mislead(monkeypatch: pytest.MonkeyPatch) -> None:
    mislead(monkeypatch, 8.0)
    result, judged = prune(monkeypatch, search=12)
    (_, start), *others = judged[
        9:
    ]  # two candidates, the start, six exchanges; then on twice the sample, from the start
    assert of(result, others) == min(d for _, d in others) < 0.9 * start


def test_a_wide_layer_is_not_judged_by_the_examples_it_was_refitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of 400 units fits 32 examples nearly exactly, which says nothing about others."""
    errors: list[float] = []
    measured = _prune.output_curves

    def noted(work: Work, curves: Curves, sample: _widths.Sample) -> Curves:
        found = [measured(work, curves, each) for each in (sample, _widths.Sample(sample.fitted, sample.fitted))]
        errors.extend(float(each.curves["0"].at(80)) for each in found)
        return found[0]

    monkeypatch.setattr(_prune, "output_curves", noted)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 30))
    ispasp.prune(net, [torch.randn(8, 300) for _ in range(8)], ispasp.Macs(0.5), method="l1", progress=False)
    on_others, on_the_same = errors
    assert on_others > 1.5 * on_the_same
