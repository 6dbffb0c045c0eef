"""The demo trains, prunes and fine-tunes for real."""

from __future__ import annotations

import torch

from ispasp.experiments import demo
from ispasp.select import selector


def test_rows_of_the_demo() -> None:
    rows = demo.run(keep=0.25, epochs=12, progress=False)
    assert [row.method for row in rows] == ["dense", "i-SpaSP", "Top-K", "random"]
    dense, *pruned = rows
    assert dense.accuracy > 90
    assert dense.macs == 64 * 256 + 256 * 128 + 128 * 10
    for row in pruned:
        assert row.macs == 64 * 64 + 64 * 32 + 32 * 10
        assert row.parameters == row.macs + 64 + 32 + 10
        assert row.finetuned > max(row.accuracy, 80)
    assert "i-SpaSP" in demo.as_table(rows, 0.25)


def test_removing_equals_masking() -> None:
    model, x = demo.network(seed=3), torch.rand(20, 64)
    small = demo.pruned(model, x, 0.3, selector("ispasp"))
    kept = [int((model[0].weight == row).all(1).nonzero()) for row in small[0].weight]
    mask = torch.zeros(256)
    mask[kept] = 1
    hidden = torch.relu(model[2](torch.relu(model[0](x)) * mask))
    kept = [int((model[2].bias == value).nonzero()) for value in small[2].bias]
    mask = torch.zeros(128)
    mask[kept] = 1
    torch.testing.assert_close(small(x), model[4](hidden * mask), rtol=1e-4, atol=1e-5)
    assert model[0].out_features == 256  # the given model is untouched
