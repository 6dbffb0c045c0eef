"""Models that accelerate has offloaded are pruned as if they were not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn
from torch.testing import assert_close

import ispasp
from support.nets import ResNet, alive

BATCHES = [torch.randn(n, 3, 9, 9, generator=torch.Generator().manual_seed(n)) for n in (4, 3)]


def offloaded(how: str, folder: Path) -> nn.Module:
    model = alive(ResNet(small=True)).float()
    if how == "cpu":
        return cpu_offload(model, execution_device="cpu")
    if how == "disk":
        return disk_offload(model, folder, execution_device="cpu")
    places = {"conv1": "cpu", "bn1": "cpu", "relu": "cpu", "layer1": "cpu", "layer2": "disk", "fc": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


@cache
def plain() -> ispasp.Result:
    return ispasp.prune(alive(ResNet(small=True)).float(), BATCHES, progress=False)


@pytest.mark.parametrize(("how", "in_place"), [("cpu", True), ("disk", False), ("map", False), ("map", True)])
def test_offloaded_models(how: str, in_place: bool, tmp_path: Path) -> None:
    model = offloaded(how, tmp_path / "weights")
    verb: Any = ispasp.prune_ if in_place else ispasp.prune
    result = verb(model, BATCHES, progress=False)
    expected = plain()
    assert (result.model is model) == in_place
    assert result.plan.kept == expected.plan.kept
    with torch.no_grad():
        assert_close(result.model(BATCHES[0]), expected.model(BATCHES[0]), rtol=1e-4, atol=1e-5)
        if not in_place:
            assert_close(model(BATCHES[0]), alive(ResNet(small=True)).float()(BATCHES[0]), rtol=1e-4, atol=1e-5)
    where = {p.device.type for p in result.model.parameters()}
    assert where == ({"meta"} if how != "map" else {"cpu", "meta"})  # still offloaded


def test_a_failure_leaves_an_offloaded_model_offloaded() -> None:
    model = offloaded("cpu", Path())
    with torch.no_grad():
        before = model(BATCHES[0])
    bad = [BATCHES[0], BATCHES[1] * torch.nan]
    with pytest.raises(ispasp.errors.InputError, match="batch 1: .*NaN"):
        ispasp.prune_(model, bad, progress=False)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with torch.no_grad():
        assert torch.equal(model(BATCHES[0]), before)
