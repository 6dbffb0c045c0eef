"""Saved folders that were made to harm."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ispasp
from ispasp.cli.huggingface import image_preprocessing
from ispasp.cli.loaded import Preprocessing
from ispasp.cli.models import fill, is_saved
from ispasp.errors import InputError, IspaspError, SaveError
from support.files_fuzz import Attend, saved_files
from support.forge import forge_model, read
from support.refusing import ESCAPE, refused, sparse

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model with a tie: `twin.weight` is `first.weight`."""
    for name, data in saved_files(Attend)[1].items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def refused_load(folder: Path, match: str, kind: type[IspaspError] = SaveError) -> None:
    model = copy.deepcopy(saved_files(Attend)[0])
    refused(lambda: ispasp.load(folder, model), kind, match, model)


def pruned() -> tuple[nn.Module, ispasp.Plan]:
    dense, _, plan = saved_files(Attend)
    return ispasp.apply_(copy.deepcopy(dense), plan), plan


@pytest.mark.parametrize("path", [None, 3, b"folder", 1.5, ["a"], Path, True])
def test_folders_that_are_no_paths(path: Any) -> None:
    refused(lambda: ispasp.load(path, nn.Linear(2, 2)), InputError, "the folder is a ")
    refused(lambda: ispasp.save(pruned(), path), InputError, "the folder is a ")


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 3000, "null\0byte", "surrogate\ud800"])
def test_folders_that_cannot_be(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: ispasp.load(path, nn.Linear(2, 2)), SaveError, "ispasp.save wrote")
    refused(lambda: ispasp.save(pruned(), path), SaveError, "cannot save")
    assert not is_saved(Path(path))


