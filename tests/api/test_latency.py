"""Latency as a budget, with runtimes that tell seconds: nothing here is timed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ispasp
from ispasp import Latency
from ispasp._latency import Cache, LatencyResult, _seconds, _waited
from ispasp.budget.latency import LatencyModel, fitted, interpolated
from ispasp.errors import InputError, MissingExtraError
from support.nets import mlp


def seconds(model: nn.Module, batch: Any, *, odd: float = 4.0, fixed: float = 1e-4) -> float:
    """A microsecond for each weight; matrices with an odd side are slower."""
    sizes = [p.shape for p in model.parameters() if p.ndim > 1]
    return fixed + sum(1e-6 * s.numel() * (odd if any(n % 2 for n in s) else 1.0) for s in sizes)


def net() -> nn.Module:
    torch.manual_seed(0)
    return mlp(16, 64, 48, 8)


def batches() -> list[torch.Tensor]:
    return [torch.randn(32, 16, generator=torch.Generator().manual_seed(k)) for k in range(2)]


def pruned(keep: Latency, **options: Any) -> ispasp.Result:
    return ispasp.prune(net(), batches(), keep, method="l1", compensate=None, progress=False, **options)


def test_the_target_is_met_with_widths_that_the_runtime_likes() -> None:
    result = pruned(Latency(0.5, runtime=seconds))
    found = result.latency
    assert found is not None
    assert [layer.kept % 2 for layer in result.layers] == [0, 0]
    assert found.dense == pytest.approx(1e3 * seconds(net(), None))
    assert found.pruned == pytest.approx(1e3 * seconds(result.model, None))
    assert 0.9 < found.pruned / (0.5 * found.dense) <= 1.0
    assert found.predicted == pytest.approx(found.pruned)
    assert not found.corrected
    assert not found.missed


@pytest.mark.parametrize("liked", [2, 8])
def test_odd_widths_that_only_whole_networks_punish(liked: int) -> None:
    """As a change of layout between ops does: no chain of one op shows it."""

    def runtime(model: nn.Module, batch: Any) -> float:
        alone = seconds(model, batch, odd=1.0)
        odd = any(n % liked for p in model.parameters() if p.ndim > 1 for n in p.shape)
        return alone * (3.0 if odd and not isinstance(model, torch.fx.GraphModule) else 1.0)

    torch.manual_seed(0)
    model = mlp(16, 256, 128, 8)
    keep = Latency(0.5, runtime=runtime)
    result = ispasp.prune(model, batches(), keep, method="l1", compensate=None, progress=False)
    assert {layer.kept % liked for layer in result.layers} == {0}
    assert result.latency is not None
    assert not result.latency.missed
    assert not result.latency.corrected


def test_waiting_for_a_processor_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by 5 s in a call, of which the thread has waited 3 s, and has run or slept 2 s."""
    clock, waited = iter([10.0, 15.0]), iter([1.0, 4.0])
    monkeypatch.setattr("ispasp._latency.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("ispasp._latency._waited", lambda: next(waited))
    assert _seconds(lambda: None, 1) == 2.0
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"17 2500000000 3\n")
    assert _waited() == 2.5
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"")
    assert _waited() == 0.0


def test_a_runtime_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda model, **_: compiled)
    with pytest.raises(InputError, match=r"does not run in runtime='compile' .*no compiler.*: try runtime='eager'"):
        pruned(Latency(0.5, runtime="compile"))


def test_a_function_that_fails_is_one_sentence() -> None:
    def runtime(model: nn.Module, batch: Any) -> float:
        raise RuntimeError("\x1b[31mno\x1b[0m engine")

    with pytest.raises(InputError, match=r"^the function runtime= fails \(RuntimeError: no engine\): it gets whole"):
        pruned(Latency(0.5, runtime=runtime))


def test_milliseconds_and_batch() -> None:
    seen = []

    def runtime(model: nn.Module, batch: Any) -> float:
        seen.append(len(batch) if isinstance(batch, torch.Tensor) else len(batch[0]))
        return seconds(model, batch)

    found = pruned(Latency(milliseconds=2, batch=4, runtime=runtime)).latency
    assert found is not None
    assert 1.8 < found.pruned <= 2.0
    assert set(seen) == {4}
    assert (found.target, found.examples, found.runtime) == (2, 4, "runtime")


def test_a_runtime_may_return_a_function_to_time() -> None:
    calls = []

    def runtime(model: nn.Module, batch: Any) -> Any:
        return lambda: calls.append(type(model).__name__)

    result = pruned(Latency(1.0, runtime=runtime, repeats=3))
    assert result.latency is not None
    assert {"Sequential", "GraphModule"} <= set(calls)


def whole_networks_differ(model: nn.Module, batch: Any) -> float:
    """The time of whole networks falls with the square of the widths that chains show."""
    alone = seconds(model, batch, odd=1.0, fixed=0.0)
    return alone if isinstance(model, torch.fx.GraphModule) else alone * alone * 1e3


