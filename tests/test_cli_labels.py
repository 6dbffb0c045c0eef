"""Labels on the command line: which output of the model a class folder or a name in a table is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from ispasp.cli.data import load_data
from ispasp.cli.loaded import Examples, Loaded, matched
from ispasp.cli.models import load_model
from ispasp.cli.options import Wanted
from ispasp.errors import InputError
from support.cli import command, refusal

NETS = """
from torch import nn

def net(classes=2, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 4, 3), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(4, classes))
"""


def pictures(*names: str) -> None:
    for number, name in enumerate(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 9, 9)).save(name)


def labels(folder: str, outputs: int, names: tuple[str, ...] = ()) -> list[int]:
    found = load_data(folder, Loaded(nn.Identity(), "identity"), Wanted(size=8))
    told = matched(found, outputs, names).labels
    assert told is not None
    return [int(label) for label in told]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("parts", [("train", "val"), ("training", "test"), ("Train", "extra", "valid"), ("val",)])
def test_parts_of_a_data_set_are_no_classes(parts: tuple[str, ...]) -> None:
    pictures(*(f"photos/{part}/cat/1.png" for part in parts))
    said = refusal("prune", "nets.py:net", "--data", "photos", "--size", 8)
    assert said.startswith("photos has the splits ")
    assert said.endswith(f"no classes: pass photos/{parts[0]}")


def test_a_class_may_be_called_test() -> None:
    pictures("photos/test/1.png", "photos/trial/1.png")
    assert labels("photos", 2) == [0, 1]


def test_two_folders_are_not_the_first_two_of_many_outputs() -> None:
    pictures("photos/cat/1.png", "photos/dog/1.png")
    many = ("nets.py:net:classes=1000", "--data", "photos", "--size", 8)
    said = "2 images in photos have 2 classes, such as 'cat', the model has 1,000 outputs: name the classes by output"
    assert refusal("evaluate", *many).startswith(said)
    assert refusal("prune", *many, "--method", "taylor").startswith(said)
    assert refusal("prune", *many, "--val", "photos").startswith(said)
    done = command("prune", *many, "--no-curves", "--out", "small")
    assert done.code == 0  # labels are not needed
    assert f"WARNING: The labels are not used: {said}" in done.err
    tuned = ("finetune", "small", "--model", *many)
    assert refusal(*tuned).startswith(said)


def test_labels_that_need_not_be_used_are_left_out_with_a_warning() -> None:
    pictures("photos/cat/1.png", "photos/dog/1.png")
    done = command("prune", "nets.py:net:classes=5", "--data", "photos", "--size", 8, "--method", "gfs")
    assert done.code == 0, done.err
    assert "WARNING: The labels are not used: 2 images in photos have 2 classes" in done.err


def test_numbers_are_the_outputs_themselves() -> None:
    pictures("photos/7/1.png", "photos/010/1.png")
    assert sorted(labels("photos", 1000)) == [7, 10]
    with pytest.raises(InputError, match="labels up to 10, the model has 3 outputs"):
        labels("photos", 3)


def test_names_that_the_model_knows_count_more_than_their_order() -> None:
    pictures("photos/great_white-shark/1.png", "photos/Cat/1.png")
    assert labels("photos", 3, ("dog", "great white shark", "cat")) == [2, 1]
    assert labels("photos", 2, ("great white shark", "cat")) == [1, 0]
    assert labels("photos", 2, ("LABEL_0", "LABEL_1")) == [0, 1]  # names that say nothing
    with pytest.raises(InputError, match="2 classes"):
        labels("photos", 3, ("cat", "cat", "great white shark"))  # which cat?


def test_a_class_without_images_keeps_its_number_and_hidden_folders_have_none() -> None:
    pictures("photos/b/1.png", "photos/c/1.png", "photos/.cache/1.png", "photos/b/._1.png")
    Path("photos/a").mkdir()
    assert labels("photos", 3) == [1, 2]


def test_links_to_folders_are_followed_but_not_in_circles() -> None:
    pictures("elsewhere/deep/1.png", "photos/dog/1.png")
    Path("photos/cat").symlink_to(Path("elsewhere").resolve())
    Path("photos/dog/again").symlink_to(Path("photos").resolve())
    Path("photos/dog/self").symlink_to(Path("photos/dog").resolve())
    assert labels("photos", 2) == [0, 1]


def test_labels_below_zero_are_refused() -> None:
    data = Examples(2, list, "2 rows", labels=torch.tensor([-1, 0]))  # as hidden labels of test sets are written
    with pytest.raises(InputError, match="2 rows have labels from -1 on"):
        matched(data, 2)


@pytest.mark.skipif(find_spec("timm") is None, reason="needs pip install 'ispasp[vision]'")
def test_torchvision_and_imagenet_names() -> None:
    loaded = load_model("torchvision:squeezenet1_1")
    pictures("photos/tench/1.png", "photos/goldfish/1.png", "wnids/n01443537/1.png")
    found = load_data("photos", loaded, Wanted(size=8))
    assert matched(found, 1000, loaded.names).needed_labels().tolist() == [1, 0]
    assert labels("wnids", 1000) == [1]


def test_options_of_a_factory() -> None:
    assert load_model("nets.py:net:width=7").model[0].out_channels == 7  # type: ignore[index, union-attr]
    said = refusal("survey", "nets.py:net:wdth=7", "--size", 8)
    assert "unexpected keyword argument 'wdth': its options are classes, width; pass nets.py:net:KEY=VALUE" in said
    assert "write name:key=value" in refusal("survey", "nets.py:net:7")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT of three classes with its tokenizer, as a folder."""
    from ispasp.cli.huggingface import transformers

    package: Any = transformers()
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat"]
    (folder / "vocab.txt").write_text("\n".join(words))
    package.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = package.BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                intermediate_size=24, max_position_embeddings=32,
                                id2label={0: "neutral", 1: "bad", 2: "good"})  # fmt: skip
    torch.manual_seed(0)
    package.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs pip install 'ispasp[transformers]'")