def test_pipes_devices_and_loops(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    for path in (folder / "pipe", folder / "loop", Path("/dev/zero"), Path("/dev/null")):
        refused_load(path, "is not a folder")
        refused(lambda path=path: fill(nn.Linear(2, 2), path), InputError, "no weights at")
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(path)
        refused_load(folder, f"has no {WEIGHTS}")
        refused(lambda: ispasp.save(pruned(), folder), SaveError, "that ispasp did not write")
    refused(lambda: ispasp.save(pruned(), folder / "loop" / "x"), SaveError, "cannot save")


@pytest.mark.parametrize("name", ["plan.json", "config.json", "generation_config.json"])
def test_copies_that_are_pipes_or_huge_do_no_harm(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    expected = ispasp.load(folder, copy.deepcopy(saved_files(Attend)[0])).state_dict().keys()
    sparse(folder / name, 6 * 2**30)
    told = pytest.warns(UserWarning, match="is ignored") if name == "plan.json" else contextlib.nullcontext()
    with told:
        assert ispasp.load(folder, copy.deepcopy(saved_files(Attend)[0])).state_dict().keys() == expected


def test_huge_files_are_not_read(folder: Path) -> None:
    sparse(folder / WEIGHTS, 41 * 2**30, (40 * 2**30).to_bytes(8, "little"))
    refused_load(folder, "a header of 42,949,672,960 bytes")
    sparse(folder / WEIGHTS, 41 * 2**30, (90 * 10**6).to_bytes(8, "little"))
    refused_load(folder, "damaged")
    sparse(folder / WEIGHTS, 40 * 2**30, saved_files(Attend)[1][WEIGHTS])
    refused_load(folder, "damaged|more than the")
    head = b'{"a":{"dtype":"F32","shape":[2097152],"data_offsets":[0,8388608]}}      '
    sparse(folder / "w.safetensors", 2**40, len(head).to_bytes(8, "little") + head)
    sparse(folder / "w.pt", 2**40, b"PK\x03\x04")
    for name in ("w.safetensors", "w.pt"):
        refused(lambda name=name: fill(nn.Linear(2, 2), folder / name), InputError, "damaged|cannot be read")
    for name in ("result.json", "preprocessor_config.json"):
        sparse(folder / name, 6 * 2**30)
    assert image_preprocessing(str(folder)) == Preprocessing()


TIED = '"ties": {"twin.weight": "first.weight"}'
ABOUT: dict[str, tuple[str, str]] = {
    "not JSON": ("{", "not JSON"),
    "a list": ("[1]", "metadata of"),
    "null": ("null", "metadata of"),
    "empty": ("", "not JSON"),
    "nested deeply": ("[" * 10**6, "nested too deeply"),
    "nested deeply inside": ('{"ties": ' + "[" * 10**5 + "]" * 10**5 + ', "unsaved": {}}', "nested too deeply"),
    "ties are a list": ('{"ties": [], "unsaved": {}}', "metadata of"),
    "tie to a number": ('{"ties": {"twin.weight": 3}, "unsaved": {}}', "metadata of"),
    "tie to nothing": ('{"ties": {"twin.weight": "x"}, "unsaved": {}}', "is tied to 'x'"),
    "tie to itself": ('{"ties": {"twin.weight": "twin.weight"}, "unsaved": {}}', "is tied to 'twin.weight'"),
    "a cycle": ('{"ties": {"twin.weight": "a", "a": "twin.weight"}, "unsaved": {}}', "is tied to"),
    "tie to another shape": ('{"ties": {"twin.weight": "fc2.bias"}, "unsaved": {}}', "'twin.weight' has shape"),
    "tie of what is stored": ('{"ties": {"fc2.bias": "twin.bias"}, "unsaved": {}}', "is tied to"),
    "unknown dtype": (f'{{{TIED}, "unsaved": {{"x": "float31"}}}}', "the dtype 'float31'"),
    "not a dtype": (f'{{{TIED}, "unsaved": {{"x": "nn"}}}}', "the dtype 'nn'"),
    "dtype of another kind": (f'{{{TIED}, "unsaved": {{"fc2.bias": "int8"}}}}', "is torch.int8"),
    "another key": (f'{{{TIED}, "unsaved": {{}}, "x": 1}}', "metadata of"),
    "the same key twice": (f'{{{TIED}, {TIED}, "unsaved": {{}}}}', "stands twice"),
    "an escape": ('{"ties": {"\\u001b[2J": "x"}, "unsaved": {}}', "x1b"),
}


@pytest.mark.parametrize("name", ABOUT)
def test_forged_metadata(name: str, folder: Path) -> None:
    text, match = ABOUT[name]
    forge_model(folder / WEIGHTS, lambda _, told: told.update(about=text))
    refused_load(folder, match)


@pytest.mark.parametrize("key", ["plan", "about", "tensors_sha256", "texts_sha256", "version", "format"])
def test_metadata_that_lack_something(key: str, folder: Path) -> None:
    tensors, told = read(folder / WEIGHTS)
    del told[key]
    save_file(tensors, folder / WEIGHTS, told)
    refused_load(folder, "checksums differ|version None|format None")


def test_tensor_names_that_a_terminal_would_obey(folder: Path) -> None:
    def rename(tensors: dict[str, Tensor], _: object) -> None:
        tensors[f"fc2{ESCAPE}"] = tensors.pop("fc2.bias")

    forge_model(folder / WEIGHTS, rename)
    refused_load(folder, r"has unexpected fc2\\x1b\[2J")


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 10**9}, {"vocab_size": 10**9}, {"vocab_size": 2**25}, {"intermediate_size": 2**28},
     {"hidden_size": 2**20}, {"hidden_size": -8}, {"hidden_size": "x"}, {"num_hidden_layers": None}],
)  # fmt: skip
def test_configs_that_describe_something_huge(change: dict[str, Any], tmp_path: Path) -> None:
    for name, data in tiny_bert().items():
        (tmp_path / name).write_bytes(data)
    text = json.dumps({**json.loads((tmp_path / "config.json").read_bytes()), **change})
    (tmp_path / "config.json").write_text(text)
    forge_model(tmp_path / WEIGHTS, lambda _, told: told.update(config=text))
    refused(lambda: ispasp.load(tmp_path), IspaspError, "pass the dense model|as it was when saved")


@functools.cache
def tiny_bert() -> dict[str, bytes]:
    pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    with contextlib.suppress(ImportError):
        pytest.importorskip("ispasp.integrations.torchvision").import_torchvision()
    import transformers

    from ispasp_lab.zoo.tiny import ENCODER

    config = transformers.BertConfig(**{**ENCODER, "num_hidden_layers": 1})
    model = transformers.BertForSequenceClassification(config).eval()
    plan = ispasp.survey(model, {"input_ids": torch.ones(1, 4, dtype=torch.long)}).plan(0.5)
    with tempfile.TemporaryDirectory() as name:
        ispasp.save(ispasp.apply_(model, plan), name, plan=plan)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}
