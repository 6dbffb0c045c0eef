"""Scores, preprocessing and settings: what `prune --val`, `evaluate` and result.json tell."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ispasp
from ispasp.cli.data import load_data
from ispasp.cli.huggingface import Task, image_preprocessing
from ispasp.cli.loaded import Preprocessing, from_dict
from ispasp.cli.models import load_model
from ispasp.cli.options import Wanted
from support.cli import command, refusal

NETS = """
from torch import nn

def tiny(hidden=12):
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 8), nn.ReLU(), nn.Linear(8, 3))

def conv():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4, 2))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 60)
    x = generator.normal(size=(60, 6)).astype("float32") + 3 * np.eye(3, 6, dtype="float32")[y]
    np.savez(tmp_path / "data.npz", x=x, y=y)
    for name in ("photos/0/a.png", "photos/1/b.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.fromarray(generator.integers(0, 256, (20, 30, 3), dtype="uint8")).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)


def told(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return found


def score(*arguments: str) -> float:
    done = command("evaluate", *arguments, "--json")
    assert done.code == 0, done.err
    (value,) = json.loads(done.out)["scores"].values()
    return float(value)


def test_prune_scores_before_and_after_and_evaluate_says_the_same() -> None:
    data = ("--data", "data.npz")
    done = command("prune", "nets.py:tiny", *data, "--val", "data.npz", "--val-examples", "30", "--keep", "0.25")
    assert done.code == 0, done.err
    assert "scored on 30 of 60 examples in data.npz" in done.out
    scores = told("pruned")["scores"]
    some = (*data, "--examples", "30")
    assert scores["before"]["accuracy"] == score("nets.py:tiny", *some)
    assert scores["after"]["accuracy"] == score("pruned", "--model", "nets.py:tiny", *some)
    assert f"accuracy {scores['before']['accuracy']:.4g} -> {scores['after']['accuracy']:.4g}" in done.out
    shown = command("evaluate", "pruned", "--model", "nets.py:tiny", *some).out
    assert shown == f"accuracy {100 * scores['after']['accuracy']:.2f} % on 30 of 60 examples in data.npz\n"


def test_data_without_labels_has_no_score() -> None:
    np.savez("bare.npz", x=np.zeros((4, 6), "float32"))
    assert "have no labels" in refusal("evaluate", "nets.py:tiny", "--data", "bare.npz")
    assert "have no labels" in refusal("prune", "nets.py:tiny", "--data", "data.npz", "--val", "bare.npz")


def test_finetuning_tells_its_own_scores() -> None:
    command("prune", "nets.py:tiny", "--data", "data.npz", "--no-curves")
    command("finetune", "pruned", "--model", "nets.py:tiny", "--data", "data.npz", "--val", "data.npz")
    after = told("pruned-finetuned")["finetuned"]["after"]["accuracy"]
    assert after == score("pruned-finetuned", "--model", "nets.py:tiny", "--data", "data.npz")


def test_settings_are_complete() -> None:
    command("prune", "nets.py:tiny:hidden=16", "--data", "data.npz", "--kinds", "neuron,filter", "--examples", "40",
            "--skip", "2*", "--seed", "3", "--no-curves")  # fmt: skip
    found = told("pruned")
    assert found["model"] == "nets.py:tiny:hidden=16"
    assert found["no_curves"] == "There are no curves: --no-curves was passed." and found["curves"] == {}
    expected = {"kinds": ["neuron", "filter"], "skip": ["2*"], "examples": 40, "batch_size": 32, "data": "data.npz",
                "weights": "", "val": "", "seed": 3}  # fmt: skip
    assert expected.items() <= found["settings"].items()
    versions = {"ispasp": ispasp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert found["settings"]["versions"] == versions
    assert "preprocessing" not in found["settings"]  # floats are taken as they are


def test_preprocessing_is_printed_settable_and_remembered() -> None:
    images = ("--data", "photos", "--size", "8")
    done = command("prune", "nets.py:conv", *images, "--resize", "10", "--mean", "0.5", "--std", "0.2,0.3,0.4")
    assert done.code == 0, done.err
    line = "images: shorter side 10, centre 8x8, mean 0.5, 0.5, 0.5, std 0.2, 0.3, 0.4 "
    assert line + "(ImageNet's defaults, --size, --resize, --mean, --std)" in done.out
    again = command("evaluate", "pruned", "--model", "nets.py:conv", "--data", "photos").out
    assert f"{line}({Path('pruned/result.json')})" in again
    x = load_data("photos", load_model("nets.py:conv"), Wanted(size=8, resize=10, mean=(0.5,), std=(0.25,))).read([0])
    with Image.open("photos/0/a.png") as file:
        pixels = torch.from_numpy(np.array(file.resize((15, 10), Image.Resampling.BILINEAR)))[1:9, 4:12]
    torch.testing.assert_close(x[0], (pixels.permute(2, 0, 1) / 255 - 0.5) / 0.25)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mean", "grey"], "Invalid value for '--mean': 'grey': pass one number or three"),
        (["--mean", "0.1,0.2"], "pass one number or three"),
        (["--std", "0"], "'--std': '0': pass one number or three"),
        (["--resize", "4", "--size", "8"], "--resize 4 is less than the side 8"),
    ],
)
def test_preprocessing_that_cannot_be(options: list[str], said: str) -> None:
    assert said in refusal("prune", "nets.py:conv", "--data", "photos", *options)


def test_floats_are_not_normalised() -> None:
    said = refusal("prune", "nets.py:tiny", "--data", "data.npz", "--mean", "0.5")
    assert "--mean, --std and --resize are for images, 60 examples in data.npz are none" in said


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs pip install 'ispasp[vision]'")
def test_torchvision_reads_images_as_its_weights_want(tmp_path: Path) -> None:
    from ispasp.integrations.torchvision import import_torchvision

    weights = import_torchvision().models.get_model_weights("mobilenet_v2").IMAGENET1K_V2
    loaded = load_model("torchvision:mobilenet_v2")
    assert loaded.preprocessing.source == "torchvision's IMAGENET1K_V1"
    torch.save(loaded.model.state_dict(), Path(weights.url).name)  # a file of that name has those weights
    loaded = load_model("torchvision:mobilenet_v2", Path(weights.url).name)
    assert (loaded.preprocessing.resize, loaded.preprocessing.source) == (232, "torchvision's IMAGENET1K_V2")
    with Image.open("photos/0/a.png") as file:
        wanted = weights.transforms()(file)
    torch.testing.assert_close(load_data("photos", loaded, Wanted()).read([0])[0], wanted)
    assert load_model("torchvision:inception_v3:init_weights=false").preprocessing.size == 299


def test_folders_of_hugging_face_say_how_images_are_read(tmp_path: Path) -> None:
    scale = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for told_there, size, resize in (
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "resample": 3}, 224, 256),
        ({"size": {"height": 192, "width": 192}}, 192, 192),
        ({"size": 384}, 384, 384),
        ({}, 32, 37),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(scale | told_there))
        found = image_preprocessing(str(tmp_path), 32)
        assert (found.size, found.resize, found.mean) == (size, resize if told_there else size, (0.5,) * 3)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [1], "image_std": [0]}))
    assert image_preprocessing(str(tmp_path)) == Preprocessing()
    assert from_dict(asdict(Preprocessing()) | {"size": 10**9, "resize": 10**9}, "a file") is None


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs pip install 'ispasp[transformers]'")
def test_every_task_has_a_class() -> None:
    from ispasp.cli.huggingface import transformers

    assert all(hasattr(transformers(), task.name) for task in Task)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs pip install 'ispasp[transformers]'")
