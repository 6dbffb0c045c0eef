"""What a survey says, and how it says no."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ispasp
from ispasp.graph.analyse import analyse
from ispasp.surgery.trial import structure_of
from ispasp.types.dimension import Attribute

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def test_dimensions_and_frozen_with_reason_and_node() -> None:
    survey = ispasp.survey(net(), X)
    (found,) = survey.dimensions
    assert (found.name, found.kind, found.units, found.channels) == ("0", "neuron", 8, 1)
    assert (found.producers, found.consumers) == (("0",), ("2",))
    assert found.parameters == 4 + 1 + 6  # a row, a bias, a column
    assert found.macs == 4 + 6
    assert {(row.name, row.reason, row.node) for row in survey.frozen} == {
        ("2", "layer_norm normalises over this axis", "layer_norm"),
        ("4", "reaches the model output", ""),
    }
    text = str(survey)
    assert "layer_norm normalises over this axis (layer_norm)" in text and "neuron" in text


def test_an_op_without_a_rule_freezes_and_is_named() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.b(torch.special.i0(self.a(x)))))

    survey = ispasp.survey(Unknown(), X)
    assert [d.name for d in survey.dimensions] == ["b"]
    assert any(row.name == "a" and row.reason == "no rule for aten.special_i0.default" for row in survey.frozen)


def test_nothing_to_prune_raises_and_says_why() -> None:
    with pytest.raises(ispasp.errors.NothingToPruneError, match="Linear: .*reaches the model output"):
        ispasp.survey(nn.Linear(4, 2), X)
    with pytest.raises(ispasp.errors.NothingToPruneError, match="aten.lstm"):
        ispasp.survey(nn.LSTM(4, 8), X[None])


def test_a_literal_size_in_the_forward_is_refused_with_the_error() -> None:
    class Literal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.b(self.a(x).view(-1, 8))))

    survey = ispasp.survey(Literal(), X)
    assert [d.name for d in survey.dimensions] == ["b"]
    (row,) = [row for row in survey.frozen if row.name == "a"]
    assert "fails with fewer units" in row.reason or "does not equal" in row.reason


def test_a_number_that_fits_without_failing_is_still_found() -> None:
    class Heads(nn.Module):
        """view(B, -1, heads, 4) runs with any number of heads, and mixes tokens if it is the wrong one."""

        def __init__(self) -> None:
            super().__init__()
            self.heads = 4
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (f(x).view(x.shape[0], -1, self.heads, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            return self.o(y.reshape(x.shape[0], x.shape[1], -1))

    torch.manual_seed(0)
    model, x = Heads().eval(), torch.randn(2, 6, 16)
    survey = ispasp.survey(model, x)
    assert [(d.kind, d.units, d.channels) for d in survey.dimensions] == [("head", 4, 4)]
    ispasp.apply_(model, survey.plan({"*": [0, 3]}), x)
    assert model.heads == 2


def test_plans_by_globs_numbers_and_units() -> None:
    survey = ispasp.survey(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)), X)
    assert survey.plan(0.5).kept == {"0": (0, 1, 2, 3), "1": (0, 1, 2)}
    assert survey.plan({"0": [5, 1], "*": 2}).kept == {"0": (1, 5), "1": (0, 1)}
    assert survey.plan({"1": 1.0}).kept == {}
    with pytest.raises(ispasp.errors.InputError, match="no hidden dimension fits 'fc'"):
        survey.plan({"fc": 0.5})
    with pytest.raises(ispasp.errors.InputError, match="hidden dimension '0' has 8 units; keep=9"):
        survey.plan({"0": 9})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "not JSON"),
        (lambda text: "[]", "not a plan"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "version 7"),
        (lambda text: text.replace('"kept": [0, 1, 2, 3]', '"kept": [3, 1]'), "ascending"),
        (lambda text: text.replace('"kept": [0, 1, 2, 3]', '"kept": [0, 99]'), r"0\.\.7"),
        (lambda text: text.replace('"shape": [8, 4]', '"shape": [9, 4]'), "does not fit its shape"),
        (lambda text: text.replace('"tensors"', '"sensors"'), "damaged"),
        (lambda text: text.replace('"units": 8', '"units": true'), "whole number"),
        (lambda text: text.replace('"units": 8', '"units": 9'), "with 8 units, its dimensions say 9"),
    ],
)
def test_damaged_plans_are_refused(change: Callable[[str], str], message: str) -> None:
    text = ispasp.survey(net(), X).plan(0.5).to_json()
    assert ispasp.Plan.from_json(text).to_json() == text
    damaged = change(text)
    assert damaged != text
    with pytest.raises(ispasp.errors.PlanError, match=message):
        ispasp.Plan.from_json(damaged)


def test_cost_is_what_torch_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(),
        nn.ConvTranspose2d(12, 6, 2, stride=2), nn.Flatten(), nn.Linear(96, 5)
    )  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    survey = ispasp.survey(model, x)
    plan = survey.plan(0.5)
    cost = survey.cost(plan)

    def recount() -> tuple[int, int]:
        with FlopCounterMode(display=False) as counter:
            model(x)
        return sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2 // 2

    assert (cost.dense_params, cost.dense_macs) == recount()
    ispasp.apply_(model, plan, x, checked_by=survey)
    assert (cost.params, cost.macs) == recount()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(8, 16, 2, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(x)[0][:, -1])
        return out


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_macs_of_ops_without_a_rule_are_counted(kind: type[nn.RNNBase], gates: int) -> None:
    cost = ispasp.survey(Recurrent(kind).eval(), torch.randn(3, 5, 8)).cost()
    inner = 5 * 2 * gates * 16 * ((8 + 16) + (32 + 16))  # steps, directions, rows, columns of both layers
    assert cost.dense_macs == inner + 32 * 12 + 12 * 4


def test_bad_options_are_refused() -> None:
    with pytest.raises(ispasp.errors.InputError, match="scope='everything'"):
        ispasp.survey(net(), X, scope="everything")
    with pytest.raises(ispasp.errors.InputError, match="kinds has"):
        ispasp.survey(net(), X, kinds=["layer"])
    with pytest.raises(ispasp.errors.NothingToPruneError, match="was not asked for"):
        ispasp.survey(net(), X, kinds=["head"])
    with pytest.raises(ispasp.errors.TraceError, match="cannot trace Sequential: .*Check that model"):
        ispasp.survey(net(), torch.randn(2, 5))


def test_only_one_module_touches_torch_export() -> None:
    sources = Path(ispasp.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if re.search(r"torch\.export\.\w|from torch.export", path.read_text())] == [
        "trace.py"
    ]


def test_a_number_that_counts_a_refused_dimension_too_is_still_corrected() -> None:
    model = net()
    both, gone = ((("0", 8),), (("b", 8),)), ((("b", 8),),)
    found = [Attribute("mix", "splits[1]", both), Attribute("mix", "splits[0]", gone)]
    corrected = structure_of(model, analyse(model, X), found)
    assert corrected.attributes == (Attribute("mix", "splits[1]", ((("0", 8),), ((None, 8),))),)


_PLAIN = """
from torch import nn
class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).relu()
Ne = type("Ne", (Net,), {})
"""
_BRANCHING = """
class Other(nn.Sequential):
    def forward(self, x):
        return super().forward(x if self.training else x.relu())
