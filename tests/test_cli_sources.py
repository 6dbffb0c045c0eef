"""Models, weights and data as the command line reads them."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import ispasp
from ispasp.cli.data import load_data
from ispasp.cli.loaded import Loaded, Preprocessing, runs
from ispasp.cli.models import fill, load_model, saved_folder
from ispasp.cli.options import Wanted
from ispasp.errors import InputError, IspaspError, MissingExtraError
from support.forge import forge_model

needs_vision = pytest.mark.skipif(find_spec("timm") is None, reason="needs pip install 'ispasp[vision]'")
needs_text = pytest.mark.skipif(find_spec("transformers") is None, reason="needs pip install 'ispasp[transformers]'")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("form", ["safetensors", "pt", "wrapped", "parallel"])
def test_weights_of_every_form_are_loaded(tmp_path: Path, form: str) -> None:
    source, model = linear(0), linear(1)
    state: dict[str, Any] = dict(source.state_dict())
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file(state, path)
    elif form == "wrapped":
        torch.save({"epoch": 3, "state_dict": state}, path)
    else:
        torch.save({f"module.{k}": v for k, v in state.items()} if form == "parallel" else state, path)
    fill(model, path)
    assert torch.equal(model.weight, source.weight) and torch.equal(model.bias, source.bias)


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    source, model = Tied(), Tied()
    save_file({"embed.weight": source.embed.weight.detach()}, tmp_path / "w.safetensors")
    fill(model, tmp_path / "w.safetensors")
    assert torch.equal(model.head.weight, source.embed.weight)


def test_old_files_lack_counters_of_batches(tmp_path: Path) -> None:
    source, model = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    source.running_mean += 1
    state = {name: value for name, value in source.state_dict().items() if name != "num_batches_tracked"}
    save_file(state, tmp_path / "w.safetensors")
    fill(model, tmp_path / "w.safetensors")
    assert torch.equal(model.running_mean, source.running_mean)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("bias"), "lacks bias: pass weights of the same Linear"),
        (lambda s: s.update(extra=torch.ones(1), more=torch.ones(1)), "has unexpected extra, more: pass weights"),
        (lambda s: s.update(weight=torch.ones(5, 3)), r"'weight' has shape \(5, 3\) in .*, \(2, 3\) in the model"),
        (lambda s: s.update(weight="text"), "not a state dict"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, said: str) -> None:
    state = dict(linear(0).state_dict())
    change(state)
    torch.save(state, tmp_path / "w.pt")
    model, before = linear(1), linear(1)
    with pytest.raises(InputError, match=said):
        fill(model, tmp_path / "w.pt")
    assert torch.equal(model.weight, before.weight)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return Path.write_text, (Path(sys.argv[0]).parent / "hacked", "yes")  # type: ignore[return-value]


def test_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "x")])
    (tmp_path / "w.pt").write_bytes(pickle.dumps(Evil(), protocol=2))
    torch.save({"weight": Evil()}, tmp_path / "v.pt")
    for name in ("w.pt", "v.pt"):
        with pytest.raises(InputError):
            fill(linear(0), tmp_path / name)
    assert not (tmp_path / "hacked").exists()


@needs_vision
def test_models_of_torchvision_and_timm() -> None:
    first = load_model("torchvision:squeezenet1_1:num_classes=5")
    assert isinstance(first.model, nn.Module) and not first.model.training
    assert first.model.classifier[1].out_channels == 5
    assert "random weights" in first.warnings[0]
    again = load_model("torchvision:squeezenet1_1:num_classes=5")
    assert torch.equal(first.model.features[0].weight, again.model.features[0].weight)  # seeded
    vit = load_model("timm:vit_tiny_patch16_224:depth=1,img_size=32")
    assert vit.input_size == (3, 32, 32)
    told = vit.preprocessing  # as it was trained, not ImageNet's
    assert (told.size, told.resize, told.mean, told.std) == (32, 35, (0.5,) * 3, (0.5,) * 3)
    assert (told.interpolation, told.source) == ("bicubic", "timm's data config")
    for spec, near in (("torchvision:resnet35", "resnet34"), ("timm:resnt18", "resnet18")):
        with pytest.raises(InputError, match=near):
            load_model(spec)
    with pytest.raises(InputError, match="cannot be built"):
        load_model("torchvision:squeezenet1_1:colour=red")


def test_a_folder_may_not_name_code_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise ZeroDivisionError('it was run')\n")
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    ispasp.save(ispasp.prune(net, [torch.rand(8, 4)], progress=False), "small")
    Path("small/result.json").write_text(json.dumps({"model": "evil.py:net"}))
    with pytest.raises(InputError, match="pass --model"):
        load_model("small")


PLAIN = Preprocessing(mean=(0.0,) * 3, std=(1.0,) * 3)


def identity(**options: Any) -> Loaded:
    return Loaded(nn.Identity(), "identity", **options)


def picture(path: Path, size: tuple[int, int], colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_image_folders_of_any_nesting(tmp_path: Path) -> None:
    for name, colour in (("cat/a/1.png", (255, 0, 0)), ("cat/2.jpg", (255, 0, 0)), ("dog/3.png", (0, 0, 255))):
        picture(tmp_path / name, (40, 50), colour)
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    data = load_data(str(tmp_path), identity(), Wanted(size=16))
    assert data.count == 3
    assert data.labels is not None and data.labels.tolist() == [0, 0, 1]
    x = data.read([0, 1, 2])
    assert x.shape == (3, 3, 16, 16)
    blue = (torch.tensor([0.0, 0.0, 1.0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(x[2].mean((1, 2)), blue)
    pairs = list(data.loader(2, labelled=True))
    assert [len(y) for _, y in pairs] == [2, 1]


def test_numbered_classes_and_flat_folders(tmp_path: Path) -> None:
    for name in ("numbers/7/a.png", "numbers/10/b.png", "flat/c.png"):
        picture(tmp_path / name, (8, 8), (9, 9, 9))
    data = load_data(str(tmp_path / "numbers"), identity(), Wanted(size=8))
    assert data.labels is not None and sorted(data.labels.tolist()) == [7, 10]
    flat = load_data(str(tmp_path / "flat"), identity(preprocessing=Preprocessing().sized(12)), Wanted())
    assert flat.labels is None
    assert flat.read([0]).shape == (1, 3, 12, 12)  # the model's own size
    with pytest.raises(InputError, match="have no labels"):
        next(iter(flat.loader(1, labelled=True)))
    (tmp_path / "flat" / "d.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"d\.png cannot be read"):
        load_data(str(tmp_path / "flat"), identity(), Wanted()).read([1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no images in"):
        load_data(str(tmp_path / "empty"), identity(), Wanted())


def test_the_centre_of_an_image_is_cut_out(tmp_path: Path) -> None:
    pixels = np.zeros((32, 64, 3), "uint8")
    pixels[:, 16:48] = 255  # a white square in the middle
    Image.fromarray(pixels).save(tmp_path / "a.png")
    x = load_data(str(tmp_path), identity(preprocessing=PLAIN), Wanted(size=28)).read([0])
    torch.testing.assert_close(x, torch.ones(1, 3, 28, 28))


def test_arrays_keep_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    images = np.zeros((4, 5, 6, 3), "uint8")
    np.savez(path, a=np.ones((4, 2)), x_train=images, y_train=np.arange(4), ids=np.ones((4, 7), "int32"))
    assert load_data(str(path), identity(), Wanted()).read([1, 2]).dtype == torch.float32
    data = load_data(str(path), identity(), Wanted(key="x_train"))
    assert data.read([0]).shape == (1, 3, 5, 6)  # colours first
    assert data.read([0])[0, 0, 0, 0].item() == pytest.approx(-0.485 / 0.229)
    assert data.labels is not None and data.labels.tolist() == [0, 1, 2, 3]
    assert load_data(str(path), identity(), Wanted(key="ids")).read([0]).dtype == torch.int64
    assert load_data(str(path), identity(), Wanted(labels="y_train")).labels is not None
    with pytest.raises(InputError, match="labels are whole numbers"):
        load_data(str(path), identity(), Wanted(labels="a"))
    np.savez(path, x=np.array([{"no": "numbers"}], dtype=object))
    with pytest.raises(InputError, match="cannot be read"):
        load_data(str(path), identity(), Wanted())


def test_examples_are_spread_over_all_of_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(100, dtype="float32")[:, None])
    data = load_data(str(tmp_path / "d.npz"), identity(), Wanted())
    assert data.some(5) == [0, 20, 40, 60, 80]
    assert data.some(1000) == list(range(100))
    read = torch.cat(list(data.loader(2, numbers=data.some(5))))
    assert read.flatten().tolist() == [0, 20, 40, 60, 80]


def test_random_inputs_are_seeded() -> None:
    first, again, other = (
        load_data("random", identity(input_size=(3, 8, 8)), Wanted(examples=2, size=4, seed=seed)).read([0, 1])
        for seed in (0, 0, 1)
    )
    assert first.shape == (2, 3, 4, 4)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer, as a folder."""
    from ispasp.cli.huggingface import transformers

    package = transformers()
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat"]
    (folder / "vocab.txt").write_text("\n".join(words))
    package.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = package.BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                intermediate_size=24, max_position_embeddings=32, num_labels=3)  # fmt: skip
    torch.manual_seed(0)
    package.BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "lines.txt").write_text("the cat\n\n" + "the cat sat on the mat " * 4 + "\ncat sat\n" * 2)
    return folder


