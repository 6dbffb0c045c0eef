"""What `prune` returns: a table to read, JSON to keep, and numbers that are true."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import fields, replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.report.html import html
from support.nets import ResNet, alive, mlp

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IMAGES = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def strict(text: str) -> Any:
    """JSON as the standard has it, without NaN and Infinity."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compensate": None, "order": "oneshot", "method": "topk"},
        {"keep": numpy.float32(0.5), "round_to": numpy.int64(2), "memory": numpy.int64(1000)},
        {"keep": {"0": [1, 2, 3], "*": 0.5}, "method": ispasp.select.ISpaSP(iterations=3)},
        {"keep": ispasp.Params(0.5), "ridge": numpy.float64(1e-3)},
        {"keep": ispasp.Macs(1000), "recalibrate": True},
        {"keep": 1.0},
    ],
)
def test_json_has_everything(options: dict[str, Any]) -> None:
    result = ispasp.prune(alive(mlp(6, 10, 8, 3)), [X], progress=False, **options)
    data = strict(result.to_json())
    assert (data["format"], data["version"]) == ("ispasp-result", 1)
    assert data["verified"] == result.verified
    assert set(data["cost"]) == {"params", "macs", "dense_params", "dense_macs"}
    assert data["cost"]["params"] == result.cost.params
    assert [set(layer) for layer in data["layers"]] == [{f.name for f in fields(ispasp.Layer)}] * len(result.layers)
    assert [layer["name"] for layer in data["layers"]] == [layer.name for layer in result.layers]
    assert data["frozen"][0]["name"] == "4"
    assert ispasp.Plan.from_json(json.dumps(data["plan"])).kept == result.plan.kept
    for name in ("method", "keep", "compensate", "order", "scope", "round_to", "recalibrate", "memory", "ridge"):
        assert name in data["settings"]
    assert (
        (result.curves == {})
        == (data["curves"] == {})
        == (not isinstance(options.get("keep"), ispasp.Params | ispasp.Macs))
    )


