"""Export to GGUF: what llama.cpp computes from the file is what torch computes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp._gguf import _content, _difference
from ispasp._gguf_tokenizer import vocabulary
from ispasp.errors import ExportError, InputError, MissingExtraError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.surgery.verify import output_of
from ispasp_lab.benchmarks import llama_cpp
from ispasp_lab.zoo.tiny import DECODER
from support.cli import command

IDS = torch.arange(1, 13)
BATCH = {"input_ids": IDS.view(2, 6), "use_cache": False}
WHOLE: dict[str, Any] = {}
MIXED = {"*.0.self_attn": 1, "*.0.mlp*": 40, "*.2.mlp*": 7}
GONE = {"*.1.self_attn": 0, "*.2.mlp*": 0}
HALF = 0.5
SMOLLM2 = Path(os.environ.get("ISPASP_DATA", "~/.cache/ispasp")).expanduser() / "SmolLM2-135M"


def tiny(family: str = "Llama", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    import_torchvision()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**DECODER | {"num_hidden_layers": 3} | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, p in model.named_parameters():  # biases and norms that matter, scores that are not all alike
        nn.init.normal_(p, 1.0, 0.3) if "norm" in name else nn.init.normal_(p, 0.0, 0.3)
    return model


def pruned(model: Any, keep: Any) -> Any:
    return ispasp.apply_(model, ispasp.survey(model, BATCH).plan(keep))


def with_biases(model: Any) -> Any:
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))
    return model


LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any], Any, bool, str]] = {  # family, options, keep, with biases, architecture
    "dense": ("Llama", {}, WHOLE, False, "llama"),
    "uniform": ("Llama", {}, HALF, False, "llama"),
    "mixed": ("Llama", {}, MIXED, False, "deci"),
    "mixed, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, MIXED, True, "deci"),
    "gone": ("Llama", {}, GONE, False, "deci"),
    "gone, biases": ("Llama", {}, GONE, True, "deci"),
    "all of a layer gone": ("Llama", {}, {"*.2.*": 0}, False, "deci"),
    "tied": ("Llama", {"tie_word_embeddings": True}, HALF, False, "llama"),
    "heads that are wide": ("Llama", {"head_dim": 16}, HALF, False, "llama"),
    "scaled rope": ("Llama", {"rope_parameters": LLAMA3}, MIXED, False, "deci"),
    "mistral": ("Mistral", {"sliding_window": None}, HALF, False, "llama"),
    "qwen2": ("Qwen2", {}, {"*.mlp*": 0.5}, False, "qwen2"),
    "qwen2 without some heads": ("Qwen2", {}, HALF, False, "llama"),
    "qwen2, mixed": ("Qwen2", {}, MIXED, True, "deci"),
    "qwen3": ("Qwen3", {}, HALF, False, "qwen3"),
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Any, str]:
    family, options, keep, biases, arch = CASES[request.param]
    model = pruned(tiny(family, **options), keep)
    return with_biases(model) if biases else model, arch


@pytest.mark.long
def test_every_plan_has_an_architecture_that_computes_it(case: tuple[Any, str]) -> None:
    model, arch = case
    content = _content(model, half=False)
    assert content.arch == arch
    assert _difference(content, model) < 1e-5
    assert all(tensor.numel() for tensor in content.tensors.values()), "GGUF has no empty tensors"


def test_the_check_sees_every_tensor() -> None:
    model = with_biases(pruned(tiny(rope_parameters=LLAMA3), MIXED))
    content = _content(model, half=False)
    assert _difference(content, model) < 1e-5
    for name in ("blk.0.attn_q.weight", "blk.2.ffn_down.bias", "rope_freqs.weight", "output.weight"):
        other = replace(content, tensors=content.tensors | {name: content.tensors[name].flip(0)})
        assert _difference(other, model) > 1e-3, name


def engine_logits(path: Path) -> Tensor:
    if llama_cpp.absent():
        pytest.skip(llama_cpp.absent())
    return llama_cpp.ask(path, IDS.tolist()).logits


@pytest.mark.long
def test_llama_cpp_computes_the_same(case: tuple[Any, str], tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs pip install 'ispasp[gguf]'")
    model, _ = case
    for dtype, limit in (("f32", 1e-4), ("f16", 2e-2)):
        ispasp.export_gguf(model, tmp_path / "model.gguf", tokenizer=letters(tmp_path), dtype=dtype)
        found, (expected, *_) = engine_logits(tmp_path / "model.gguf"), output_of(model, {"input_ids": IDS[None]})
        assert float((found - expected[0]).norm() / expected.norm()) < limit


def letters(folder: Path, size: int = 100) -> Path:
    """A byte-level tokenizer of `size` tokens: three special ones, bytes, and a few merges."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs pip install 'ispasp[transformers]'")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: size - 8]
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("1", "2")]
    words = ["<unk>", "<s>", "</s>", *alphabet, *map("".join, merges)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.add_special_tokens(words[:3])
    pre = tokenizers.pre_tokenizers
    made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}, "chat_template": "{{ x }}"}')
    return folder


