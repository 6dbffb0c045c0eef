"""Plans that were made to harm."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

import ispasp
from ispasp.errors import PlanError
from support.files_fuzz import Attend, Conv, saved_files
from support.refusing import ESCAPE, refused

Data = dict[str, Any]
UNITS = [[["fc1", 8]]]  # the extent of an axis that holds the units of fc1


def text_of(change: Callable[[Data], object]) -> str:
    data = json.loads(saved_files(Conv)[2].to_json())
    change(data)
    return json.dumps(data)


def layout(name: str, shape: list[int], axes: Data) -> Callable[[Data], object]:
    return lambda data: data["tensors"].update({name: {"shape": shape, "axes": axes}})


TEXTS: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "a long number": (lambda t: t.replace('"version": 1', f'"version": {"7" * 5000}'), "number of 5,000 digits"),
    "not UTF-8": (lambda t: t.encode().replace(b"fc1", b"fc\xff"), "not UTF-8 at byte"),
    "version true": (lambda t: t.replace('"version": 1', '"version": true'), "plan version True"),
    "version 1.0": (lambda t: t.replace('"version": 1', '"version": 1.0'), "plan version 1.0"),
    "duplicate keys": (lambda t: t.replace('"version": 1', '"version": 1, "version": 1'), "'version' stands twice"),
    "nested deeply": (lambda t: "[" * 10**6, "nested too deeply"),
    "too long": (lambda t: t + " " * 2**26, "more than the 67,108,864"),
}
CHANGES: dict[str, tuple[Callable[[Data], object], str]] = {
    "unknown tensor": (layout("no.such", [8], {"0": UNITS}), "has no module 'no'"),
    "unknown module": (lambda d: d["attributes"].append(["no.such", "x", UNITS]), "does not fit"),
    "unknown attribute": (lambda d: d["attributes"].append(["fc1", "x[0]", UNITS]), "=None, the plan expects 8"),
    "attribute that is no name": (lambda d: d["attributes"].append(["fc1", "a b", UNITS]), "=None, the plan expects 8"),
    "bias without a layout": (lambda d: d["biases"].append("end"), "without its layout"),
    "bias of two axes": (layout("fc2.bias", [6, 1], {}), "without its layout"),
    "bias of terabytes": (layout("fc2.bias", [2**42], {}), "cannot hold a bias"),
    "a model without a name": (lambda d: d.update(model=None), "where a name is needed"),
    "counts beyond 64 bits": (lambda d: d["dimensions"].update(x={"units": 2**63, "kept": [0]}), "number >= 1"),
    "negative units": (lambda d: d["dimensions"]["fc1"].update(kept=[-1, 0]), "holds -1"),
    "units as text": (lambda d: d["dimensions"]["fc1"].update(kept="0"), "holds '0'"),
    "units as fractions": (lambda d: d["dimensions"]["fc1"].update(kept=[0.0]), "holds 0.0"),
    "huge products": (layout("deep.bias", [8], {"0": [[[None, 2**62], [None, 2**62], ["fc1", 8]]]}), "fit its shape"),
    "huge mask": (layout("deep.bias", [2**43], {"0": [[["fc1", 8], [None, 2**40]]]}), "the plan expects"),
    "many factors": (
        layout("deep.bias", [8], {"0": [[["fc1", 8], *[[None, 1]] * 10**5]]}),
        "multiplies 100001 factors",
    ),
    "an axis beyond": (layout("deep.bias", [8], {"7": UNITS}), "does not fit its shape"),
    "an axis below": (layout("deep.bias", [8], {"-1": UNITS}), "does not fit its shape"),
    "an axis by another name": (layout("deep.bias", [8], {"00": UNITS}), "does not fit its shape"),
    "an axis of many digits": (layout("deep.bias", [8], {"0" * 5000: UNITS}), "does not fit its shape"),
    "a fraction of an axis": (lambda d: d["weight_norms"].append(["a", "b", 1.5]), "holds 1.5"),
    "weight norm of no axis": (lambda d: d["weight_norms"].append(["fc1.weight", "norm.weight", 9]), "does not fit"),
    "an escape": (layout(ESCAPE, [8], {"0": UNITS}), r"'\\x1b\[2J'"),
    "an escape in a list": (lambda d: d["dimensions"].update({ESCAPE: {"units": 8, "kept": [9]}}), "x1b"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_texts(name: str) -> None:
    change, match = TEXTS[name]
    text = change(saved_files(Conv)[2].to_json())
    refused(lambda: ispasp.Plan.from_json(text), PlanError, match)


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_plans(name: str) -> None:
    change, match = CHANGES[name]
    model = copy.deepcopy(saved_files(Conv)[0])
    refused(lambda: ispasp.apply_(model, ispasp.Plan.from_json(text_of(change))), PlanError, match, model)


@pytest.mark.parametrize("text", [None, 3, ["{}"], bytearray(b"{}")])
def test_plans_that_are_no_text(text: Any) -> None:
    refused(lambda: ispasp.Plan.from_json(text), PlanError, "pass the text of a plan.json")


def test_huge_counts_that_nothing_uses_take_no_memory() -> None:
    text = text_of(lambda d: d["dimensions"].update(big={"units": 2**62, "kept": [0]}))
    model: Any = ispasp.apply_(copy.deepcopy(saved_files(Conv)[0]), ispasp.Plan.from_json(text))
    assert model.fc1.out_channels == 4


def test_plans_of_many_names_take_linear_time() -> None:
    def widen(data: Data) -> None:
        data["dimensions"].update({f"d{i}": {"units": 1, "kept": [0]} for i in range(20_000)})
        data["tensors"].update({f"t{i}": {"shape": [1], "axes": {"0": [[[None, 1]]]}} for i in range(20_000)})

    start = time.process_time()
    model: Any = ispasp.apply_(copy.deepcopy(saved_files(Conv)[0]), ispasp.Plan.from_json(text_of(widen)))
    assert model.fc1.out_channels == 4
    assert time.process_time() - start < 10


@pytest.mark.parametrize("gone", ["original0", "original1"])
def test_plans_that_cut_a_weight_norm_apart(gone: str) -> None:
    """torch multiplies g and v of any shapes, beyond their memory."""
    dense, _, plan = saved_files(Attend)
    data = json.loads(plan.to_json())
    del data["tensors"][f"fc1.parametrizations.weight.{gone}"]
    data["weight_norms"] = []
    model = copy.deepcopy(dense)
    refused(lambda: ispasp.apply_(model, ispasp.Plan.from_json(json.dumps(data))), PlanError, "weight norm", model)


def test_plans_that_empty_a_weight_norm() -> None:
    """torch ends the process where it computes the norm of no rows."""
    dense, _, plan = saved_files(Attend)
    data = json.loads(plan.to_json())
    data["dimensions"]["fc1"]["kept"] = []
    model = copy.deepcopy(dense)
    refused(lambda: ispasp.apply_(model, ispasp.Plan.from_json(json.dumps(data))), PlanError, "weight norm", model)
