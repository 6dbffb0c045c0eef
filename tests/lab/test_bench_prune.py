"""The pruning benchmarks on tiny images: what they measure and compare, not how fast."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ispasp.errors import InputError
from ispasp.types.dimension import units_to_keep
from ispasp_lab.benchmarks import job, paper, prune, timing

requires_vision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="the benchmark runs torchvision's ResNet34: pip install 'ispasp[vision]'",
)


@pytest.fixture(autouse=True)
def without_data(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("ISPASP_DATA", str(tmp_path))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    ticks = (float(n) for n in itertools.count())
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))  # every job takes one second
    return ticks


def test_jobs_run_in_turn_and_the_median_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.0, 6.0, 6.0, 9.0, 9.0, 10.0, 10.0, 12.0, 12.0, 14.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
    order: list[str] = []

    def job(name: str) -> int:
        order.append(name)
        return len(order)

    found = timing.interleaved({name: partial(job, name) for name in "ab"}, 3)
    assert order == ["a", "b"] * 3
    assert found["a"] == timing.Timing((1.0, 3.0, 2.0), 5)
    assert found["b"] == timing.Timing((5.0, 1.0, 2.0), 6)
    assert (found["a"].median, found["b"].median) == (2.0, 2.0)
    with pytest.raises(InputError, match="repeats=0: pass 1 or more"):
        timing.interleaved({}, 0)


@pytest.mark.long
@requires_vision
def test_prune_has_a_row_for_the_whole_and_for_every_part() -> None:
    rows = prune.run(images=2, batch=1, repeats=1, T=2, size=32, progress=False)
    found = {row.what: row for row in rows}
    assert list(found)[:3] == [prune.FORWARD, prune.PRUNE, prune.DENSE]
    assert found[prune.FORWARD].ratio == 1.0
    unit = found[prune.FORWARD].seconds
    assert all(row.ratio == pytest.approx(row.seconds / unit) for row in rows)
    parts = sum(found[what].seconds for what in (prune.SURVEY, prune.SURGERY, prune.REST))
    assert parts == pytest.approx(found[prune.PRUNE].seconds)
    assert json.loads(json.dumps(prune.as_json(rows)))[0].keys() == {"what", "seconds", "ratio", "runs"}
    table = " ".join(prune.as_table(rows, 2, 1, 2).split())
    assert all(what in table for what in found)
    assert "random weights, recipe resnet34-2.69G, 2 images in batches of 1" in table


@pytest.mark.long
@requires_vision
def test_the_job_is_the_papers_recipe_and_found_weights_are_taken(tmp_path) -> None:  # type: ignore[no-untyped-def]
    other = job.network(seed=7)
    torch.save(other.state_dict(), tmp_path / "resnet34.pth")
    assert job.weights() == "the weights of resnet34.pth"
    model = job.network(seed=0)
    assert not model.training
    assert torch.equal(model.layer4[2].conv2.weight, other.layer4[2].conv2.weight)
    before = model.layer1[1].conv1.weight.clone()
    result = job.prune(model, job.images(2, 2, 32), 2)
    assert result.settings["order"] == "sequential"
    assert {name: len(kept) for name, kept in result.plan.kept.items()} == {
        "layer1.1.conv1": 26,
        **dict.fromkeys(["layer2.1.conv1", "layer2.2.conv1"], 51),
        **dict.fromkeys([f"layer3.{b}.conv1" for b in (1, 2, 3, 4)], 102),
    }
    assert torch.equal(model.layer1[1].conv1.weight, before)


@pytest.mark.long
@requires_vision
def test_the_library_has_the_plan_of_the_papers_procedure() -> None:
    rows = paper.run(images=3, reference_images=2, batch=2, repeats=1, T=3, size=32, progress=False)
    assert [row.rerun for row in rows] == list(paper.RERUNS)
    assert all(row.same_plan and row.differing == () for row in rows)
    assert all(row.ratio == pytest.approx(row.reference_s / row.library_s) for row in rows)
    text = " ".join(paper.as_table(rows, 3).split())
    assert "timed on 2 images and scaled linearly by 1.5" in text
    assert "NO" not in text


@pytest.mark.long
@requires_vision
@pytest.mark.usefixtures("clock")
def test_the_reference_is_scaled_and_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(model: Any, batches: Any, counts: dict[str, int], *_: Any) -> dict[str, tuple[int, ...]]:
        assert sum(len(x) for x in batches) == 2
        return {name: tuple(range(s)) for name, s in counts.items()}

    def ours(model: Any, batches: Any, T: int) -> SimpleNamespace:
        pruned.append(sum(len(x) for x in batches))
        kept = {"layer1.1.conv1": tuple(range(1, 27)), "layer2.1.conv1": tuple(range(51))}
        return SimpleNamespace(plan=SimpleNamespace(kept=kept))

    pruned: list[int] = []
    monkeypatch.setattr(paper, "paper_plan", other)
    monkeypatch.setattr(job, "prune", ours)
    (row,) = paper.run(
        images=6, reference_images=2, batch=4, repeats=1, T=1, reruns=["per block"], size=32, progress=False
    )
    assert (row.reference_s, row.library_s, row.ratio) == (3.0, 1.0, 3.0)
    assert not row.same_plan
    assert pruned == [6, 2]  # timed on all images, compared on the reference's
    assert row.differing[0] == "layer1.1.conv1"
    assert "layer2.1.conv1" not in row.differing
    assert "NO: layer1.1.conv1" in paper.as_table([row])


@requires_vision
def test_later_blocks_see_the_masks_of_earlier_ones() -> None:
    model, batches = job.network(), job.images(2, 2, 32)
    counts = {f"layer{g}.1.conv1": units_to_keep(0.1, 32 * 2**g) for g in (1, 3)}
    both = paper.paper_plan(model, batches, counts, 2, "per block")
    alone = paper.paper_plan(model, batches, {"layer3.1.conv1": counts["layer3.1.conv1"]}, 2, "per block")
    assert {name: len(kept) for name, kept in both.items()} == counts
    assert both["layer3.1.conv1"] != alone["layer3.1.conv1"]
    assert both == paper.paper_plan(model, batches, counts, 2, "per iteration")
    assert all(not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: paper.run(images=4, reference_images=9), "reference_images=9 of images=4"),
        (lambda: paper.paper_plan(nn.Identity(), [], {}, 1, "never"), "rerun='never': choose from per block"),
        (lambda: job.images(0, 4), "0 images in batches of 4"),
    ],
)
def test_bad_input_is_refused(call, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=says):
        call()
