"""Checkpoints, weights, arrays and names that were made to harm."""

from __future__ import annotations

import copy
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ispasp
from ispasp.cli.app import one_line
from ispasp.cli.data import load_data
from ispasp.cli.loaded import Loaded
from ispasp.cli.models import fill, load_saved
from ispasp.cli.options import Wanted
from ispasp.errors import InputError, IspaspError, SaveError
from ispasp.report import Column, render
from ispasp.report.html import html
from support.files_fuzz import Conv, checkpoint_bytes, forge_checkpoint, line, saved_files, seeded, trained
from support.forge import read
from support.refusing import ESCAPE, refused, sparse

FILE = "finetune.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The checkpoint of a run that has done two steps of four."""
    (tmp_path / FILE).write_bytes(checkpoint_bytes())
    return tmp_path


def refused_run(folder: Path, match: str, kind: type[IspaspError] = SaveError) -> None:
    model = seeded(line)
    refused(lambda: trained(model, folder, 2), kind, match, model)


@pytest.mark.parametrize("step", [-1, 1.5, "x", None, True, 10**12, 3, [2], float("nan"), 10**30])
def test_checkpoint_of_a_step_that_is_none(step: Any, run: Path) -> None:
    forge_checkpoint(run / FILE, lambda _, about: about.update(step=step))
    refused_run(run, "delete it to start over")


def test_checkpoint_of_a_step_beyond_the_run(run: Path) -> None:
    losses = torch.ones(50, dtype=torch.float64)
    forge_checkpoint(run / FILE, lambda tensors, about: (tensors.update(losses=losses), about.update(step=50)))
    refused_run(run, "is of step 50, the run has 4")


def test_flipped_bits_of_a_checkpoint_are_seen(run: Path) -> None:
    whole = checkpoint_bytes()
    for place in range(8 + int.from_bytes(whole[:8], "little"), len(whole), 37):
        data = bytearray(whole)
        data[place] ^= 4
        (run / FILE).write_bytes(bytes(data))
        refused_run(run, "checksums differ.*start over")


def test_checkpoint_without_a_checksum_is_refused(run: Path) -> None:
    tensors, told = read(run / FILE)
    del told["sha256"]
    save_file(tensors, run / FILE, told)
    refused_run(run, "checksums differ")


def test_checkpoint_with_a_forged_optimizer_or_generator_leaves_the_model(run: Path) -> None:
    forge_checkpoint(run / FILE, lambda tensors, _: tensors.pop("optimizer/0/momentum_buffer") is None)
    trained(seeded(line), run, 2)  # a parameter without a memory is one that had no gradient
    for name in ("optimizer/0/x", "optimizer/-1/momentum_buffer", "optimizer/x", "optimizer/٣/momentum_buffer"):
        (run / FILE).write_bytes(checkpoint_bytes())
        forge_checkpoint(run / FILE, lambda tensors, _, name=name: tensors.update({name: torch.ones(4, 3)}))
        refused_run(run, "trained other parameters", InputError)
    (run / FILE).write_bytes(checkpoint_bytes())
    forge_checkpoint(run / FILE, lambda tensors, _: tensors.update({"loader/0": torch.ones(3, dtype=torch.uint8)}))
    refused_run(run, "has 1 generators", InputError)


def test_checkpoint_that_is_a_pipe_or_huge(run: Path) -> None:
    sparse(run / FILE, 2**40, checkpoint_bytes())
    refused_run(run, "delete it to start over")
    (run / FILE).unlink()
    os.mkfifo(run / FILE)
    refused_run(run, "is not a file")


# --- weights and data -------------------------------------------------------------------------------------------------


def test_state_dicts_that_contain_themselves(tmp_path: Path) -> None:
    path, model = tmp_path / "w.pt", nn.Linear(2, 2)
    for key in ("state_dict", "model", "model_state_dict"):
        state: dict[str, Any] = dict(model.state_dict())
        state[key] = state
        torch.save(state, path)
        refused(lambda: fill(model, path), InputError, "not a state dict", model)
    one: dict[str, Any] = {}
    one["model"] = {"state_dict": one}
    torch.save(one, path)
    refused(lambda: fill(model, path), InputError, "not a state dict", model)


