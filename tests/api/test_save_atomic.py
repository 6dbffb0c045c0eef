"""A save that is killed at any moment leaves the old model or the new one, and nothing that stays for ever."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp._saved import opened_save
from ispasp._store import load, save
from ispasp.errors import SaveError
from ispasp.types.plan import Plan
from support.killing import killed


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, width), nn.Linear(width, 2)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu()) * self.scale


def pruned(kept: int) -> tuple[nn.Module, Plan]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(kept)
        model = Net()
    plan = ispasp.survey(model, torch.ones(1, 4)).plan(kept)
    return ispasp.apply_(model, plan), plan


@cache  # which no test changes
def bert(kept: int) -> tuple[nn.Module, Plan]:
    pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    with contextlib.suppress(ImportError):
        pytest.importorskip("ispasp.integrations.torchvision").import_torchvision()
    import transformers

    from ispasp_lab.zoo.tiny import ENCODER

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(kept)
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(**{**ENCODER, "num_hidden_layers": 1, "intermediate_size": 10 * kept})
        )
    plan = ispasp.survey(model.eval(), {"input_ids": torch.ones(1, 4, dtype=torch.long)}).plan(0.5)
    return ispasp.apply_(model, plan), plan


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def remains(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*"))


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


KINDS: dict[str, tuple[Callable[[int], tuple[nn.Module, Plan]], Callable[[Path], nn.Module]]] = {
    "plain": (pruned, lambda folder: load(folder, Net())),
    "hugging face": (bert, load),
}


@pytest.mark.filterwarnings("ignore:.*is not the one that:UserWarning")
@pytest.mark.parametrize("kind", ["plain", pytest.param("hugging face", marks=pytest.mark.long)])
def test_kill_at_every_step_leaves_the_old_save_or_the_new_one(kind: str, tmp_path: Path) -> None:
    make, loaded = KINDS[kind]
    old, new = make(2), make(5)
    seen = set()
    save(old, tmp_path / "old")
    for step in range(0, 1000, 1 if kind == "plain" else 4):  # building the model takes its time
        folder = Path(shutil.copytree(tmp_path / "old", tmp_path / str(step)))
        died = killed(lambda folder=folder: save(new, folder), folder, step)
        found = loaded(folder)
        seen.add("old" if same(found, old[0]) else "new" if same(found, new[0]) else "neither")
        with no_warnings():
            save(old, folder)
            assert same(loaded(folder), old[0])
        assert not remains(folder)
        if not died:
            break
    assert step > 10, "the save was killed at many steps"
    assert not died
    assert seen == {"old", "new"}


def test_kill_at_every_step_of_the_first_save(tmp_path: Path) -> None:
    new, another = pruned(5), pruned(2)
    for step in range(1000):
        folder = tmp_path / str(step) / "deep"
        died = killed(lambda folder=folder: save(new, folder), folder, step)
        try:
            assert same(load(folder, Net()), new[0])
        except SaveError as error:
            assert died
            assert "that ispasp.save" in str(error)
        save(another, folder)
        assert not remains(folder)
        if not died:
            break
    assert step > 10
    assert not died


@pytest.mark.long
def test_two_saves_are_the_same_bytes(tmp_path: Path) -> None:
    makers: tuple[Any, ...] = (pruned, bert.__wrapped__)  # which makes them anew
    for make in makers:
        models = make(4), make(4)
        names = [f"{make.__name__}{number}" for number in range(6 if make is pruned else 2)]
        folders = [save(models[number % 2], tmp_path / name) for number, name in enumerate(names)]
        files = {tuple((path.name, path.read_bytes()) for path in sorted(folder.iterdir())) for folder in folders}
        assert len(files) == 1
        assert len(next(iter(files))) == (2 if make is pruned else 5)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_all_files_have_the_mode_that_the_umask_leaves(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save(bert(4), tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~mask}


def test_remains_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    from ispasp.files import workspace

    (tmp_path / ".ispasp-dead").mkdir()
    (tmp_path / ".ispasp-dead" / "model.safetensors").write_bytes(b"x")
    with workspace(tmp_path) as living:
        assert remains(tmp_path) == [living.name]
        (tmp_path / ".ispasp-unknown").mkdir()
        (tmp_path / ".ispasp-old").mkdir()
        os.utime(tmp_path / ".ispasp-old", (time.time() - 10**6,) * 2)
        save(pruned(4), tmp_path)
        assert remains(tmp_path) == sorted([living.name, ".ispasp-unknown"])
    save(pruned(4), tmp_path)
    assert not remains(tmp_path)


# --- the copies beside the weights ------------------------------------------------------------------------------------


def test_copies_that_disagree_are_told_and_ignored(tmp_path: Path) -> None:
    model, plan = pruned(4)
    save((model, plan), tmp_path)
    told = json.loads((tmp_path / "plan.json").read_text())
    told["dimensions"]["fc1"]["kept"] = [4, 5, 6, 7]
    (tmp_path / "plan.json").write_text(json.dumps(told))
    with pytest.warns(UserWarning, match="plan.json is not the one"):
        assert same(load(tmp_path, Net()), model)
    (tmp_path / "plan.json").unlink()
    with no_warnings():
        assert same(load(tmp_path, Net()), model)
        with opened_save(tmp_path) as saved:
            assert (saved.plan, list(saved.texts)) == (plan, ["plan.json"])
    save(bert(4), tmp_path, overwrite=True)
    save((model, plan), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "plan.json"]


def test_copy_that_cannot_be_written_is_told_before_anything_changes(tmp_path: Path) -> None:
    save(pruned(4), tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(SaveError, match="is a folder"):
        save(pruned(2), tmp_path)
    (tmp_path / "config.json").rmdir()
    assert same(load(tmp_path, Net()), pruned(4)[0])
