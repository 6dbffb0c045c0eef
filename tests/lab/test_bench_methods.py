"""The benchmark of methods on tiny layers: what it compares, not how fast."""

from __future__ import annotations

import pytest

from ispasp.errors import InputError
from ispasp.select import TopK, selector
from ispasp_lab.benchmarks import methods

LAYERS = (
    methods.Layer("conv", units=6, channels=1, outputs=4, kernel=3, size=5, fan_in=9),
    methods.Layer("heads", units=4, channels=3, outputs=5, fan_in=7),
)


def test_every_method_stands_beside_ispasp_on_every_layer() -> None:
    rows = methods.run(repeats=1, layers=LAYERS, examples=100, progress=False)
    assert [(row.layer, row.method) for row in rows] == [
        (layer.name, name) for layer in LAYERS for name in methods.default_methods()
    ]
    unit = {row.layer: row.seconds for row in rows if row.method == "ispasp"}
    assert all(row.ratio == pytest.approx(row.seconds / unit[row.layer]) for row in rows)
    table = methods.as_table(rows, 0.4, 1)
    assert all(name in table for name in methods.default_methods())


def test_a_method_gets_only_what_it_asks_for() -> None:
    whole = methods.statistics(LAYERS[0], 100, 0)
    (reading,) = methods.wanted(TopK(), whole).readings
    assert [*reading.statistics] == ["magnitude"]
    assert methods.wanted(selector("l1"), whole).producers == whole.producers


def test_ispasp_is_always_there_and_unknown_names_are_refused() -> None:
    rows = methods.run(["l1"], repeats=1, layers=LAYERS[1:], examples=10, progress=False)
    assert [row.method for row in rows] == ["ispasp", "l1"]
    with pytest.raises(InputError, match=r"methods \['gfs'\]: choose from ispasp, coreset"):
        methods.run(["gfs"], layers=LAYERS, progress=False)
