"""The page that predicts other budgets, in a real Chromium, with the mouse."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.report.html import html
from ispasp.types.plan import Plan
from support.browser import CHROMIUM, DRIVER, Browser, browser
from support.cli import command, refusal

needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium here: apt-get install chromium chromium-driver"
)
NASTY = "</script><script>document.title='hit'</script><!--<b>&\"'"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 24, 3, bias=False)
        self.norm, self.last = nn.BatchNorm2d(24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.second(self.first(x).relu())).relu()
        return self.last(h.mean((2, 3)))  # type: ignore[no-any-return]


def pruned(**options: Any) -> tuple[Net, Tensor, ispasp.Result]:
    torch.manual_seed(0)
    net, batch = Net().eval(), torch.rand(32, 3, 10, 10)
    return net, batch, ispasp.prune(net, [batch], progress=False, **({"keep": ispasp.Macs(0.5)} | options))


@pytest.fixture(scope="module")
def made() -> tuple[Net, Tensor, ispasp.Result]:
    return pruned()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, Path]]:
    folder = tmp_path_factory.mktemp("chrome")
    with browser(folder) as tab:
        yield tab, folder


def exact(tab: Browser, name: str) -> float:
    return float(tab.run("return document.querySelector(arguments[0]).title", f"#play .{name}"))


def downloaded(tab: Browser, folder: Path) -> Path:
    before = set(folder.glob("*.json"))
    tab.click("#play .download")
    for _ in range(200):
        if found := set(folder.glob("*.json")) - before:
            return found.pop()
        time.sleep(0.05)
    raise AssertionError("nothing was downloaded")


def test_the_script_is_the_only_one_that_may_run(made: tuple[Net, Tensor, ispasp.Result]) -> None:
    _, _, result = made
    text = html(json.loads(result.to_json()), result.curves, result.tradeoffs)
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in text
    assert not re.search(r"url\(|@import|https?://|//", script)
    (held,) = re.findall(r'<script type="application/json" id="tradeoffs">(.*?)</script>', text)
    assert json.loads(held) == json.loads(json.dumps(result.tradeoffs))


def test_costs_of_the_page_are_those_of_the_result(made: tuple[Net, Tensor, ispasp.Result]) -> None:
    """The terms of every measure, at the widths of the pruned network."""
    _, _, result = made
    widths = [d["pruned"] for d in result.tradeoffs["dimensions"]]

    def length(parts: Any) -> int:
        return sum(torch.tensor([size, *(widths[i] for i in which)]).prod().item() for size, *which in parts)

    def cost(name: str) -> float:
        m = result.tradeoffs["measures"][name]
        terms = sum(f * torch.tensor([length(parts) for parts, _ in axes]).prod().item() for f, axes in m["terms"])
        return float((m["fixed"] + terms) // m.get("per", 1))

    assert (cost("macs"), cost("params")) == (result.cost.macs, result.cost.params)


def test_without_curves_there_is_no_slider_and_no_script() -> None:
    _, _, result = pruned(keep=0.5)
    assert result.tradeoffs == {}
    text = html(json.loads(result.to_json()), result.curves, result.tradeoffs)
    assert "<script" not in text and 'id="play"' not in text


@needs_chromium
def test_dragging_the_budget_moves_widths_errors_and_costs(
    made: tuple[Net, Tensor, ispasp.Result], chrome: tuple[Browser, Path], tmp_path: Path
) -> None:
    net, batch, result = made
    tab, folder = chrome
    tab.open(result.report(tmp_path / "report.html"))
    macs, error, list_ = exact(tab, "macs"), tab.text("#play .error"), tab.text("#play .list")
    assert macs <= result.cost.macs * 1.01
    tab.drag("#play .budget", 0.5, 0.2)
    share = float(tab.run("return document.querySelector('.budget').value")) / 100
    smaller = exact(tab, "macs")
    assert smaller <= share * result.cost.dense_macs * 1.001 < macs
    assert (tab.text("#play .error"), tab.text("#play .list")) != (error, list_)
    plan = Plan.from_json(downloaded(tab, folder).read_bytes())
    counted = ispasp.survey(net, batch[:2]).cost(plan)
    assert counted.macs == smaller
    smallest = ispasp.apply_(copy.deepcopy(net), plan, batch[:2])
    assert sum(p.numel() for p in smallest.parameters()) == counted.params
    again = ispasp.prune(net, [batch], keep=plan, progress=False)  # refitted, and proved
    assert again.plan.kept == plan.kept and again.cost.macs == smaller
    tab.keys("#play .budget", "\ue014")  # the right arrow
    assert float(tab.run("return document.querySelector('.budget').value")) / 100 == pytest.approx(share + 0.001)
    tab.click("#play input[value=params]")
    assert "parameters" in tab.text("#play .chosen")
    assert exact(tab, "params") <= result.cost.params * 1.01
    assert tab.complaints() == []


@needs_chromium
def test_the_scale_takes_in_the_error_of_any_budget(
    made: tuple[Net, Tensor, ispasp.Result], chrome: tuple[Browser, Path], tmp_path: Path
) -> None:
    """Errors of this network are tiny beside those of narrow ones, and are told with two digits."""
    _, _, result = made
    told = json.loads(json.dumps(result.tradeoffs))
    for dimension in told["dimensions"]:
        kept, (narrowest, *others) = dimension["curve"]
        dimension["curve"] = [kept, [narrowest, *(1e-6 * error for error in others)]]
    (tmp_path / "report.html").write_text(html(json.loads(result.to_json()), result.curves, told), encoding="utf-8")
    tab, _ = chrome
    tab.open(tmp_path / "report.html")
    top = "return document.querySelector('#play .tradeoff text').textContent"
    assert re.fullmatch(r"predicted error (0\.\d*[1-9]\d|<\u202f0\.01)\u202f%", tab.run(top))
    tab.drag("#play .budget", 0.5, 0.0)
    assert tab.run(top) == f"predicted error {tab.text('#play .error')}"
    assert tab.text("#play .error-under") == "over 100 times that of this network"
    assert tab.complaints() == []


@needs_chromium
def test_the_command_line_takes_the_plan_of_a_dragged_budget(
    chrome: tuple[Browser, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))\n"
    Path("nets.py").write_text(text, encoding="utf-8")
    call = ("prune", "nets.py:net", "--data", "random", "--input-size", "6", "--examples", "16")
    assert command(*call, "--macs", "0.8", "--out", "one").code == 0
    tab, folder = chrome
    tab.open(tmp_path / "one" / "report.html")
    tab.drag("#play .budget", 0.8, 0.3)
    plan = downloaded(tab, folder)
    done = command(*call, "--plan", plan, "--out", "two")
    assert done.code == 0, done
    wanted, found = (json.loads(p.read_text(encoding="utf-8")) for p in (plan, Path("two/plan.json")))
    assert wanted["dimensions"] == found["dimensions"]
    assert json.loads(Path("two/result.json").read_text(encoding="utf-8"))["cost"]["macs"] == exact(tab, "macs")


@needs_chromium
def test_bars_say_why_layers_stay(
    made: tuple[Net, Tensor, ispasp.Result], chrome: tuple[Browser, Path], tmp_path: Path
) -> None:
    tab, _ = chrome
    tab.open(made[2].report(tmp_path / "report.html"))
    tab.point("#play .sketch", 0.9)
    assert tab.text("#play .info") == "last: all 10 channels stay, reaches the model output"
    tab.keys("#play .sketch", "\ue012")  # the left arrow
    assert tab.text("#play .info").startswith("second: ")
    assert "of 24 channels" in tab.text("#play .info")


@needs_chromium
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_and_hostile_names_stay_text(
    made: tuple[Net, Tensor, ispasp.Result], chrome: tuple[Browser, Path], tmp_path: Path, width: int
) -> None:
    _, _, result = made
    told = json.loads(json.dumps(result.tradeoffs))
    told["dimensions"][0]["name"] = told["layers"][0]["name"] = NASTY
    told["plan"]["dimensions"] = {NASTY if k == "first" else k: v for k, v in told["plan"]["dimensions"].items()}
    (tmp_path / "report.html").write_text(html(json.loads(result.to_json()), result.curves, told), encoding="utf-8")
    tab, folder = chrome
    tab.open(tmp_path / "report.html", width)
    assert tab.run("return document.documentElement.scrollWidth <= innerWidth")
    assert tab.text("#play .list .name") == NASTY
    tab.point("#play .sketch", 0.1)
    assert tab.text("#play .info").startswith(NASTY)
    assert NASTY in json.loads(downloaded(tab, folder).read_text(encoding="utf-8"))["dimensions"]
    assert tab.run("return document.title") != "hit"
    assert tab.complaints() == []


def no_noise(model: Any, batch: Any) -> float:
    """A runtime that takes a time by parameters."""
    return 1e-6 * sum(p.numel() for p in model.parameters())


@needs_chromium
def test_latency_has_a_slider_where_it_was_measured(chrome: tuple[Browser, Path], tmp_path: Path) -> None:
    _, _, result = pruned(keep=ispasp.Latency(0.6, runtime=no_noise))
    tab, folder = chrome
    tab.open(result.report(tmp_path / "report.html"))
    assert "time of a call" in tab.text("#play .chosen")
    before = exact(tab, "latency")
    tab.drag("#play .budget", 0.6, 0.95)
    assert exact(tab, "latency") > before
    assert Plan.from_json(downloaded(tab, folder).read_bytes()).kept
    assert tab.complaints() == []


def test_prune_takes_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))\n"
    Path("nets.py").write_text(text, encoding="utf-8")
    call = ("prune", "nets.py:net", "--data", "random", "--input-size", "6", "--examples", "16")
    assert command(*call, "--macs", "0.5", "--out", "one").code == 0
    done = command(*call, "--plan", "one/plan.json", "--out", "two")
    assert done.code == 0, done
    first, second = (json.loads(Path(f"{name}/plan.json").read_text(encoding="utf-8")) for name in ("one", "two"))
    assert first["dimensions"] == second["dimensions"]
    assert "no such file" in refusal(*call, "--plan", "nowhere.json", "--out", "three")
    Path("damaged.json").write_text("{}", encoding="utf-8")
    assert "this is not a plan" in refusal(*call, "--plan", "damaged.json", "--out", "three")
    assert "pass one of" in refusal(*call, "--plan", "one/plan.json", "--macs", "0.5", "--out", "three")
