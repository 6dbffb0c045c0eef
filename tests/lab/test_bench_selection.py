"""The selection benchmark on a few examples: what it compares, not how fast."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from ispasp.errors import InputError
from ispasp_lab.benchmarks import selection

requires_vision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="the benchmark runs torchvision's ResNet34: pip install 'ispasp[vision]'",
)


@requires_vision
@pytest.mark.parametrize("block", [2, 15])
def test_same_sets_as_the_reference_on_a_real_block(block: int) -> None:
    rows = selection.run(examples=6, reference_examples=3, keeps=(0.2,), T=3, blocks=(block,), progress=False)
    assert [(row.block, row.keep, row.examples, row.reference_examples) for row in rows] == [(block, 0.2, 6, 3)]
    assert rows[0].same_sets
    assert rows[0].ratio == pytest.approx(rows[0].reference_s / rows[0].library_s)
    keys = {"block", "keep", "examples", "reference_s", "library_s", "ratio", "same_sets"}
    assert keys <= set(selection.as_json(rows)[0])
    assert "scaled linearly by 2" in " ".join(selection.as_table(rows).split())


@requires_vision
def test_the_reference_is_scaled_and_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(selection.time, "perf_counter", lambda: float(next(clock)))  # both take one second
    monkeypatch.setattr(selection.reference, "algorithm2", lambda *_, **__: [[0]] * 2)
    (row,) = selection.run(examples=6, reference_examples=2, keeps=(0.2,), T=2, blocks=(15,), progress=False)
    assert (row.reference_s, row.library_s, row.ratio) == (3.0, 1.0, 3.0)
    assert not row.same_sets
    assert "NO" in selection.as_table([row])


def test_more_reference_examples_than_examples_is_refused() -> None:
    with pytest.raises(InputError, match="reference_examples=9 of examples=4"):
        selection.run(examples=4, reference_examples=9)
