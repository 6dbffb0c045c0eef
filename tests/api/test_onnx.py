"""Export to ONNX: what onnxruntime computes is compared with torch before a file is left behind."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
import ispasp._onnx as module
from ispasp._onnx import export_onnx
from ispasp.errors import ExportError, InputError, MissingExtraError
from ispasp.surgery.verify import output_of

NEEDED = "needs pip install 'ispasp[onnx]'"


@pytest.fixture
def runtime() -> Any:
    pytest.importorskip("onnx", reason=NEEDED)
    pytest.importorskip("onnxscript", reason=NEEDED)
    return pytest.importorskip("onnxruntime", reason=NEEDED)


def pruned(model: nn.Module, batch: Any) -> nn.Module:
    return ispasp.apply_(model, ispasp.survey(model, batch).plan(0.5))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def run(runtime: Any, path: Path, batch: dict[str, Tensor]) -> list[Tensor]:
    session = runtime.InferenceSession(str(path))
    return [torch.from_numpy(y) for y in session.run(None, {name: x.numpy() for name, x in batch.items()})]


def test_pruned_cnn(runtime: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(1, 3, 8, 8)
    model = pruned(cnn(), x).train()
    model[1].eval()
    statistics = model[1].running_mean.clone()
    error = export_onnx(model, x, tmp_path / "new" / "cnn.onnx")
    assert 0 <= error < 1e-5
    assert model.training, "the mode is restored"
    assert not model[1].training, "of every module"
    assert torch.equal(model[1].running_mean, statistics)
    assert capfd.readouterr() == ("", ""), "nothing is printed"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["cnn.onnx"]
    many = torch.randn(5, 3, 8, 8)
    (found,) = run(runtime, tmp_path / "new" / "cnn.onnx", {"input": many})
    torch.testing.assert_close(found, output_of(model, many)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_pruned_bert(runtime: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    from ispasp.integrations.torchvision import import_torchvision
    from ispasp_lab.zoo.tiny import ENCODER

    with contextlib.suppress(ImportError):
        import_torchvision()
    from transformers import BertConfig, BertForSequenceClassification

    ids = torch.arange(16).view(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    batch = {"attention_mask": mask, "input_ids": ids}  # not in the order of the forward
    model = pruned(BertForSequenceClassification(BertConfig(**ENCODER)).eval(), batch)
    assert export_onnx(model, batch, tmp_path / "bert.onnx") < 1e-4
    for rows, length in ((5, 8), (1, 3), (3, 11)):
        many = {name: torch.cat([x, x, x])[:rows].repeat(1, 2)[:, :length] for name, x in batch.items()}
        (found,) = run(runtime, tmp_path / "bert.onnx", many)
        torch.testing.assert_close(found, output_of(model, many)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_batch_axis_that_cannot_be_dynamic(runtime: Any, tmp_path: Path) -> None:
    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(2, 4))

    with pytest.raises(ExportError, match="may not take batches of any size: pass dynamic=False"):
        export_onnx(Fixed(4, 3), torch.ones(2, 4), tmp_path / "fixed.onnx")
    assert not list(tmp_path.iterdir())
    assert export_onnx(Fixed(4, 3), torch.ones(2, 4), tmp_path / "fixed.onnx", dynamic=False) < 1e-5
    assert runtime.InferenceSession(str(tmp_path / "fixed.onnx")).get_inputs()[0].shape == [2, 4]


def test_small_batches_are_compared_too(runtime: Any, tmp_path: Path) -> None:
    """Which way the forward goes is fixed when it is traced, with many rows."""

    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[0] > 3 else -super().forward(x)

    with pytest.raises(ExportError, match="onnxruntime differs from torch by .* or dynamic=False"):
        export_onnx(Branch(4, 2), torch.randn(8, 4), tmp_path / "x.onnx")
    assert not [*tmp_path.iterdir()]
    assert export_onnx(Branch(4, 2), torch.randn(8, 4), tmp_path / "x.onnx", dynamic=False) < 1e-5


@pytest.mark.long
def test_sequences_of_any_length(runtime: Any, tmp_path: Path) -> None:
    model, ids = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), torch.arange(10).view(2, 5) % 9
    shapes: dict[Any, list[Any]] = {True: ["batch", "sequence"], "batch": ["batch", 5], False: [2, 5]}
    for dynamic, shape in shapes.items():
        assert export_onnx(model, ids, tmp_path / "model.onnx", dynamic=dynamic) < 1e-5
        assert runtime.InferenceSession(str(tmp_path / "model.onnx")).get_inputs()[0].shape == shape


@pytest.mark.long
def test_table_of_fixed_columns(runtime: Any, tmp_path: Path) -> None:
    model, ids = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)), torch.arange(10).view(2, 5) % 9
    with pytest.raises(ExportError, match='may not take texts of any length: pass dynamic="batch"'):
        export_onnx(model, ids, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    assert export_onnx(model, ids, tmp_path / "model.onnx", dynamic="batch") < 1e-5


def test_mismatch_leaves_no_file(runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._run
    monkeypatch.setattr(module, "_run", lambda *args: [1.01 * y for y in real(*args)])
    path = tmp_path / "model.onnx"
    with pytest.raises(ExportError, match=r"differs from torch by 1.0e-02, more than tolerance=1.0e-04"):
        export_onnx(nn.Linear(4, 2), torch.ones(3, 4), path)
    assert not list(tmp_path.iterdir())
    assert export_onnx(nn.Linear(4, 2), torch.ones(3, 4), path, tolerance=0.1) == pytest.approx(0.01, rel=1e-3)
    assert path.exists()


def test_model_that_cannot_be_exported(runtime: Any, tmp_path: Path) -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) > 0 else x

    model = Branching(4, 2).train()
    with pytest.raises(ExportError, match="cannot export Branching"):
        export_onnx(model, torch.ones(3, 4), tmp_path / "model.onnx")
    assert model.training
    assert not list(tmp_path.iterdir())


def test_bad_input(runtime: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tolerance=-1"):
        export_onnx(nn.Linear(4, 2), torch.ones(3, 4), tmp_path / "model.onnx", tolerance=-1)
    with pytest.raises(InputError, match="dynamic=2: pass True"):
        export_onnx(nn.Linear(4, 2), torch.ones(3, 4), tmp_path / "model.onnx", dynamic=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"pass a torch\.nn\.Module"):
        export_onnx("model", torch.ones(3, 4), tmp_path / "model.onnx")  # type: ignore[arg-type]


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ispasp\[onnx\]'"):
        export_onnx(nn.Linear(4, 2), torch.ones(3, 4), tmp_path / "model.onnx")
