"""The report: one page, well formed, self-contained, and true to what it is given."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import ispasp
from ispasp.report.html import html
from ispasp.report.svg import curve, dumbbell

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}
NASTY = "<b>&\"'</script><script>alert(1)</script>"


class Page(HTMLParser):
    """Reads a page; `open` must be empty at its end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def result(**changes: Any) -> dict[str, Any]:
    layer = {
        "name": "fc1",
        "kind": "neuron",
        "units": 8,
        "kept": 2,
        "iterations": 3,
        "relative_error": 0.125,
        "certificate": 2e-7,
        "uncompensated_error": 0.5,
        "notes": [],
    }
    told = {
        "settings": {"method": "ispasp", "keep": 0.25, "compensate": "dense", "order": "sequential", "round_to": None},
        "verified": 3e-7,
        "cost": {"params": 3000, "macs": 40_000, "dense_params": 12_000, "dense_macs": 80_000},
        "layers": [layer, {**layer, "name": "fc2", "kept": 8}],
        "frozen": [{"name": "head", "reason": "reaches the model output", "node": "addmm_2"}],
        "plan": {"model": "Net"},
    }
    return {**told, **changes}


def test_the_page_tells_what_it_was_given() -> None:
    curves = {"fc1": ((1, 4, 8), (0.9, 0.4, 0.0))}
    text = html({**result(), "command": "ispasp prune a.py:net --keep 0.25", "warnings": ["mind the gap"]}, curves)
    page = Page(text)
    assert page.open == []
    said = " ".join(" ".join(page.words).split())
    for wanted in ("Net, pruned", "3,000", "25.0", "12.5", "50.0", "3e-07", "2e-07", "fc1", "reaches the model output",
                   "addmm_2", "ispasp prune a.py:net --keep 0.25", "mind the gap", "compensated towards"):  # fmt: skip
        assert wanted in said, wanted
    assert "Error against kept units" in said
    assert "Error against kept units" not in html(result(), {})
    assert "gfs takes the task anew" in html({**result(), "no_curves": "gfs takes the task anew"}, {})


def test_quality_comes_first_and_the_certificate_last() -> None:
    told = result(
        scores={"before": {"accuracy": 0.95}, "after": {"accuracy": 0.8125}},
        agreement={"rate": 0.938, "difference": 0.41, "predictions": 32, "examples": 33, "held_out": True},
        advice=["take more examples"],
        whole=[{"name": "fc3", "kind": "neuron", "units": 77, "reason": "the budget leaves it whole"}],
        proof="20 output values compared",
        warnings=["mind the gap"],
    )
    said = " ".join(" ".join(Page(html(told, {"fc1": ((1, 8), (0.9, 0.0))})).words).split())
    order = ("mind the gap", "accuracy", "0.8125", "0.95 before pruning", "93.8", "33 held-out examples", "Parameters",
             "MACs", "take more examples", "Layers", "held out", "fc1", "all 77", "Error against",
             "the budget leaves it whole", "reaches the model output", "How it was made", "Removed equals masked",
             "3e-07", "20 output values compared", "2e-07")  # fmt: skip
    places = [said.find(part, said.find("Layers") if part in ("fc1", "held out") else 0) for part in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)


def test_errors_stand_on_an_axis_from_0_to_100_percent() -> None:
    """However small they are, and beside the drawing in numbers: no mouse is needed."""
    low = {**result()["layers"][0], "relative_error": 0.01, "uncompensated_error": 0.02, "held_out_error": 0.015}
    text = html(result(layers=[low]), {"fc1": ((1, 8), (0.02, 0.0))})
    for said in ("100&#8239;%", ">100%</text>", ">50%</text>", "1.00&#8239;%", "2.00&#8239;%", "1.50&#8239;%"):
        assert said in text, said
    left, right = (float(re.findall(r'cx="([\d.]+)"', dumbbell(None, value))[0]) for value in (0.0, 1.0))
    (at,) = (float(x) for x in re.findall(r'cx="([\d.]+)"', dumbbell(None, 0.25)))
    assert at == pytest.approx(left + 0.25 * (right - left), abs=0.1)
    assert "Point at" not in text
    assert ">2: " in text  # the chosen width and its error are written into the curve


def test_nothing_is_wider_than_a_phone() -> None:
    """Fixed widths fit into 390 px less margins; the table becomes a list, each value with its label."""
    text = html(result(), {"fc1": ((1, 4, 8), (0.9, 0.4, 0.0))})
    widths = [int(w) for w in re.findall(r'<svg width="(\d+)"|min-width: ?(\d+)px', text) for w in w if w]
    assert widths
    assert max(widths) <= 390 - 2 * 14 - 2 * 16
    assert all(int(w) <= 320 for w in re.findall(r"minmax\((\d+)px", text))
    assert "overflow-x" not in text
    assert text.count('data-label="held out"') == 2
    assert "@media (max-width: 640px)" in text


def test_the_page_needs_nothing_from_outside() -> None:
    text = html(result(), {"fc1": ((1, 8), (0.9, 0.0))})
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert "script-src 'none'" in text
    assert not any(name in ("src", "href", "srcset", "action") for _, attrs in page.tags for name in attrs)
    assert not re.search(r"url\(|@import|https?://|//", text)
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy
    assert "prefers-color-scheme: dark" in text


def test_drawings_are_well_formed() -> None:
    text = html(result(), {"fc1": ((1, 4, 8), (0.9, 0.4, 0.0)), "other": ((1,), (0.0,))})
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawings) > 6
    for drawing in drawings:
        ElementTree.fromstring(drawing)  # noqa: S314