@needs_text
def test_a_hugging_face_model_from_text_to_a_folder_and_back(bert: Path, tmp_path: Path) -> None:
    loaded = load_model(f"hf:{bert}")
    assert type(loaded.model).__name__ == "BertForSequenceClassification"  # as its config says
    data = load_data(str(bert / "lines.txt"), loaded, Wanted(length=32))
    assert data.count == 4  # empty lines are none
    shapes = [batch["input_ids"].shape for batch in data.loader(2)]
    assert shapes == [(2, 16), (2, 32)]  # from short to long
    result = ispasp.prune(loaded.model, data.loader(4), keep=0.5, progress=False)
    ispasp.save(result, tmp_path / "small")
    again = load_model(f"hf:{tmp_path / 'small'}")  # a pruned folder, known by its plan
    assert again.plan is not None
    batch = data.read([0, 1])
    torch.testing.assert_close(again.model(**batch).logits, result.model(**batch).logits)


@needs_text
def test_arrays_and_weights_for_a_hugging_face_model(bert: Path, tmp_path: Path) -> None:
    loaded = load_model(f"hf:{bert}", str(bert / "model.safetensors"))
    assert torch.equal(loaded.model.classifier.weight, load_model(f"hf:{bert}").model.classifier.weight)
    ids = np.array([[2, 5, 6, 3], [2, 6, 3, 0]])
    np.savez(tmp_path / "d.npz", input_ids=ids, attention_mask=(ids > 0).astype(int), labels=np.array([0, 2]))
    data = load_data(str(tmp_path / "d.npz"), loaded, Wanted())
    assert set(data.read([0])) == {"input_ids", "attention_mask"}
    batch = next(iter(data.loader(2, labelled=True)))
    assert batch["labels"].tolist() == [0, 2]
    assert loaded.model(**batch).loss.isfinite()
    tokens = load_data("random", loaded, Wanted(examples=3)).read([0, 1, 2])["input_ids"]
    assert tokens.max() < 10