class TestTables:
    def test_columns_by_name_and_by_number(self, bert: Path) -> None:
        loaded = load_model(f"hf:{bert}")
        Path("named.tsv").write_text('sentence\tlabel\nthe cat sat on the mat\t2\n"the cat\t0\n')
        found = load_data("named.tsv", loaded, Wanted())
        assert found.count == 2 and found.needed_labels().tolist() == [0, 2]  # from short to long
        Path("bare.csv").write_text('"the cat, on the mat sat",cat,good\nthe,mat,neutral\n')
        pair = load_data("bare.csv", loaded, Wanted(key="0,1", labels="2"))
        assert pair.read([0, 1])["token_type_ids"].max() == 1  # two texts
        assert matched(pair, 3, loaded.names).needed_labels().tolist() == [0, 2]  # as the config names them

    @pytest.mark.parametrize(
        ("text", "wanted", "said"),
        [
            ("a,b\n1,2\n", Wanted(), "has the columns a, b: pass --key, the one with the text"),
            ("text,y\nthe,2\n", Wanted(labels="z"), "has the columns text, y: pass --labels"),
            ("text,y\nthe,2\nthe\n", Wanted(), "row 2 has 1 columns, the others have 2"),
            ("", Wanted(), "there is nothing in it"),
            ("text\n", Wanted(), "there is nothing in it"),
            ('text\n"the', Wanted(), "cannot be read as a table"),
        ],
    )
    def test_tables_that_cannot_be_used(self, bert: Path, text: str, wanted: Wanted, said: str) -> None:
        Path("t.csv").write_text(text)
        with pytest.raises(InputError, match=said):
            load_data("t.csv", load_model(f"hf:{bert}"), wanted)

    def test_the_class_of_a_model_can_be_chosen(self, bert: Path) -> None:
        Path("t.tsv").write_text("text\tlabel\nthe cat sat\tgood\nthe mat\tbad\n")
        data = ("--data", "t.tsv")
        done = command("prune", f"hf:{bert}", "--task", "token-classification", *data, "--no-curves", "--out", "small")
        assert done.code == 0, done.err
        assert type(load_model("small").model).__name__ == "BertForTokenClassification"
        assert "--task causal-lm is for Hugging Face models" in refusal("survey", "nets.py:net", "--task", "causal-lm")
        assert "is not one of 'features', 'causal-lm'" in refusal("survey", f"hf:{bert}", "--task", "magic")
        assert "accuracy" in command("evaluate", f"hf:{bert}", *data).out
        assert "no classes and no next tokens" in refusal("evaluate", f"hf:{bert}", "--task", "features", *data)
