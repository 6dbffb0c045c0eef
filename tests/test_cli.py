"""The command line as users see it: output, files, exit codes, one-line errors."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ispasp
from ispasp_lab.benchmarks import selection
from ispasp_lab.experiments import synthetic
from support.cli import command

NETS = """
import torch
from torch import nn
from parts import hidden  # a neighbour of this file

def tiny():
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 8), nn.ReLU(), nn.Linear(8, 3))

def other():
    return nn.Linear(7, 3)

def broken():
    raise RuntimeError("no\\nluck")

def number():
    return 3

def leaves():
    raise SystemExit(5)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of networks and an .npz of three easy classes."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "parts.py").write_text("hidden = 12\n")
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 90)
    x = generator.normal(size=(90, 6)).astype("float32") + 3 * np.eye(3, 6, dtype="float32")[y]
    np.savez(tmp_path / "data.npz", x=x, y=y)
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 7), "float32"), y=np.array([0, 1, 2, 0]))
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(print))
    torch.save({"0.weight": torch.ones(5, 5)}, tmp_path / "other.pt")
    np.savez(tmp_path / "bare.npz", x=np.zeros((4, 6), "float32"))
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    (tmp_path / "ours" / "plan.json").touch()
    (tmp_path / "theirs" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    return tmp_path


def test_version_and_usage_errors() -> None:
    assert command("--version").out.strip() == f"ispasp {ispasp.__version__}"
    assert command("bench", "nonsense").code == 2
    assert command("prune", "nets.py:tiny").code == 2  # no --data


def test_synthetic_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "run", partial(synthetic.run, widths=(20,), ps=(0.3, 0.5), B=20))
    done = command("reproduce", "synthetic", "--matrices", 1, "--out", tmp_path)
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"synthetic.csv", "synthetic.png", "synthetic.md"}
    assert "Theorem 2" in done.out
    assert "\r" not in done.err and "\x1b" not in done.err  # no progress bar where there is no terminal


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision: pip install 'ispasp[vision]'")
def test_bench_json_is_a_list_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = inspect.signature(selection.run).parameters
    assert (defaults["blocks"].default, defaults["keeps"].default) == ((2, 15), (0.2, 0.4))  # as the help page says
    monkeypatch.setattr(selection, "run", partial(selection.run, blocks=(15,)))
    monkeypatch.setitem(selection.BLOCKS, 15, ("layer1", 1, 6))  # a block of few channels
    done = command("bench", "selection", "--examples", 2, "--reference-examples", 1, "--iterations", 1, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert [(row["block"], row["keep"]) for row in rows] == [(15, 0.2), (15, 0.4)]
    assert all(row["same_sets"] for row in rows)


def test_survey_prints_a_table_or_json(here: Path) -> None:
    table = command("survey", "nets.py:tiny", "--input-size", 6)
    assert table.code == 0, table.err
    assert "reaches the model output" in table.out
    told = json.loads(command("survey", "nets.py:tiny", "--data", "data.npz", "--json").out)
    assert [(row["name"], row["units"]) for row in told["dimensions"]] == [("0", 12), ("2", 8)]
    assert told["cost"]["dense_params"] == 6 * 12 + 12 + 12 * 8 + 8 + 8 * 3 + 3


def test_prune_writes_model_plan_result_and_report(here: Path) -> None:
    done = command("prune", "nets.py:tiny", "--data", "data.npz", "--keep", "0=0.25", "--keep", "*=4", "--out", "small")
    assert done.code == 0, done.err
    assert done.err == ""
    assert "90 of 90 examples in data.npz" in done.out
    assert {path.name for path in Path("small").iterdir()} == {
        "model.safetensors", "plan.json", "result.json", "report.html"}  # fmt: skip
    told = json.loads(Path("small/result.json").read_text())
    assert [(row["name"], row["kept"]) for row in told["layers"]] == [("0", 3), ("2", 4)]
    page = Path("small/report.html").read_text(encoding="utf-8")
    assert "ispasp prune nets.py:tiny --data data.npz" in page
    assert page.partition("<script>")[0].count('class="here"') == 2  # a curve for each
    dense = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    assert ispasp.load("small", dense)[0].out_features == 3


@pytest.mark.parametrize(
    ("options", "check"),
    [
        (["--macs", "0.5"], lambda told: told["cost"]["macs"] <= 0.5 * told["cost"]["dense_macs"]),
        (["--params", "120"], lambda told: told["cost"]["params"] <= 120),
        (["--method", "ispasp:iterations=2"], lambda told: "iterations=2" in told["settings"]["method"]),
        (["--method", "ispasp:minibatches=true"], lambda told: "minibatches=True" in told["settings"]["method"]),
        (["--method", "gfs:candidates=50"], lambda told: "candidates=50" in told["settings"]["method"]),
        (
            ["--memory", "1.5K", "--ridge", "0.01", "--refit", "all"],
            lambda told: {"memory": 1500, "ridge": 0.01, "refit": "all"}.items() <= told["settings"].items(),
        ),
        (["--method", "taylor", "--compensate", "none"], lambda told: told["settings"]["compensate"] is None),
        (["--order", "oneshot", "--skip", "0"], lambda told: [row["name"] for row in told["layers"]] == ["2"]),
        (["--keep", "0.4", "--round-to", "4"], lambda told: [row["kept"] for row in told["layers"]] == [4, 4]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_prune(here: Path, options: list[str], check: Callable[[dict[str, object]], bool]) -> None:
    done = command("prune", "nets.py:tiny", "--data", "data.npz", "--json", "--out", "small", *options)
    assert done.code == 0, done.err
    assert check(json.loads(done.out))


def test_random_inputs_are_told_loudly(here: Path) -> None:
    done = command("prune", "nets.py:tiny", "--data", "random", "--input-size", 6, "--examples", 8, "--out", "small")
    assert done.code == 0
    assert done.err.count("WARNING: The inputs are random numbers") == 2  # before the work and after it
    assert "random numbers, not data" in Path("small/report.html").read_text(encoding="utf-8")


def test_healing_from_the_command_line_resumes(here: Path) -> None:
    options = ("--heal-steps", 4, "--heal-blocks", "--heal-checkpoint", "healing", "--no-curves", "--json", "--force")
    first, second = (command("prune", "nets.py:tiny", "--data", "data.npz", "--out", "small", *options) for _ in "ab")
    assert (first.code, second.code) == (0, 0), second.err
    healed = [json.loads(done.out)["healed"] for done in (first, second)]
    assert [each["steps"] for each in healed] == [4, 4]
    assert [each["resumed"] for each in healed] == [0, 4]
    assert command("prune", "nets.py:tiny", "--data", "data.npz", "--heal-augment", "flop").code == 2


def test_finetune_wins_back_accuracy_and_its_folder_can_be_used_on(here: Path) -> None:
    command("prune", "nets.py:tiny", "--data", "data.npz", "--keep", "0.5", "--out", "small")
    done = command("finetune", "small", "--model", "nets.py:tiny", "--data", "data.npz", "--val", "data.npz",
                   "--epochs", 30, "--lr", 0.1, "--batch-size", 16)  # fmt: skip
    assert done.code == 0, done.err
    accuracy = float(done.out.split(" % after")[0].split()[-1])
    assert accuracy > 90
    dense = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    model = ispasp.load("small-finetuned", dense)
    with np.load("data.npz") as data:
        right = model(torch.from_numpy(data["x"])).argmax(1).numpy() == data["y"]
    assert 100 * right.mean() == pytest.approx(accuracy, abs=0.06)
    taught = command("finetune", "small", "--model", "nets.py:tiny", "--data", "data.npz", "--optimizer", "adamw",
                     "--teacher", "nets.py:tiny", "--out", "taught")  # fmt: skip
    assert taught.code == 0, taught.err
    told = command("finetune", "small", "--model", "nets.py:tiny", "--data", "data.npz", "--teacher", "nets.py:other",
                   "--out", "third")  # fmt: skip
    assert "nets.py:other does not run on 90 examples in data.npz" in told.err
    assert Path("taught/result.json").is_file()


@pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs onnxruntime: pip install 'ispasp[onnx]'")
def test_export_overwrites_by_force_only(here: Path) -> None:
    """A dense model; the guide's lines export a pruned one."""
    Path("net.onnx").write_bytes(b"precious")
    again = ("export", "nets.py:tiny", "net.onnx", "--data", "data.npz")
    assert "net.onnx exists: pass another file, or --force to overwrite it" in command(*again).err
    assert Path("net.onnx").read_bytes() == b"precious"
    done = command(*again, "--force")
    assert done.code == 0, done.err
    assert "wrote net.onnx" in done.out and Path("net.onnx").stat().st_size > 1000


DATA = ["--data", "data.npz"]
WRONG = {
    "keep beyond one": (["prune", "nets.py:tiny", *DATA, "--keep", "1.5"], "keep=1.5"),
    "keep is no number": (["prune", "nets.py:tiny", *DATA, "--keep", "half"], "'--keep': 'half': pass a fraction"),
    "keep and macs": (["prune", "nets.py:tiny", *DATA, "--keep", "0.5", "--macs", "0.5"], "--keep and --macs"),
    "unknown recipe": (["prune", "nets.py:tiny", *DATA, "--recipe", "resnet1"], "choose from resnet34-2.69G"),
    "unknown method": (["prune", "nets.py:tiny", *DATA, "--method", "magic"], "unknown method 'magic'"),
    "unknown option of a method": (["prune", "nets.py:tiny", *DATA, "--method", "ispasp:speed=9"], "iterations"),
    "option without a value": (["prune", "nets.py:tiny", *DATA, "--method", "ispasp:speed"], "name:key=value"),
    "unknown glob": (["prune", "nets.py:tiny", *DATA, "--keep", "conv*=0.5"], "no hidden dimension fits 'conv*'"),
    "unknown order": (
        ["prune", "nets.py:tiny", *DATA, "--order", "backwards"],
        "'backwards' is not one of 'sequential', 'oneshot', 'global'",
    ),
    "unknown device": (["prune", "nets.py:tiny", *DATA, "--device", "toaster"], "--device toaster"),
    "no data": (["prune", "nets.py:tiny", "--data", "nowhere"], "no data at nowhere"),
    "random without a size": (["prune", "nets.py:tiny", "--data", "random"], "pass --input-size"),
    "size of another model": (
        ["survey", "nets.py:tiny", "--input-size", "3x8x8"],
        "does not run on 2 random inputs 3x8x8",
    ),
    "no size at all": (["survey", "nets.py:tiny", "--input-size", "big"], "such as 3x224x224"),
    "no model": (["survey", "bert"], "'bert' names no model"),
    "no file": (["survey", "nest.py:tiny"], "no file nest.py"),
    "no factory": (["survey", "nets.py:tony"], "nets.py has no function 'tony': it has tiny"),
    "failing factory": (["survey", "nets.py:broken"], "nets.py, line 13: RuntimeError: no luck"),
    "leaving factory": (["survey", "nets.py:leaves"], "nets.py, line 19: SystemExit"),
    "factory of numbers": (["survey", "nets.py:number"], "nets.py:number returns int"),
    "no array": (["prune", "nets.py:tiny", *DATA, "--key", "z"], "no array 'z': it has x, y"),
    "no tokenizer": (["prune", "nets.py:tiny", "--data", "nets.py"], "text needs the tokenizer"),
    "no weights": (["survey", "nets.py:tiny", "--weights", "w.pt"], "no weights at w.pt"),
    "pretrained file": (["survey", "nets.py:tiny", "--weights", "pretrained"], "--weights pretrained is for"),
    "not a pruned folder": (["finetune", "nowhere", *DATA], "nowhere holds no pruned model"),
    "unknown optimizer": (["finetune", "ours", *DATA, "--optimizer", "lion"], "is not one of 'sgd', 'adamw'"),
    "demo": (["demo", "--keep", "1.5"], "keep=1.5"),
    "no --data": (["prune", "nets.py:tiny"], "Missing option '--data': see `ispasp prune --help`"),
    "no model at all": (["survey"], "see `ispasp survey --help`"),
    "unknown command": (["nonsense"], "No such command 'nonsense': see `ispasp --help`"),
    "unknown option": (["prune", "nets.py:tiny", *DATA, "--ratio", "0.5"], "No such option: --ratio"),
    "no examples": (["prune", "nets.py:tiny", *DATA, "--examples", "0"], "Invalid value for '--examples'"),
    "seed beyond all": (["prune", "nets.py:tiny", *DATA, "--seed", "9" * 30], "Invalid value for '--seed'"),
    "keep nothing": (["prune", "nets.py:tiny", *DATA, "--keep", "0"], "keep=0 would leave"),
    "glob without value": (["prune", "nets.py:tiny", *DATA, "--keep", "0="], "'--keep': '0=': pass GLOB=0.5"),
    "macs that cannot be": (["prune", "nets.py:tiny", *DATA, "--macs", "0.0001"], "is out of reach"),
    "neither true nor false": (
        ["prune", "nets.py:tiny", *DATA, "--method", "ispasp:minibatches=maybe"],
        "minibatches is 'maybe': pass minibatches=true or minibatches=false",
    ),
    "half a candidate": (["prune", "nets.py:tiny", *DATA, "--method", "gfs:candidates=1.5"], "candidates=1.5"),
    "unknown compensation": (
        ["prune", "nets.py:tiny", *DATA, "--compensate", "yes"],
        "is not one of 'dense', 'local', 'none'",
    ),
    "unknown refit": (["prune", "nets.py:tiny", *DATA, "--refit", "some"], "is not one of 'auto', 'consumers', 'all'"),
    "refit without dense": (["prune", "nets.py:tiny", *DATA, "--refit", "all", "--compensate", "none"], "refit='all'"),
    "no ridge": (["prune", "nets.py:tiny", *DATA, "--ridge", "0"], "ridge=0.0: pass a positive number"),
    "memory of no size": (
        ["prune", "nets.py:tiny", *DATA, "--memory", "lots"],
        "pass a number of bytes",
    ),
    "unknown kind": (["prune", "nets.py:tiny", *DATA, "--kinds", "heads"], "choose neuron, filter or head"),
    "empty kinds": (["survey", "nets.py:tiny", "--kinds", ""], "choose neuron, filter or head"),
    "no data named": (["prune", "nets.py:tiny", "--data", ""], "no data at ''"),
    "data of another size": (["prune", "nets.py:tiny", "--data", "wide.npz"], "x is float32 (4, 7)"),
    "out is a file": (["prune", "nets.py:tiny", *DATA, "--out", "nets.py"], "--out nets.py: there is a file"),
    "out is below a file": (["prune", "nets.py:tiny", *DATA, "--out", "nets.py/sub"], "there is a file of the name"),
    "out is another's": (["prune", "nets.py:tiny", *DATA, "--out", "theirs"], "theirs holds model.safetensors"),
    "results are a file": (["reproduce", "synthetic", "--out", "nets.py"], "there is a file of that name"),
    "demo in a file": (["demo", "--out", "nets.py"], "there is a file of that name"),
    "export to a folder": (
        ["export", "nets.py:tiny", "theirs", "--input-size", "6"],
        "theirs is a folder: pass",
    ),
    "export of another size": (["export", "nets.py:tiny", "x.onnx", "--input-size", "7"], "does not run on 2 random"),
    "code in weights": (["survey", "nets.py:tiny", "--weights", "evil.pt"], "holds more than tensors"),
    "text as weights": (["survey", "nets.py:tiny", "--weights", "nets.py"], "was not written by torch.save"),
    "weights of another": (["survey", "nets.py:tiny", "--weights", "other.pt"], "'0.weight' has shape (5, 5)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_is_one_line_and_exit_code_2(here: Path, case: str) -> None:
    arguments, said = WRONG[case]
    done = command(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.strip().splitlines()) == 1
    assert done.err.startswith("ispasp: ")
    assert said in done.err


def test_errors_of_folders(here: Path) -> None:
    command("prune", "nets.py:tiny", *DATA, "--out", "small")
    assert "pass --model, the dense one (it was made from nets.py:tiny)" in command("prune", "small", *DATA).err
    assert "it was made from nets.py:tiny" in command("export", "small", "x.onnx").err
    assert "leave --weights out" in command("survey", "ispasp:small", "--weights", "w.pt").err
    told = command("finetune", "small", "--model", "nets.py:tiny", "--data", "wide.npz")
    assert "does not run on 4 examples in wide.npz" in told.err
    assert "x is float32 (4, 7)" in told.err
    np.savez("many.npz", x=np.zeros((4, 6), "float32"), y=np.array([0, 1, 2, 7]))
    told = command("finetune", "small", "--model", "nets.py:tiny", "--data", "many.npz")
    assert "labels up to 7, the model has 3 outputs" in told.err
    assert "have no labels" in command("finetune", "small", "--model", "nets.py:tiny", "--data", "bare.npz").err


def test_a_pruned_folder_is_pruned_again(here: Path) -> None:
    dense = ("--model", "nets.py:tiny")
    assert command("prune", "nets.py:tiny", *DATA, "--keep", "0.75", "--no-curves", "--out", "first").code == 0
    done = command("prune", "first", *dense, *DATA, "--keep", "0.5", "--no-curves", "--out", "second")
    assert done.code == 0, done.err
    told = json.loads(Path("second/result.json").read_text(encoding="utf-8"))
    first = json.loads(Path("first/plan.json").read_text(encoding="utf-8"))["dimensions"]
    second = json.loads(Path("second/plan.json").read_text(encoding="utf-8"))["dimensions"]
    assert told["model"] == "nets.py:tiny"
    assert {n: d["units"] for n, d in second.items()} == {n: d["units"] for n, d in first.items()}
    assert all(set(d["kept"]) < set(first[name]["kept"]) for name, d in second.items())
    assert command("survey", "second", *dense, "--input-size", "6").code == 0


def test_what_says_nothing_is_not_kept_quiet(here: Path) -> None:
    done = command("prune", "nets.py:tiny", *DATA, "--keep", "1.0", "--out", "same")
    assert done.code == 0
    assert "WARNING: Nothing was removed" in done.err
    command("prune", "nets.py:tiny", *DATA, "--method", "gfs", "--out", "greedy")
    assert "gfs looks at the task" in Path("greedy/report.html").read_text(encoding="utf-8")  # instead of curves
    shown = command("bench")
    assert "selection" in shown.out and shown.err == ""  # help, not an error


def test_a_folder_is_written_into_again_by_force_only(here: Path) -> None:
    once = ("prune", "nets.py:tiny", *DATA, "--out", "tiny", "--no-curves")
    assert command(*once, "--keep", "0.5").code == 0
    before = Path("tiny/model.safetensors").read_bytes()
    refused = command(*once, "--keep", "0.25")
    assert (refused.code, refused.err) == (
        2, "ispasp: --out tiny is not empty: pass another folder, or --force to write into it\n")  # fmt: skip
    assert Path("tiny/model.safetensors").read_bytes() == before
    assert command(*once, "--keep", "0.25", "--force").code == 0
    assert json.loads(Path("tiny/result.json").read_text())["settings"]["keep"] == 0.25
    tuned = ("finetune", "tiny", "--model", "nets.py:tiny", *DATA, "--out", "tiny")
    assert "tiny is not empty" in command(*tuned).err


def test_classes_of_training_and_validation_must_agree(here: Path) -> None:
    (here / "conv.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), "
        "nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))\n"
    )
    for name in ("train/cat", "train/dog", "val/dog", "val/eel"):
        Path(name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (9, 9, 9)).save(f"{name}/1.png")
    command("prune", "conv.py:net", "--data", "train", "--size", 8, "--out", "small")
    tuned = ("finetune", "small", "--model", "conv.py:net", "--data", "train", "--size", 8)
    assert "different classes, such as 'eel'" in command(*tuned, "--val", "val").err
    assert command(*tuned, "--val", "train").code == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "memory ran out: pass a smaller --batch-size"),
        (OSError(28, "No space left on device", "small/plan.json"), "small/plan.json: No space left on device: check"),
    ],
)
def test_errors_of_the_machine_have_a_remedy(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ispasp, "survey", fail)
    done = command("survey", "nets.py:tiny", "--input-size", 6)
    assert (done.code, done.err.startswith(f"ispasp: {said}")) == (2, True)


def test_what_was_not_foreseen_is_one_line_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr(ispasp, "survey", fail)
    done = command("survey", "nets.py:tiny", "--input-size", 6)
    assert done.code == 2
    assert done.err.startswith("ispasp: ZeroDivisionError: one two: this is unexpected; ISPASP_DEBUG=1")
    monkeypatch.setenv("ISPASP_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        command("survey", "nets.py:tiny", "--input-size", 6)