def test_a_miss_is_corrected_once() -> None:
    result = pruned(Latency(0.5, runtime=whole_networks_differ))
    assert result.latency is not None
    assert result.latency.corrected
    assert not result.latency.missed, str(result.latency)


def test_a_miss_that_stays_is_told() -> None:
    def runtime(model: nn.Module, batch: Any) -> float:  # a cliff: narrow networks are much faster than chains say
        alone = seconds(model, batch, odd=1.0, fixed=0.0)
        return alone * (0.2 if not isinstance(model, torch.fx.GraphModule) and alone < 4e-3 else 1.0)

    result = pruned(Latency(0.6, runtime=runtime))
    assert result.latency is not None
    assert result.latency.missed
    told = next(text for text in result.advice if "target" in text)
    assert re.search(r"10 % below the target of .* ms, also after a second round: pass Latency", told)
    assert "advice" in str(result)


def test_a_target_that_turns_out_of_reach_is_told() -> None:
    def runtime(model: nn.Module, batch: Any) -> float:  # whole networks have a floor that half of the units hides
        alone = seconds(model, batch, odd=1.0, fixed=0.0)
        return alone if isinstance(model, torch.fx.GraphModule) else max(alone, 1e-3)

    result = pruned(Latency(0.05, runtime=runtime))
    told = next(text for text in result.advice if "target" in text)
    assert re.search(r"10 % above the target of .* also after a second round: it is out of reach; pass a larger", told)


def test_a_target_that_the_dense_model_meets_is_told() -> None:
    result = pruned(Latency(milliseconds=100, runtime=seconds))
    assert result.cost.params == result.cost.dense_params
    (text,) = [text for text in result.advice if "target" in text or "faster" in text]
    assert re.search(
        r"the dense model takes .* ms, within the target of 100 ms: nothing had to go; pass a shorter", text
    )


def test_a_network_that_does_not_get_faster_is_a_warning_with_the_reason() -> None:
    def runtime(model: nn.Module, batch: Any) -> float:
        return seconds(model, batch) if isinstance(model, torch.fx.GraphModule) else 1e-2

    with pytest.warns(UserWarning, match=r"not faster than the dense one \(1.00x\): its layers are bound by memory"):
        result = pruned(Latency(0.9, runtime=runtime))
    assert any("not faster" in text for text in result.advice)


def test_width_zero() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.end = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.two(self.one(x).relu())
            return self.end(x)

    keep = Latency(0.05, runtime=lambda model, batch: seconds(model, batch, fixed=0.0))
    result = ispasp.prune(Residual(), batches(), keep, least=0, progress=False)
    assert result.layers[0].kept == 0
    assert result.latency is not None
    assert result.latency.speedup > 20


def test_grouped_convolutions_and_attention_are_timed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.ReLU(), nn.Conv2d(32, 4, 1), nn.Flatten()
    )
    shapes = set()

    def runtime(model: nn.Module, batch: Any) -> float:
        shapes.update(tuple(p.shape) for p in model.parameters())
        return seconds(model, batch)

    data = [torch.randn(8, 3, 6, 6)]
    result = ispasp.prune(model, data, Latency(0.5, runtime=runtime), compensate=None, progress=False)
    assert {(16, 1, 3, 3), (4, 16, 1, 1)} <= shapes
    assert result.model(data[0]).shape == (8, 64)


def test_rows_json_printout_and_report(tmp_path: Path) -> None:
    result = pruned(Latency(0.5, runtime=seconds))
    told = json.loads(result.to_json())
    assert result.latency is not None
    assert told["latency"]["pruned"] == result.latency.pruned
    assert told["settings"]["keep"] == "Latency(0.5, batch=1, runtime=seconds)"
    assert "x faster; seconds, 1 example" in " ".join(str(result).split())
    page = result.report(tmp_path / "report.html").read_text("utf-8")
    timed = f"{result.latency.pruned:.3g}</span><small>±0%</small>"
    assert re.search(rf"Milliseconds of a call</div>.*?{timed}.*? of {result.latency.dense:.3g} ms ±0%, seconds<", page)
    plain = ispasp.prune(net(), batches(), 0.5, progress=False)
    assert plain.latency is None
    assert json.loads(plain.to_json())["latency"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "amount=None and milliseconds=None: pass a fraction .* or Latency\\(milliseconds=12\\)"),
        ({"amount": 0.5, "milliseconds": 3}, "pass a fraction"),
        ({"amount": 12}, "for 12 milliseconds pass Latency\\(milliseconds=12\\)"),
        ({"amount": 0.0}, "is not a time"),
        ({"amount": True}, "is not a time"),
        ({"amount": "half"}, "is not a time"),
        ({"milliseconds": float("nan")}, "is not a time"),
        ({"amount": 0.5, "batch": 0}, "batch=0: pass a whole number >= 1"),
        ({"amount": 0.5, "repeats": 1}, "repeats=1: pass a whole number >= 3"),
        ({"amount": 0.5, "runtime": "tensorrt"}, "choose eager, compile, onnx, or pass a function"),
    ],
)
def test_bad_limits_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Latency(**options)


