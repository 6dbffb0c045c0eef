"""The comparison of width searches: what it counts, resumes and writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ispasp
from ispasp.engine.graphs import TracedGraphs
from ispasp.engine.runner import Edits, Runner
from ispasp.errors import InputError
from ispasp.graph.trace import named_tensors
from ispasp_lab.benchmarks import search
from ispasp_lab.experiments.records import append_row, read_rows

ROW = search.Row("legr", 9, 0.5, 64, 100, 0, 0.499, 0.02, 90.0, 2e4, 7.0)


def test_passes_are_counted_by_what_runs() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(64, 4)
    advance = Runner.advance

    def passes(**options: int) -> float:
        with search.counted_passes() as counted:
            ispasp.prune(net, [x], ispasp.Macs(0.5), progress=False, **options)  # type: ignore[arg-type]
            return counted()

    few, many = passes(), passes(search=10)
    assert few >= 56  # the calibration examples at least once; an eighth is held out
    assert many > few + 10 * 32  # each candidate runs on the sample
    assert Runner.advance is advance


def test_a_whole_run_counts_its_examples_once() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 4)
    found = ispasp.survey(net, x)
    graphs = TracedGraphs(net, found.analysis, x)
    with search.counted_passes() as counted:
        Runner(graphs.of(x), x, named_tensors(net), Edits()).output()
        assert counted() == pytest.approx(5.0)


def test_the_page_orders_by_divergence_within_a_budget(tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, search="amc", divergence=0.01), replace(ROW, macs=0.25, divergence=0.3)]
    for row in rows:
        append_row(tmp_path / "search.csv", row)
    assert read_rows(tmp_path / "search.csv", search.Row) == rows
    text = search.write(tmp_path, "ispasp bench search").read_text(encoding="utf-8")
    assert text.index("## 0.5 of the MACs") < text.index("| amc |") < text.index("| legr |") < text.index("## 0.25 of")
    assert "| legr | 9 | 0.499 | 0.0200 | 90.00 | 20,000 | 7 |" in text


def test_unknown_searches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"searches \['nas'\]: choose from uniform, allocation"):
        list(search.run(search.Settings(), tmp_path, [0.5], 4, ["nas"]))