def test_the_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs pip install 'ispasp[gguf]'")
    result = ispasp.prune(tiny(), [BATCH], MIXED, progress=False)
    folder = letters(tmp_path / "tokenizer")
    assert ispasp.export_gguf(result, tmp_path / "new" / "small.gguf", tokenizer=folder) < 2e-2
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["small.gguf"]
    reader = gguf.GGUFReader(tmp_path / "new" / "small.gguf")
    told = {name: field.contents() for name, field in reader.fields.items()}
    assert told["general.architecture"] == "deci"
    assert told["deci.attention.head_count"] == [2, 4, 4]
    assert told["deci.attention.head_count_kv"] == [1, 2, 2]
    assert told["deci.feed_forward_length"] == [40, 64, 7]
    assert told["deci.attention.key_length"] == 8
    assert told["tokenizer.ggml.tokens"][:3] == ["<unk>", "<s>", "</s>"]
    assert told["tokenizer.ggml.tokens"][99] == "[PAD99]"
    assert told["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert told["tokenizer.ggml.merges"][1] == "th e"
    assert (told["tokenizer.ggml.model"], told["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    assert (told["tokenizer.ggml.bos_token_id"], told["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert (told["tokenizer.ggml.add_bos_token"], told["tokenizer.ggml.add_eos_token"]) == (True, False)
    assert told["tokenizer.chat_template"] == "{{ x }}"
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == "F16"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


def pieces(folder: Path) -> Path:
    """A tokenizer as of Llama 2: characters, bytes for others, and every merge that makes a token."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs pip install 'ispasp[transformers]'")
    special, made = ["<unk>", "<s>", "</s>"], ["th", "the", "▁the", "he", "▁t", "▁th", "in", "an"]
    words = [*special, *(f"<0x{i:02X}>" for i in range(256)), *"abcdefghijklmnopqrstuvwxyz▁", *made]
    splits = [(word[:i], word[i:]) for word in made for i in range(1, len(word))]
    merges = [pair for pair in splits if set(pair) <= set(words)]
    bpe = tokenizers.models.BPE(
        {word: i for i, word in enumerate(words)}, merges, unk_token=special[0], byte_fallback=True, fuse_unk=True
    )
    found, normal = tokenizers.Tokenizer(bpe), tokenizers.normalizers
    found.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    found.add_special_tokens(special)
    found.save(str(folder / "tokenizer.json"))
    return folder


def test_sentencepiece(tmp_path: Path) -> None:
    told = vocabulary(pieces(tmp_path), 300, tiny().config)
    tokens, scores = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.scores"]
    score = dict(zip(tokens, scores, strict=True))
    assert told["tokenizer.ggml.model"] == "llama"
    assert told["tokenizer.ggml.add_space_prefix"] is True
    assert told["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    assert score["th"] > score["the"] > score["▁the"] > score["an"], "as the merges"


@pytest.mark.long
def test_llama_cpp_finds_the_same_pieces(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs pip install 'ispasp[gguf]'")
    if llama_cpp.absent():
        pytest.skip(llama_cpp.absent())
    from tokenizers import Tokenizer

    ispasp.export_gguf(tiny(vocab_size=300), tmp_path / "x.gguf", tokenizer=pieces(tmp_path), dtype="f32")
    texts = ["the thin hen and then", "é2 anthe", "  in the"]
    known = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    heard = llama_cpp.ask(tmp_path / "x.gguf", [1], texts=texts)
    assert heard.tokens == [known.encode(text).ids for text in texts]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf", reason="needs pip install 'ispasp[gguf]'")
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("bare")
    assert "bare.bin has no tokenizer" in command("export", "hf:bare", "bare.bin", "--to", "gguf").err
    letters(Path("bare"))
    done = command("export", "hf:bare", "small.gguf", "--dtype", "f32")
    assert done.out.startswith("wrote small.gguf"), done.err
    assert "small.gguf exists" in command("export", "hf:bare", "small.gguf").err
    fields = gguf.GGUFReader(tmp_path / "small.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert "tokenizer.ggml.tokens" not in gguf.GGUFReader(tmp_path / "bare.bin").fields


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "an MLP": (lambda: nn.Linear(3, 2), {}, InputError, "Linear is no Llama-type model .*'weight' has no place"),
    "GPT-NeoX": (lambda: tiny("GPTNeoX"), {}, InputError, "no Llama-type model.*export_onnx"),
    "no module": (lambda: "model", {}, InputError, "pass a torch.nn.Module"),
    "dtype": (tiny, {"dtype": "q4"}, InputError, 'dtype=\'q4\': pass "f16" or "f32"'),
    "no tokenizer": (tiny, {"tokenizer": "."}, InputError, "has no tokenizer.json"),
    "activation": (lambda: tiny(hidden_act="gelu"), {}, ExportError, "llama.cpp's llama would differ from LlamaFor"),
    "beyond float16": (lambda: scaled(tiny(), 1e6), {}, ExportError, 'beyond float16; .*pass dtype="f32"'),
    "tolerance": (tiny, {"tolerance": 0.0}, ExportError, "nothing was written"),
    "qwen3, mixed": (lambda: narrowed(tiny("Qwen3")), {}, InputError, "only in layers of one width"),
}


def narrowed(model: Any) -> Any:
    """One neuron less in the first layer."""
    for name, parameter in model.model.layers[0].mlp.named_parameters():
        parameter.data = parameter.data[:, 1:] if "down" in name else parameter.data[1:]
    return model


def scaled(model: Any, factor: float) -> Any:
    model.lm_head.weight.data.mul_(factor)
    return model


@pytest.mark.parametrize("name", BAD)
def test_bad_input_leaves_no_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="needs pip install 'ispasp[gguf]'")
    monkeypatch.chdir(tmp_path)
    make, options, error, text = BAD[name]
    with pytest.raises(error, match=text):
        ispasp.export_gguf(make(), tmp_path / "model.gguf", **options)
    assert not list(tmp_path.iterdir())


def edited(folder: Path, **changes: Any) -> Path:
    told = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(told | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits text in a way that has no name in llama.cpp"),
        ({"normalizer": {"type": "Lowercase"}}, "splits text in a way"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "is of type WordPiece, not BPE"),
        ({"model": None}, "cannot be read"),
        ({"added_tokens": [{"id": 100, "content": "x", "special": True}]}, "has token 100, the model has 100 rows"),
    ],
)
def test_tokenizers_that_llama_cpp_has_not(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs pip install 'ispasp[gguf]'")
    with pytest.raises(InputError, match=text):
        ispasp.export_gguf(tiny(), tmp_path / "x.gguf", tokenizer=edited(letters(tmp_path / "t"), **changes))
    assert not (tmp_path / "x.gguf").exists()


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ispasp\[gguf\]'"):
        ispasp.export_gguf(nn.Linear(4, 2), tmp_path / "model.gguf")


def test_absent_engine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(llama_cpp.FOLDER, str(tmp_path))
    with pytest.raises(MissingExtraError, match="node"):
        llama_cpp.ask(tmp_path / "model.gguf", [1])


TEXTS = ["The capital of France is Paris. The capital of Germany is", "It's 1234,   naïve 我想 🚀\n\n <|im_start|>x"]


@pytest.mark.long
@pytest.mark.parametrize(("plan", "arch"), [("uniform", "llama"), ("mixed", "deci")])
def test_pruned_smollm2_in_llama_cpp(plan: str, arch: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    pytest.importorskip("gguf", reason="needs pip install 'ispasp[gguf]'")
    if llama_cpp.absent() or not SMOLLM2.is_dir():
        pytest.skip(llama_cpp.absent() or "SmolLM2-135M is not in ISPASP_DATA")
    import_torchvision()
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    widths = {f"*.{i}.mlp*": 900 + 100 * (i % 3) for i in range(5, 25)} | {"*.7.self_attn": 1, "*.11.self_attn": 0}
    keep = widths if plan == "mixed" else {"*.mlp*": 1200, "*.self_attn": 2}
    small = pruned(model, keep)
    ispasp.export_gguf(small, tmp_path / "small.gguf", tokenizer=SMOLLM2, dtype="f32")
    heard = llama_cpp.ask(tmp_path / "small.gguf", ids[0].tolist(), 12, TEXTS)
    assert heard.tokens == [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = output_of(small, {"input_ids": ids, "use_cache": False})[0][0]
    assert float((heard.logits - expected).norm() / expected.norm()) < 1e-4
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    assert heard.greedy == small.generate(ids, **options)[0, ids.shape[1] :].tolist()
    assert _content(small, half=False).arch == arch