@pytest.mark.parametrize(
    "state",
    [{7: torch.ones(2)}, {"weight": torch.ones(2, 2).to_sparse()}, {"weight": torch.empty(2, 2, device="meta")}],
)
def test_state_dicts_of_other_things(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "w.pt")
    refused(lambda: fill(nn.Linear(2, 2), tmp_path / "w.pt"), InputError, "is not a plain tensor")


def test_archives_that_unpack_to_gigabytes(tmp_path: Path) -> None:
    small, large = (2**20).to_bytes(4, "little"), (2**32 - 2**20).to_bytes(4, "little")
    for name, part in (("w.pt", "archive/data.pkl"), ("d.npz", "x.npy")):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for number in range(12):
                archive.writestr(f"{part}{number}", b"\0" * 2**20)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(small, large))
    refused(lambda: fill(nn.Linear(2, 2), tmp_path / "w.pt"), InputError, "far more than the model")
    refused(lambda: load_data(str(tmp_path / "d.npz"), Loaded(nn.Identity(), ""), Wanted()), InputError, "npz")


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for dtype in (torch.int8, torch.complex64, torch.bool):
        torch.save({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, tmp_path / "w.pt")
        refused(lambda: fill(model, tmp_path / "w.pt"), InputError, "not quantized", model)


def test_a_folder_cannot_name_options_that_read_other_files(tmp_path: Path) -> None:
    for name, data in saved_files(Conv)[1].items():
        (tmp_path / name).write_bytes(data)
    built: list[str] = []

    def build(spec: str) -> Loaded:
        built.append(spec)
        return Loaded(copy.deepcopy(saved_files(Conv)[0]), spec)

    for spec in ("torchvision:fcn_resnet50:weights_backbone=DEFAULT", "timm:a:checkpoint_path=x", "evil.py:make", 3):
        (tmp_path / "result.json").write_text(json.dumps({"model": spec}))
        refused(lambda: load_saved(tmp_path, "", build), InputError, "pass --model")
    assert not built
    (tmp_path / "result.json").write_text(json.dumps({"model": "torchvision:resnet18"}))
    load_saved(tmp_path, "", build)
    assert built == ["torchvision:resnet18"]


# --- what reaches the terminal ----------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(f"a{ESCAPE}", nn.Linear(8, 8))
        self.add_module("b\u202e\n", nn.Linear(8, 8))
        self.add_module("c\x07", nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).relu()
        return x


def test_names_that_a_terminal_would_obey_are_escaped_everywhere(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 16).view(2, 8)
    result = ispasp.prune(Named(), [x], 0.5, progress=False)
    told = {**json.loads(result.to_json()), "model": ESCAPE, "command": ESCAPE, "warnings": [ESCAPE]}
    for text in (str(ispasp.survey(Named(), x)), str(result), html(told)):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert "\\x1b[2J" in text
    loaded = ispasp.load(ispasp.save(result, tmp_path), Named())
    assert loaded.state_dict().keys() == result.model.state_dict().keys()


def test_tables_and_errors_are_escaped_and_bounded() -> None:
    table = render(ESCAPE, [Column("name", "x")], [{"name": f"{ESCAPE}\n\r"}], ESCAPE)
    assert "\x1b" not in table
    assert "\\x1b[2J\\n\\r" in table
    for error in (IspaspError(ESCAPE), ValueError(ESCAPE), FileNotFoundError(2, "none", ESCAPE)):
        assert "\x1b" not in one_line(error)
        assert "\\x1b[2J" in one_line(error)
    text = str(SaveError("a" * 10**6 + ": save it again"))
    assert len(text) < 5000
    assert text.endswith(": save it again")


def test_arrays_under_names_that_a_terminal_would_obey(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **{ESCAPE: np.float32(3)})
    refused(lambda: load_data(str(tmp_path / "d.npz"), Loaded(nn.Identity(), ""), Wanted()), InputError, "x1b")


def test_archives_with_members_that_are_no_arrays(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, x=np.zeros((4, 3), "float32"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y", b"0123")
    refused(lambda: load_data(str(path), Loaded(nn.Identity(), ""), Wanted()), InputError, "not an array")
