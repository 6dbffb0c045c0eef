"""`ispasp.compare`: a dense model beside its pruned version. Nothing here is timed: the runtime tells seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp._compare import Versus
from ispasp.errors import InputError, SaveError
from support.cli import command


class Blocks(nn.Module):
    """Two residual blocks and a head."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6)) for _ in "ab")
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def seconds(model: nn.Module, batch: Any) -> float:
    return 1e-6 * sum(p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    dense = Blocks()
    return dense, ispasp.prune(dense, [torch.randn(64, 6)], 0.5, progress=False).model


def compared(dense: nn.Module, pruned: nn.Module) -> Versus:
    batches = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).split(16)
    return ispasp.compare(dense, pruned, batches, runtime=seconds)


def test_all_that_is_compared(models: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    dense, pruned = models
    found = compared(dense, pruned)
    count = [sum(p.numel() for p in model.parameters()) for model in models]
    assert [found.cost.dense_params, found.cost.params] == count
    assert found.bytes == (4 * count[0], 4 * count[1])
    assert (found.cost.dense_macs, found.cost.macs) == (4 * 6 * 12 + 18, 4 * 6 * 6 + 18)
    assert found.latency.speedup == pytest.approx(count[0] / count[1])
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        p, q = dense(x).log_softmax(-1), pruned(x).log_softmax(-1)
        each = (p.exp() * (p - q)).sum(-1)
        assert found.agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert found.divergence == pytest.approx(float(each.mean()), rel=1e-4)
    assert list(found.worst) == each.argsort(descending=True)[:8].tolist()
    assert len(found.layers) == 2
    assert all(0 < error < 1 for error in found.layers.values())
    rows = found.rows()
    assert [row["what"] for row in rows] == ["total"] * 4 + ["layer"] * 2 + ["example"] * 8
    assert json.loads(found.to_json())["bytes"] == [4 * count[0], 4 * count[1]]
    assert "worst examples" in str(found)
    page = found.report(tmp_path / "compare.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert f"{100 * (found.agreement or 0):.1f}&#8239;%</span>" in page
    assert [f'"name">{n}<' in page for n in found.worst] == [True] * 8
    assert f">{max(found.worst.values()):.3g}<" in page
    assert "script-src 'none'" in page
    with pytest.raises(SaveError, match="cannot write the report"):
        found.report(tmp_path / "no" / "such" / "folder.html")


def test_a_model_is_like_itself(models: tuple[nn.Module, nn.Module]) -> None:
    found = compared(models[0], models[0])
    assert (found.agreement, found.divergence) == (1.0, 0.0)
    assert set(found.layers.values()) == {0.0}


def test_models_that_do_not_fit_are_one_sentence(models: tuple[nn.Module, nn.Module]) -> None:
    other = nn.Linear(6, 5)
    with pytest.raises(InputError, match=r"do not fit .* \[\(16, 3\)\], the pruned one \[\(16, 5\)\]; pass a"):
        compared(models[0], other)
    with pytest.raises(InputError, match="the pruned model does not run on a batch .*: pass batches that both"):
        compared(models[0], nn.Linear(7, 3))
    with pytest.raises(InputError, match="batch=0"):
        ispasp.compare(*models, torch.randn(4, 6), batch=0)


def test_outputs_without_features_say_so() -> None:
    found = compared(nn.Linear(6, 3), nn.Linear(6, 3))
    assert found.layers == {}
    assert "no feature of equal shape" in str(found)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ispasp._latency._WHOLE", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("from torch import nn\n\ndef tiny(): return nn.Linear(6, 3)\n")
    np.savez(tmp_path / "data.npz", x=np.ones((5, 6), "float32"))
    done = command("compare", "nets.py:tiny", "nets.py:tiny", "--data", "data.npz", "--out", "page.html")
    assert done.code == 0, done.err
    assert "100.0% of predictions" in done.out
    assert "wrote page.html" in done.out
    told = command("compare", "nets.py:tiny", "nets.py:tiny", "--data", "data.npz", "--json")
    assert json.loads(told.out)["divergence"] == 0
