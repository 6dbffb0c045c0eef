"""The experiment on heads with a BERT of two small layers and generated sentences."""

from __future__ import annotations

import csv
import random
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ispasp.cli.app import app
from ispasp.errors import InputError
from ispasp.integrations.torchvision import import_torchvision
from ispasp_lab.data import text
from ispasp_lab.experiments import heads, heads_network, heads_report

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")]
GOOD, BAD = ["good", "fine", "great", "bright"], ["bad", "dull", "poor", "weak"]
OTHER = ["the", "a", "film", "plot", "is", "was", "very", "and"]


def sentence(mood: list[str], words: random.Random) -> str:
    rest = [words.choice(OTHER) for _ in range(words.randint(1, 9))]
    return " ".join([*rest, words.choice(mood), words.choice(mood)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a task of moods and a random BERT."""
    if find_spec("torchvision") is not None:
        import_torchvision()
    from transformers import BertConfig, BertModel, BertTokenizerFast

    place = tmp_path_factory.mktemp("data")
    words = random.Random(0)  # noqa: S311
    for part, n in (("train", 96), ("test", 60)):
        (place / "nlp/moods").mkdir(parents=True, exist_ok=True)
        lines = [f"{sentence(GOOD if i % 2 else BAD, words)}\t{i % 2}" for i in range(n)]
        (place / f"nlp/moods/{part}.tsv").write_text("\n".join(["sentence\tlabel", *lines, ""]))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *OTHER]
    (place / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(place / "vocab.txt")).save_pretrained(place / "tiny")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(place / "tiny")
    return place


@pytest.fixture(autouse=True)
def data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISPASP_DATA", str(folder))


SETTINGS = heads_network.Settings(
    "tiny", "moods", train=0, tested=0, examples=32, epochs=4, again=1, lr=5e-3, batch=16, length=16
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture
def rows(out: Path) -> list[heads.Row]:
    list(heads.run(SETTINGS, out, keeps=[0.25], progress=False))
    return heads.read_rows(out / heads.NAME, heads.Row)


def test_every_variant_has_its_row(rows: list[heads.Row]) -> None:
    assert [(r.method, r.compensate) for r in rows] == [(heads.DENSE, "none"), *heads.VARIANTS]
    assert rows[0].accuracy is not None
    assert rows[0].accuracy > 85  # the task is learnt
    assert all(r.note == "" and r.finetuned is not None and r.finetuned > 70 for r in rows[1:])
    for row in rows[1:]:
        kept = [int(n) for n in row.heads.split()]
        assert len(kept) == 2
        assert sum(kept) == 2
        assert min(kept) >= 1


def test_nothing_is_made_twice(rows: list[heads.Row], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(heads.run(SETTINGS, out, keeps=[0.25], progress=False)) == []
    monkeypatch.setattr(heads_network, "train", lambda *args, **options: 1 / 0)
    network = heads_network.dense(heads_network.task(SETTINGS), out)  # from its file
    assert heads_network.top1(network, heads_network.task(SETTINGS).test()) == pytest.approx(rows[0].accuracy)
    with pytest.raises(InputError, match="choose another folder"):
        list(heads.run(replace(SETTINGS, lr=1e-3), out, progress=False))
    with pytest.raises(InputError, match="choose another folder"):
        heads_network.dense(heads_network.task(replace(SETTINGS, seed=1)), out)


def test_another_trial_differs_and_a_lost_row_comes_back(rows: list[heads.Row], out: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(out, mine)  # tests run in any order: `out` is for all of them
    more = list(heads.run(SETTINGS, mine, [0.25], [("random", "none"), ("ispasp", "none")], trials=2, progress=False))
    assert [(r.trial, r.method) for r in more] == [(1, "random"), (1, "ispasp")]
    assert heads.read_rows(mine / heads.NAME, heads.Row)[: len(rows)] == rows
    lost = rows[1]
    copy = tmp_path / "again"
    copy.mkdir()
    (copy / "networks").symlink_to(out / "networks")
    for row in [r for r in rows if r != lost]:
        heads.append_row(copy / heads.NAME, row)
    assert len(list(heads.run(SETTINGS, copy, [0.25], progress=False))) == 1
    again = heads.read_rows(copy / heads.NAME, heads.Row)[-1]
    assert replace(again, cpu_s=None) == replace(lost, cpu_s=None)


def test_a_method_that_cannot_run_says_so(rows: list[heads.Row], out: Path, tmp_path: Path) -> None:
    (tmp_path / "networks").symlink_to(out / "networks")
    made = list(heads.run(SETTINGS, tmp_path, [0.25], [("magic", "none")], progress=False))
    assert made[1].note.startswith("method 'magic': this experiment has ispasp")
    assert made[1].accuracy is None


def test_the_report_has_a_section_for_each_data_set(rows: list[heads.Row], tmp_path: Path) -> None:
    for row in rows + [replace(r, data="other") for r in rows]:
        heads.append_row(tmp_path / heads.NAME, row)
    table, figure, page = heads_report.write(tmp_path, "ispasp reproduce heads")
    assert len(list(csv.DictReader(table.open()))) == 2 * len(rows)
    assert figure.read_bytes().startswith(b"\x89PNG")
    lines = page.read_text()
    assert lines.count("| i-SpaSP, compensate=dense | 0.25 |") == 2
    assert "## other" in lines
    assert "i-SpaSP against random" in lines


def test_verdicts_weigh_the_spread_of_trials(rows: list[heads.Row]) -> None:
    def trials(method: str, values: list[float]) -> list[heads.Row]:
        base = next(r for r in rows if (r.method, r.compensate) == (method, "none"))
        return [replace(base, trial=n, finetuned=v) for n, v in enumerate(values)]

    random_ = trials("random", [80.0, 81.0, 82.0])
    for own, says in (([90.0, 91.0], "agrees"), ([81.0, 82.0], "a tie"), ([70.0, 71.0], "disagrees")):
        assert says in heads_report.findings(trials("ispasp", own) + random_)[0]


@pytest.mark.long
def test_the_command_runs(rows: list[heads.Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny", "--data", "moods", "--quick", "--out", str(tmp_path)]
    app(["reproduce", "heads", *arguments], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "moods, taylor, compensate none, keep 0.25, trial 0:" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"heads.csv", "heads.png", "heads.md", "networks"}
    assert str(tmp_path) not in (tmp_path / "heads.md").read_text()


def test_batches_hold_every_sentence_once_with_its_label(folder: Path) -> None:
    work = heads_network.task(SETTINGS)
    batches = work.test()
    assert sum(len(b["labels"]) for b in batches) == 60
    assert all(b["input_ids"].shape[1] % 8 == 0 for b in batches)
    words = {i: w for w, i in work.tokenizer.get_vocab().items()}
    for batch in batches:
        for ids, label in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            assert any(words[i] in (GOOD if label else BAD) for i in ids)
            assert not any(words[i] in (BAD if label else GOOD) for i in ids)
    a, b, c = (torch.cat([x["labels"] for x in work.loader(seed)]).tolist() for seed in (0, 0, 1))
    assert a == b != c
    assert len(work.calibration(0)[0]["labels"]) == 32


def test_files_stand_in_for_missing_parts_and_languages_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "dev-en.tsv").write_text("a\tb\tneutral\nc\td\tcontradictory\n")
    (tmp_path / "dev-de.tsv").write_text("x\ty\tneutral\n")
    (tmp_path / "test-en.labelled.tsv").write_text("premise\thypothesis\tlabel\ne\tf\tcontradiction\n")
    found = text.load_texts(str(tmp_path))
    assert [s.texts for s in found.train] == [("x", "y"), ("a", "b"), ("c", "d")]
    assert found.test == (text.Sentence(("e", "f"), "contradiction"),)
    assert found.labels == ("contradiction", "neutral")
    assert len(text.load_texts(str(tmp_path), "en").train) == 2
    with pytest.raises(InputError, match="has neither train"):
        text.load_texts(str(tmp_path), "fr")
    (tmp_path / "dev-es.tsv").write_text("".join(f"{i}\t{'ab'[i % 2]}\n" for i in range(18)))
    only = text.load_texts(str(tmp_path), "es")
    assert [s.texts[0] for s in only.test] == ["6", "7", "8", "15", "16", "17"]
    assert len(only.train) == 12
    (tmp_path / "dev-es.tsv").unlink()
    (tmp_path / "train.tsv").write_text("a\tb\tneutral\n")
    with pytest.raises(InputError, match="tested on label 'contradiction', which is not among \\['neutral'\\]"):
        text.load_texts(str(tmp_path))
    (tmp_path / "train.tsv").write_text("a\tb\tc\tneutral\n")
    with pytest.raises(InputError, match="line 1 has 4 columns"):
        text.load_texts(str(tmp_path))
    with pytest.raises(InputError, match="is not a folder with config.json"):
        heads_network.untrained(str(tmp_path), 2)