def test_json_where_an_error_cannot_be_told() -> None:
    """Consumers that give nothing at all have no relative error."""
    dense = alive(mlp(6, 10, 3))
    dense[2].weight.data.zero_()
    for options in ({"compensate": None}, {"compensate": "dense"}, {"compensate": "local", "order": "oneshot"}):
        result = ispasp.prune(dense, [X], progress=False, **options)
        assert result.layers[0].relative_error is None
        assert strict(result.to_json())["layers"][0]["relative_error"] is None
        assert " - " in str(result)


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    dense = alive(ResNet())
    text = str(ispasp.prune(dense, [IMAGES], method="ispasp", progress=False))
    order = [
        "ResNet, pruned: method ispasp, keep=0.5, sequential, compensate=dense",
        "  parameters  3,",
        "  MACs ",
        "  agreement ",
        "hidden dimension",
        "layer1.0.conv1",
        "frozen:",
        "fc: reaches the model output",
        "layer{1..2}.0.conv2 (2 alike): is a residual stream",
        "removed = masked:",
        "consumers compared with the masked network: relative difference",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "uncompensated" in text
    assert "proof" in text
    assert "iterations" not in text  # at half the units i-SpaSP is Top-K
    assert max(map(len, text.splitlines())) <= 120
    plain = str(ispasp.prune(dense, [IMAGES], 0.2, method="ispasp", compensate=None, progress=False))
    assert "uncompensated" not in plain
    assert "held out" not in plain


def test_iterations_are_shown_where_there_were_some() -> None:
    result = ispasp.prune(alive(mlp(6, 40, 3)), [X], 0.2, progress=False)
    layer = result.layers[0]
    for shown, count in ((True, 7), (False, 2), (False, layer.kept)):
        again = replace(result, layers=(replace(layer, iterations=count),))
        assert ("iterations" in str(again)) == shown, count


def test_notes_are_printed_under_the_layer_they_are_about() -> None:
    text = str(ispasp.prune(alive(mlp(6, 10, 3, bias=False)), [X], progress=False))
    assert "notes:\n  2: gained a bias" in text


def test_rows_are_plain_and_in_order_and_tell_what_stays_whole() -> None:
    result = ispasp.prune(alive(mlp(6, 10, 8, 7, 3)), [X], {"2": 0.5}, skip=["0"], progress=False)
    rows = result.rows()
    assert [(row["name"], row["units"], row["kept"]) for row in rows] == [("0", 10, 10), ("2", 8, 4), ("4", 7, 7)]
    assert [rows[0]["notes"], rows[2]["notes"]] == ["skip names it", "keep leaves it whole"]
    assert {type(v) for row in rows for v in row.values()} <= {str, int, float, type(None)}
    assert rows[1]["relative_error"] == result.layers[0].relative_error
    assert [(w.name, w.reason) for w in result.whole] == [("0", "skip names it"), ("4", "keep leaves it whole")]
    text = str(result)
    assert "│     7 │  all │     - │" in text
    assert "left whole:\n  0: skip names it" in text
    assert [row["name"] for row in strict(result.to_json())["whole"]] == ["0", "4"]


def test_what_a_budget_leaves_whole_is_said() -> None:
    dense = alive(mlp(6, 64, 4, 3))
    dense[4].weight.data *= 1000
    result = ispasp.prune(dense, [X], ispasp.Params(0.5), progress=False)
    whole = [d for d in result.plan.rows() if d["kept"] == d["units"]]
    assert [d["name"] for d in whole] == [w.name for w in result.whole] == ["2"]
    assert all(w.reason == "the budget leaves it whole" for w in result.whole)


def test_notebooks_reports_and_figures(tmp_path: Any) -> None:
    result = ispasp.prune(alive(mlp(6, 10, 8, 3)), [X], progress=False)
    for shown in (result, result.plan, ispasp.survey(alive(mlp(6, 10, 8, 3)), X)):
        text = shown._repr_html_()
        assert text.startswith("<div><b>")
        assert text.count("<tr>") >= 3  # a head and two hidden dimensions
    path = result.report(tmp_path / "report.html")
    assert path.read_text() == html(json.loads(result.to_json()), result.curves, result.tradeoffs)
    with pytest.raises(ispasp.errors.SaveError, match="cannot write the report"):
        result.report(tmp_path / "missing" / "report.html")
    assert len(result.plot().axes) == 2


def test_figures_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = ispasp.prune(alive(mlp(6, 10, 8, 3)), [X], progress=False)
    with pytest.raises(ispasp.errors.MissingExtraError, match=r"pip install 'ispasp\[plot\]'"):
        result.plot()


def test_layers_tell_what_happened() -> None:
    result = ispasp.prune(alive(mlp(6, 10, 8, 3)), [X], 0.3, method=ispasp.select.ISpaSP(iterations=7), progress=False)
    first, second = result.layers
    assert (first.name, first.kind, first.units, first.kept) == ("0", "neuron", 10, 3)
    assert (second.name, second.kind, second.units, second.kept) == ("2", "neuron", 8, 2)
    assert 1 <= first.iterations <= 7
    assert 0 < first.relative_error < first.uncompensated_error <= 1
    assert result.settings["method"] == str(ispasp.select.ISpaSP(iterations=7))


def first_error(model: nn.Module, result: ispasp.Result) -> float:
    """What the second layer loses without the units that were removed, computed from the modules."""
    with torch.no_grad():
        h = torch.relu(model[0](X))
        kept = torch.zeros(10, dtype=torch.float64)
        kept[list(result.plan.kept["0"])] = 1.0
        whole, less = h @ model[2].weight.T, (h * kept) @ model[2].weight.T
    return float((whole - less).norm() / whole.norm())


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
def test_errors_without_compensation_are_true(order: str) -> None:
    dense = alive(mlp(6, 10, 3))
    result = ispasp.prune(dense, [X], compensate=None, order=order, progress=False)
    assert result.layers[0].uncompensated_error is None
    assert result.layers[0].relative_error == pytest.approx(first_error(dense, result), rel=1e-9)
    local = ispasp.prune(dense, [X], compensate="local", order=order, progress=False)
    assert local.layers[0].uncompensated_error == pytest.approx(first_error(dense, local), rel=1e-9)


@pytest.mark.parametrize("compensate", [None, "dense"])
@pytest.mark.parametrize("scope", ["blocks", "all"])
def test_the_cost_is_that_of_the_model(compensate: str | None, scope: str) -> None:
    class Bare(nn.Module):
        """Layers without biases, which compensation gives them."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.head = (nn.Linear(*size, bias=False) for size in ((6, 12), (12, 8), (8, 3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.down(torch.relu(self.up(x)))))

    for dense, batch in ((alive(ResNet()), IMAGES), (alive(Bare()), X)):
        result = ispasp.prune(dense, [batch], compensate=compensate, scope=scope, progress=False)
        assert result.cost.params == sum(p.numel() for p in result.model.parameters())
        assert result.cost.dense_params == sum(p.numel() for p in dense.parameters())
        assert result.cost.macs < result.cost.dense_macs


def test_save_and_load(tmp_path: Any) -> None:
    result = ispasp.prune(alive(ResNet()), [IMAGES], progress=False)
    ispasp.save(result, tmp_path)
    fresh = ispasp.load(tmp_path, alive(ResNet(), seed=5))
    with torch.no_grad():
        assert torch.equal(fresh(IMAGES), result.model(IMAGES))
    plan = ispasp.Plan.from_json((tmp_path / "plan.json").read_text())
    bare = ispasp.prune(
        alive(ResNet()), [IMAGES], {n: list(k) for n, k in plan.kept.items()}, compensate=None, progress=False
    )
    assert bare.plan.kept == result.plan.kept


def test_settings_are_complete() -> None:
    net = alive(mlp(6, 10, 8, 3))
    settings = strict(ispasp.prune(net, [X], kinds="neuron", skip=[net[0], "0*"], progress=False).to_json())["settings"]
    told = {"kinds": ["neuron"], "skip": ["0", "0*"], "examples": 30, "scope": "blocks", "keep": 0.5}
    assert told.items() <= settings.items()
    versions = {"ispasp": ispasp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert settings["versions"] == versions