"""


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (_PLAIN, "Net", False),
        (_PLAIN, "Ne", True),  # its source is unknown
        (_PLAIN + _BRANCHING, "Net", False),
        (_PLAIN + _BRANCHING, "Other", True),
    ],
)
def test_only_a_class_that_asks_for_its_mode_may_differ_in_training(
    text: str, name: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "its_file.py"
    file.write_text(text)
    module = ModuleType("its_file")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "its_file", module)
    exec(compile(text, file, "exec"), vars(module))  # noqa: S102
    cls = getattr(module, name)
    assert analyse(cls(nn.Linear(4, 8), nn.Linear(8, 2)), X).by_mode is expected


class Slices(nn.Module):
    """Reads the units of a layer one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        return self.c(self.b(torch.cat([h[:, i : i + 1] * (i + 1) for i in range(h.shape[1])], 1)))


class Unregistered(nn.Module):
    """Holds layers in a plain list, some of which are registered elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 16), nn.Linear(16, 4)]
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.known, self.plain = [self.up, self.down], [nn.ReLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.layers[1](torch.relu(self.layers[0](x)))))


def test_layers_that_cannot_shrink_are_named() -> None:
    rows = [(row.name, row.reason) for row in ispasp.survey(Slices(), torch.randn(6, 8)).frozen]
    assert ("a", "the forward reads its units one by one") in rows
    found = ispasp.survey(nn.Sequential(Unregistered(), nn.Linear(4, 2)), torch.randn(6, 8))
    held = [row.name for row in found.frozen if "layers that are not registered" in row.reason]
    assert held == ["0.layers"]