@needs_text
def test_folders_that_are_not_there_are_not_looked_up_elsewhere(tmp_path: Path) -> None:
    for name in ("./nowhere", str(tmp_path / "nowhere"), "a/b/c"):
        with pytest.raises(InputError, match="no folder"):
            load_model(f"hf:{name}")
    for config in ({}, {"model_type": "bert", "architectures": ["NoSuchClass"]}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="cannot be loaded"):
            load_model(f"hf:{tmp_path}")


class Rows:
    """As much of a data set as is read here."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str | int) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: v[key] for name, v in self.columns.items()}


@needs_text
def test_data_sets_of_hugging_face(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *config: str, split: str) -> Rows:
        if name != "sst2":
            raise FileNotFoundError(f"no data set {name}\nsecond line")
        assert (config, split) == ((), "validation")
        return Rows(sentence=["the cat sat on the mat", "the", "cat sat"], label=[2, 0, 1])

    loaded = load_model(f"hf:{bert}")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    data = load_data("hf-dataset:sst2:validation", loaded, Wanted())
    assert data.labels is not None and data.labels.tolist() == [0, 1, 2]  # sorted with their texts
    for spec, wanted, said in (
        ("hf-dataset:nothing", Wanted(), r"no data set nothing second line\): check its name, its split"),
        ("hf-dataset:a:b:c:d", Wanted(), "names no data set"),
        ("hf-dataset:sst2:validation", Wanted(labels="sentence"), "does not hold class numbers"),
        ("hf-dataset:sst2:validation", Wanted(key="label"), "holds int"),
        ("hf-dataset:sst2:validation", Wanted(key="body"), "has the columns sentence, label"),
    ):
        with pytest.raises(IspaspError, match=said):
            load_data(spec, loaded, wanted)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="pip install datasets"):
        load_data("hf-dataset:sst2", loaded, Wanted())


def test_data_sets_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *config: str, split: str) -> Rows:
        assert (name, config, split) == ("pictures", ("small",), "test")
        grey, red = Image.new("L", (9, 12), 128), Image.new("RGB", (8, 8), (255, 0, 0))
        return Rows(img=[grey, red], label=[1, 0])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    data = load_data("hf-dataset:pictures:small:test", identity(preprocessing=PLAIN), Wanted(size=8))
    assert data.labels is not None and data.labels.tolist() == [1, 0]
    x = data.read([0, 1])
    assert x.shape == (2, 3, 8, 8)
    torch.testing.assert_close(x[1].mean((1, 2)), torch.tensor([1.0, 0.0, 0.0]))


@needs_text
def test_a_text_model_takes_text_of_its_length_only(bert: Path, tmp_path: Path) -> None:
    loaded = load_model(f"hf:{bert}")
    data = load_data(str(bert / "lines.txt"), loaded, Wanted(length=500))  # the model has 32 positions
    assert data.read([3])["input_ids"].shape == (1, 32)
    runs(loaded, data)
    picture(tmp_path / "a.png", (8, 8), (1, 2, 3))
    with pytest.raises(InputError, match="reads text: pass a text file"):
        load_data(str(tmp_path), loaded, Wanted())


@needs_text
def test_weights_that_a_checkpoint_lacks_are_told(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "base")
    state = load_file(bert / "model.safetensors")
    del state["classifier.weight"]
    save_file(state, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    assert load_model(f"hf:{bert}").warnings == ()
    assert "lacks 'classifier.weight': these weights are random" in load_model(f"hf:{tmp_path / 'base'}").warnings[0]


def test_arrays_that_are_no_examples(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    for array, said in (
        (np.zeros((0, 6), "float32"), "holds no example"),
        (np.float32(3), "the first axis of x must be the examples"),
        (np.array(["a"]), "pass numbers"),
    ):
        np.savez(path, x=array)
        with pytest.raises(InputError, match=said):
            load_data(str(path), identity(), Wanted())
    path.write_bytes(b"no archive")
    with pytest.raises(InputError, match="no archive of numeric arrays"):  # and no advice to trust a pickle
        load_data(str(path), identity(), Wanted())
    np.savez(path, x=np.full((4, 5, 6), 255, "uint8"))
    assert load_data(str(path), identity(), Wanted()).read([0]).tolist() == torch.ones(1, 1, 5, 6).tolist()  # grey


def test_inputs_have_the_precision_of_the_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3), "float64"))
    loaded = Loaded(linear(0).bfloat16(), "half")
    data = load_data(str(tmp_path / "d.npz"), loaded, Wanted())
    assert data.read([0]).dtype == torch.bfloat16
    assert runs(loaded, data).dtype == torch.bfloat16


def test_no_folder_is_taken_for_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "resnet18"):
        folder.mkdir(exist_ok=True)
        (folder / "plan.json").write_text("{}")
    assert saved_folder("torchvision:resnet18") is None  # a folder of that name is beside it
    assert saved_folder("hf:") is None and saved_folder("") is None  # the present folder was not named
    assert (
        saved_folder("resnet18") == saved_folder("hf:resnet18") == saved_folder("ispasp:resnet18") == Path("resnet18")
    )
    for spec, said in (("nets.py", "nets.py:FUNCTION"), ("w.pt", "--weights w.pt"), ("bert", "pass hf:bert")):
        (tmp_path / "bert").mkdir(exist_ok=True)
        (tmp_path / "bert" / "config.json").touch()
        (tmp_path / "w.pt").touch()
        with pytest.raises(InputError, match=said):
            load_model(spec)


def test_load_says_what_to_do_about_a_torchvision_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Package:
        __spec__ = None

        def __getattr__(self, name: str) -> Any:
            try:
                raise RuntimeError("operator torchvision::nms does not exist")
            except RuntimeError as error:
                raise ModuleNotFoundError(f"cannot import {name}") from error

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    ispasp.save(ispasp.prune(net, [torch.rand(8, 4)], progress=False), tmp_path)
    config = json.dumps({"architectures": ["ViTModel"]})
    forge_model(tmp_path / "model.safetensors", lambda _, told: told.update(config=config))
    monkeypatch.setitem(sys.modules, "transformers", Package())
    with pytest.raises(MissingExtraError, match="install the torchvision made for it, or pip uninstall torchvision"):
        ispasp.load(tmp_path)
