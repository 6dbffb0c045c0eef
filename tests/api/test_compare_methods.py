"""`compare_methods`: the same as calls of `prune`, side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ispasp
from support.nets import alive, mlp

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mean(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(X).mean())


def test_rows_are_those_of_separate_calls() -> None:
    dense = alive(mlp(6, 12, 3))
    found = ispasp.compare_methods(dense, [X], ["l1", ispasp.select.TopK()], [0.25, 4], evaluate=mean, progress=False)
    first, *rows = found.rows()
    assert (first["method"], first["params"], first["mean"]) == ("dense", 123, pytest.approx(mean(dense)))
    assert [row["method"] for row in rows] == ["l1", "l1", "TopK()", "TopK()"]
    for row, (method, keep) in zip(rows, [(m, k) for m in ("l1", "topk") for k in (0.25, 4)], strict=True):
        alone = ispasp.prune(dense, [X], keep, method=method, progress=False)
        assert alone.agreement is not None
        assert (row["keep"], row["params"], row["macs"]) == (keep, alone.cost.params, alone.cost.macs)
        assert row["error"] == pytest.approx(alone.layers[0].relative_error)
        assert row["held_out_error"] == pytest.approx(alone.layers[0].held_out_error)
        assert (row["agreement"], row["difference"]) == (alone.agreement.rate, alone.agreement.difference)
        assert row["mean"] == pytest.approx(mean(alone.model))
        assert row["seconds"] > 0
        assert row["failure"] == ""
    assert len(found.plot().axes) == 2
    for text in (str(found), found._repr_html_()):
        assert "TopK()" in text
        assert "failed" not in text


def test_a_method_that_fails_is_a_row_and_the_dense_model_is_scored_once() -> None:
    scored: list[int] = []

    def score(model: nn.Module) -> float:
        scored.append(model[0].out_features)
        return 1.0

    found = ispasp.compare_methods(alive(mlp(6, 12, 3)), [X], ["slimming", "l1", "l2"], evaluate=score, progress=False)
    assert scored == [12, 6, 6]
    dense, failed, *others = found.rows()
    assert dense["score"] == 1.0
    assert failed["method"] == "slimming"
    assert "has no BatchNorm" in failed["failure"]
    assert failed["params"] is failed["score"] is None
    assert [row["failure"] for row in others] == ["", ""]
    assert "failed:\n  slimming, keep=0.5: InputError: hidden dimension" in str(found)


def test_what_is_wrong_with_the_call_is_an_error() -> None:
    dense = alive(mlp(6, 12, 3))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"methods": ["magic"]}, "magic"),
        ({"methods": "l1"}, "pass a list"),
        ({"methods": []}, "nothing to compare"),
        ({"methods": ["l1", "l2"], "keep": 2.5}, "2.5"),
    ]
    for options, said in wrong:
        with pytest.raises(ispasp.errors.InputError, match=said):
            ispasp.compare_methods(dense, [X], progress=False, **options)


def test_all_methods_get_the_same_batches_of_a_shuffling_loader() -> None:
    loader = DataLoader(list(X), batch_size=16, shuffle=True)
    found = ispasp.compare_methods(alive(mlp(6, 12, 3)), loader, ["topk", "topk"], progress=False)
    _, first, second = found.rows()
    assert (first["method"], second["method"]) == ("topk", "topk (2)")
    assert first["error"] == second["error"]
    assert first["difference"] == second["difference"]


def test_one_batch_labels_and_wrappers() -> None:
    dense, labels = alive(mlp(6, 12, 3)), torch.zeros(len(X), dtype=torch.long)
    wanted, *others = (
        ispasp.compare_methods(model, data, ["l1"], progress=False)
        for model, data in [(dense, [X]), (dense, X), (dense, (X, labels)), (nn.DataParallel(dense), [(X, labels)])]
    )
    for found in others:
        assert (found.model, found.rows()[1]["error"]) == (wanted.model, wanted.rows()[1]["error"])
    with pytest.raises(ispasp.errors.InputError, match="yields single examples: pass torch.utils.data.DataLoader"):
        ispasp.compare_methods(dense, TensorDataset(X), ["l1"], progress=False)
    with pytest.raises(ispasp.errors.InputError, match="batches is a int"):
        ispasp.compare_methods(dense, 3, ["l1"], progress=False)  # type: ignore[arg-type]