@pytest.mark.parametrize("where", ["name", "kind", "notes", "reason", "node", "setting", "command", "model", "warning"])
def test_no_text_becomes_markup(where: str) -> None:
    told = result()
    layer, frozen = told["layers"][0], told["frozen"][0]
    if where in ("name", "kind"):
        layer[where] = NASTY
    elif where == "notes":
        layer["notes"] = [NASTY]
    elif where in ("reason", "node"):
        frozen[where] = NASTY
    elif where == "setting":
        told["settings"][NASTY] = NASTY
    else:
        told.update({"command": NASTY, "model": NASTY, "warnings": [NASTY]})
    text = html(told, {layer["name"]: ((1, 8), (0.5, 0.0))})
    page = Page(text)
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    assert NASTY in unescape(text)


def test_missing_and_broken_numbers_are_dashes() -> None:
    layer = {"name": "fc", "kind": "neuron", "units": 4, "kept": 1, "relative_error": None, "certificate": float("nan"),
             "uncompensated_error": float("inf")}  # fmt: skip
    text = html(result(layers=[layer], verified=float("nan")), {"fc": ((1, 2, 4), (float("nan"), 0.5, 0.0))})
    assert "nan" not in text.lower().replace("nance", "")
    assert Page(text).open == []
    assert "No layer lost a unit" in html(result(layers=[], frozen=[]))


def test_two_hundred_layers_with_long_names() -> None:
    names = [f"model.encoder.layers.{i}.feed_forward_network.dense" for i in range(200)]
    layers = [{**result()["layers"][0], "name": name, "notes": ["gains a bias"]} for name in names]
    text = html(result(layers=layers), dict.fromkeys(names, ((1, 8), (0.9, 0.0))))
    page = Page(text)
    assert page.open == []
    assert text.count("<h3>") == 200  # a curve for each, most of them folded away
    assert text.index("more layers <b>176</b>") < text.rindex("<h3>")
    assert text.count("gains a bias") == 1  # one note, and the names it is about
    assert "model.<wbr>encoder" in text  # a long name breaks at its points
    assert "&lt;&#8239;0.01" in html(result(layers=[{**layers[0], "relative_error": 2e-7}]))


def test_real_results_are_drawn() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 2))
    done = ispasp.prune(net, [torch.rand(32, 6)], keep=0.25, curves=True, progress=False)
    text = html(json.loads(done.to_json()), done.curves)
    assert Page(text).open == []
    assert text.count('class="here"') == 2  # the chosen width in each curve
    for layer in done.layers:
        assert f"{layer.kept} of {layer.units} units stay" in text
    assert text.index("held-out examples") < text.index("Removed equals masked")


@given(st.integers(1, 5000), st.data())
def test_bars_and_columns_are_filled_as_far_as_units_stay(units: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, units))
    layer = {**result()["layers"][0], "units": units, "kept": kept}
    page = html(result(layers=[layer]))
    row = page[page.index("<tbody>") :]
    assert float(re.findall(r'<i style="width:([\d.]+)%"', row)[0]) == pytest.approx(100 * kept / units, abs=0.1)
    ((whole, filled),) = columns(page)
    assert whole == 100
    assert filled == pytest.approx(100 * kept / units, abs=0.1)


def columns(page: str) -> list[tuple[float, float]]:
    """The height of every bar, and how far it is filled, in percent."""
    found = re.findall(r'<i style="height:([\d.]+)%" title="[^"]*"><b style="height:([\d.]+)%">', page)
    return [(float(high), float(filled)) for high, filled in found]


def test_bars_are_as_high_as_the_root_of_their_units() -> None:
    first = result()["layers"][0]
    layers = [{**first, "name": f"l{i}", "units": units, "kept": 24} for i, units in enumerate((384, 96, 24))]
    assert columns(html(result(layers=layers))) == [(100, 6.2), (50, 25), (25, 100)]


@given(st.lists(st.floats(0, 2), min_size=2, max_size=20), st.data())
def test_points_of_a_curve_stay_inside_its_frame(errors: list[float], data: st.DataObject) -> None:
    kept = sorted(data.draw(st.sets(st.integers(1, 999), min_size=len(errors), max_size=len(errors))))
    drawing = ElementTree.fromstring(curve(kept, errors, data.draw(st.sampled_from(kept))))  # noqa: S314
    _, _, wide, high = map(float, drawing.attrib["viewBox"].split())
    line = next(e for e in drawing.iter() if e.tag == "polyline").attrib["points"]
    points = [tuple(map(float, p.split(","))) for p in line.split()]
    assert len(points) == len(errors)
    assert all(0 <= x <= wide and 0 <= y <= high for x, y in points)
    dot = next(e for e in drawing.iter() if e.tag == "circle")
    assert (float(dot.attrib["cx"]), float(dot.attrib["cy"])) in points


def test_a_dumbbell_keeps_the_order_of_its_numbers() -> None:
    ring, dot = (float(x) for x in re.findall(r'cx="([\d.]+)"', dumbbell(0.4, 0.1)))
    assert dot < ring


def test_curves_show_the_roots_of_squared_errors() -> None:
    layers = [{**result()["layers"][0], "kept": 1}]
    assert ">1: 50%<" in html(result(layers=layers), {"fc1": ((1, 8), (0.25, -1e-12))})


def test_settings_are_written_as_people_read_them() -> None:
    told = result()
    told["settings"] |= {"versions": {"torch": "2.9", "python": "3.11"}, "skip": [], "kinds": ["head", "filter"],
                         "preprocessing": {"size": 224, "mean": [0.485, 0.456, 0.406]}, "weights": ""}  # fmt: skip
    said = " ".join(" ".join(Page(html(told)).words).split())
    assert "versions torch 2.9 python 3.11" in said
    assert "preprocessing size 224 mean 0.485, 0.456, 0.406" in said
    assert "skip none kinds head, filter" in said
    assert "weights none" in said