def test_an_absent_runtime_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ispasp.budget.latency.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="runtime='onnx' needs onnx: pip install 'ispasp\\[onnx\\]'"):
        Latency(0.5, runtime="onnx")


def test_bad_runtimes_and_batches_are_refused() -> None:
    with pytest.raises(InputError, match="the runtime returned 'fast': return a function to time, or seconds"):
        pruned(Latency(0.5, runtime=lambda model, batch: "fast"))
    with pytest.raises(InputError, match=r"Latency\(batch=99\): the first batch has .* examples; pass larger batches"):
        pruned(Latency(0.5, batch=99, runtime=seconds))
    with pytest.raises(InputError, match="is out of reach: .* narrow as allowed a call is predicted to take"):
        pruned(Latency(milliseconds=1e-3, runtime=seconds))


def test_a_noisy_machine_is_told_with_the_remedy() -> None:
    noisy = LatencyResult(10.0, 5.0, 0.4, 0.1, 1, "eager", 2)
    (text,) = noisy.advice()
    assert "too noisy for exact times: the middle half of the runs spreads over 40%" in text
    assert "repeats=50, or use fewer threads" in text
    assert LatencyResult(10.0, 5.0, 0.1, 0.1, 1, "eager", 2).advice() == []


def test_between_measured_widths_time_never_falls() -> None:
    curve = interpolated({4: 5.0, 8: 4.0, 16: 8.0}, {}, 16)
    assert curve[4] == curve[8] == 4.0  # eight are faster than four: the table says so for all between
    assert (np.diff(curve) >= 0).all()
    term = (((((("a", 16),),), curve),),)
    liked = LatencyModel(term, 0.0, 1.0, 8.0).liked("a", 16)
    assert not {4, 5, 6, 7} & set(liked)
    assert 8 in liked


def test_two_whole_runs_fit_the_factor() -> None:
    terms = (((((("a", 4),),), np.arange(5.0)),),)
    model = fitted(terms, 10.0, 7.0, {"a": 2})
    assert (model.seconds({}), model.seconds({"a": 2}), model.fixed) == (10.0, 7.0, 4.0)
    assert fitted(terms, 10.0, 11.0, {"a": 2}).seconds({"a": 2}) == 5.0  # did not pay: all of it is the terms'


def cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a table with one time."""
    monkeypatch.setenv("ISPASP_CACHE", str(folder))
    cache = Cache("eager")
    assert cache.times == {}
    cache.times["an op"] = 0.5
    cache.write()
    (path,) = (folder / "latency").glob("*.json")
    return path


def test_the_table_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached(tmp_path, monkeypatch)
    assert Cache("eager").times == {"an op": 0.5}
    assert Cache("compile").times == {}
    assert Cache(seconds).times == {}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert Cache("eager").times == {}
    assert len(list(path.parent.iterdir())) == 1  # nothing is left behind


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 100_000, '{"times": {"an op": 1.0}}', '{"times": 3}', "\0" * 9],
)
def test_a_damaged_table_counts_as_absent(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached(tmp_path, monkeypatch)
    path.write_text(text)
    cache = Cache("eager")
    assert cache.times == {}
    cache.times["another"] = 1.0
    cache.write()
    assert Cache("eager").times == {"another": 1.0}


@pytest.mark.parametrize("value", ['"1"', "-1.0", "NaN", "Infinity", "0.0", "true", "[1.0]", "1e999"])
def test_times_that_are_none_are_left_out(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached(tmp_path, monkeypatch)
    path.write_text(path.read_text().replace("0.5", value))
    assert Cache("eager").times == {}


def test_a_table_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latency").write_text("a file")
    monkeypatch.setenv("ISPASP_CACHE", str(tmp_path))
    cache = Cache("eager")
    cache.times["an op"] = 0.5
    cache.write()
    assert (tmp_path / "latency").read_text() == "a file"


def test_the_table_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISPASP_CACHE", str(tmp_path))
    made: list[Any] = []

    def job(_: Any, model: nn.Module, batch: Any) -> float:
        made.append(model)
        return seconds(model, batch)

    monkeypatch.setattr("ispasp._latency.job", job)
    first = pruned(Latency(0.5))
    wide = [m for m in made if not isinstance(m, torch.fx.GraphModule) and m[0].out_features == 64]
    assert len(wide) == 1  # the dense network is exported or compiled once
    chains = sum(isinstance(model, torch.fx.GraphModule) for model in made)
    made.clear()
    second = pruned(Latency(0.5))
    assert chains > 10
    assert not any(isinstance(model, torch.fx.GraphModule) for model in made)
    assert second.plan.kept == first.plan.kept