def test_perplexity_of_a_causal_language_model(tmp_path: Path) -> None:
    from ispasp.cli.huggingface import transformers

    package: Any = transformers()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    package.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "lm")
    config = package.LlamaConfig(vocab_size=len(words), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                 num_attention_heads=2, max_position_embeddings=32)  # fmt: skip
    torch.manual_seed(0)
    model = package.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "lm")
    Path("text.txt").write_text("the cat sat on the mat\nthe cat\n")
    found = score("hf:lm", "--data", "text.txt", "--batch-size", "2")
    tokenizer = package.AutoTokenizer.from_pretrained(tmp_path / "lm")
    losses = []
    for line in ("the cat sat on the mat", "the cat"):  # one by one, without padding
        ids = tokenizer(line, return_tensors="pt").input_ids
        losses += torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none").tolist()
    assert found == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    done = command("prune", "hf:lm", "--data", "text.txt", "--val", "text.txt", "--no-curves", "--out", "small")
    assert done.code == 0, done.err
    scores = told("small")["scores"]
    assert scores["before"]["perplexity"] == pytest.approx(found, rel=1e-4)
    assert scores["after"]["perplexity"] == pytest.approx(score("small", "--data", "text.txt"), rel=1e-4)


def test_completion_offers_choices() -> None:
    from typer.main import get_command

    from ispasp.cli.app import app

    command_ = get_command(app).commands["prune"]  # type: ignore[attr-defined]
    known = {option.name: option for option in command_.params}
    context = command_.make_context("prune", ["x", "--data", "y"])
    for name, begun, offered in (
        ("order", "", ["sequential", "oneshot", "global"]),
        ("task", "causal", ["causal-lm"]),
        ("method", "tay", ["taylor"]),
        ("recipe", "mobile", [name for name in ispasp.recipes if name.startswith("mobile")]),
        ("kinds", "head,n", ["head,neuron"]),
    ):
        assert [item.value for item in known[name].shell_complete(context, begun)] == offered
