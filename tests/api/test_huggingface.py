"""Saved Hugging Face models open without ispasp: by their config, else by code in the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ispasp
from ispasp import _huggingface
from ispasp._card import MARK
from ispasp.integrations.torchvision import import_torchvision
from ispasp_lab.data import data_folder

import_torchvision()
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

IDS = torch.arange(16).reshape(2, 8) % 50 + 3
TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "llama": (
        "LlamaForCausalLM",
        {**TEXT, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 6, "eos_token_id": None},
        {"input_ids": IDS},
    ),
    "bert": ("BertForMaskedLM", {**TEXT, "intermediate_size": 24}, {"input_ids": IDS}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}, {"input_ids": IDS}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 1, "num_heads": 4},
        {"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "vit": (
        "ViTForImageClassification",
        {**TEXT, "intermediate_size": 24, "image_size": 8, "patch_size": 4},
        {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8)},
    ),
}


@pytest.fixture(autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of folders is copied here, not into the user's cache."""
    cache = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr(sys, "path", [*sys.path])


def dense(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    cls, options, _ = MODELS[name]
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**options, **more)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def saved(name: str, folder: Path, keep: Any = 0.5, **options: Any) -> tuple[Any, ispasp.Plan, Any]:
    model, batch = dense(name), MODELS[name][2]
    plan = ispasp.survey(model, batch, **options).plan(keep)
    ispasp.apply_(model, plan)
    return model, plan, ispasp.save(model, folder, plan, example=batch)


def same(one: Any, other: Any, batch: Any) -> bool:
    with torch.no_grad():
        a, b = one.eval()(**batch), other(**batch)
    return bool(torch.equal(a.logits, b.logits))


def test_a_config_says_uniform_widths(tmp_path: Path) -> None:
    model, _, folder = saved("llama", tmp_path)
    assert (folder.way, folder.note) == ("plain", "opens with AutoModelForCausalLM.from_pretrained(folder)")
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
    assert wanted.items() <= config.items()
    assert "auto_map" not in config and not (tmp_path / "modeling_pruned.py").exists()
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is transformers.LlamaForCausalLM
    assert same(opened, model, {"input_ids": IDS})
    assert same(ispasp.load(tmp_path), model, {"input_ids": IDS})


@pytest.mark.parametrize(
    ("name", "kinds", "auto"),
    [
        ("bert", "neuron", "AutoModelForMaskedLM"),
        ("gpt2", "neuron", "AutoModelForCausalLM"),
        ("t5", ("neuron", "head"), "AutoModelForSeq2SeqLM"),
        ("vit", "neuron", "AutoModelForImageClassification"),
    ],
)
def test_families_whose_config_says_it(name: str, kinds: Any, auto: str, tmp_path: Path) -> None:
    model, _, folder = saved(name, tmp_path, kinds=kinds)
    assert folder.note == f"opens with {auto}.from_pretrained(folder)"
    assert same(getattr(transformers, auto).from_pretrained(folder), model, MODELS[name][2])


@pytest.mark.parametrize(("name", "auto"), [("gpt2", "AutoModelForCausalLM"), ("bert", "AutoModelForMaskedLM")])
def test_code_where_the_config_cannot(name: str, auto: str, tmp_path: Path) -> None:
    """Both derive the size of a head from the number of heads."""
    model, _, folder = saved(name, tmp_path)
    assert folder.way == "code" and f"opens with {auto}.from_pretrained(folder, trust_remote_code=True)" in folder.note
    assert "Config cannot say the size of" in folder.note
    opened = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    assert same(opened, model, MODELS[name][2])
    assert same(ispasp.load(folder), model, MODELS[name][2])


def test_code_for_layers_of_different_widths(tmp_path: Path) -> None:
    model, _, folder = saved("llama", tmp_path / "one", {"*.0.*": 0.5, "*.1.mlp*": 7})
    assert folder.way == "code" and "layers have different widths" in folder.note
    assert "ispasp" not in (folder / "modeling_pruned.py").read_text().replace("`ispasp.save`", "")
    layers = json.loads((folder / "config.json").read_text())["per_layer_config"]
    first = {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert layers == {"0": first, "1": {"intermediate_size": 7}}
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert same(opened, model, {"input_ids": IDS})

    def continued(model: Any, **options: Any) -> list[list[int]]:
        ids = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0, **options)
        return [row[8:] for row in ids.tolist()]

    expected = continued(model, use_cache=False)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert all(continued(opened, **how) == expected for how in ({}, {"use_cache": False}, static))
    opened.save_pretrained(tmp_path / "two")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two", trust_remote_code=True)
    assert same(again, model, {"input_ids": IDS})
    body = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(body(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_a_folder_with_code_opens_as_it_was_saved_or_not_at_all(tmp_path: Path) -> None:
    """The config holds the dense sizes, so whatever leaves out the code meets tensors of other shapes."""
    model, _, folder = saved("llama", tmp_path / "one", {"*.0.*": 0.5, "*.1.mlp*": 7})
    auto, native = transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM
    for cls in (auto, native, transformers.MistralForCausalLM):
        with pytest.raises(RuntimeError, match="mismatch"):
            cls.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for keys in (["pruned_widths"], ["auto_map"], ["pruned_widths", "auto_map", "per_layer_config"]):
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in keys}))
        with pytest.raises((RuntimeError, ValueError)):
            auto.from_pretrained(folder, trust_remote_code=True)
    with pytest.warns(UserWarning, match=r"config\.json is not the one"):
        assert same(ispasp.load(folder), model, {"input_ids": IDS})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_pruned.py").unlink()
    with pytest.raises(OSError, match="modeling_pruned"):
        auto.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained(tmp_path / "two")  # knows nothing of widths
    with pytest.raises(RuntimeError, match="mismatch"):
        native.from_pretrained(tmp_path / "two")


@pytest.mark.long
def test_outputs_that_differ_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then transformers refuses the folder, ispasp.load opens it, and the note says why."""
    monkeypatch.setattr(_huggingface, "relative_error", lambda found, expected: 0.5)
    model, _, folder = saved("llama", tmp_path)
    assert folder.way == "ispasp"
    assert "opens with ispasp.load(folder) (opened by its config its outputs differ by 5e-01" in folder.note
    assert not (folder / "modeling_pruned.py").exists()
    with pytest.raises(RuntimeError, match="mismatch"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert same(ispasp.load(folder), model, {"input_ids": IDS})


@pytest.mark.long
def test_one_way_after_another_in_a_folder(tmp_path: Path) -> None:
    """What an earlier save left does not mix with the new one."""
    saved("llama", tmp_path, {"*.0.*": 0.5})
    assert (tmp_path / "modeling_pruned.py").exists()
    model, _, folder = saved("llama", tmp_path)
    assert folder.way == "plain" and not (tmp_path / "modeling_pruned.py").exists()
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), model, {"input_ids": IDS})


def test_a_config_that_vanished_before_the_weights_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is interrupted over another one never pairs a config with the weights of the other."""
    saved("llama", tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(ispasp.errors.SaveError, match="no space left"):
        saved("llama", tmp_path, 0.75)
    monkeypatch.undo()
    assert not (tmp_path / "config.json").exists()
    assert ispasp.load(tmp_path).config.intermediate_size == 24


def test_without_an_example_text_and_images_are_made_up(tmp_path: Path) -> None:
    model = dense("vit")
    plan = ispasp.survey(model, MODELS["vit"][2], kinds="neuron").plan(0.5)
    ispasp.apply_(model, plan)
    assert ispasp.save(model, tmp_path, plan).way == "plain"
    model.main_input_name = "input_features"
    folder = ispasp.save(model, tmp_path, plan)
    assert "outputs cannot be compared without a batch: pass example=" in folder.note


def test_results_write_a_card(tmp_path: Path) -> None:
    model = dense("llama")
    model.config._name_or_path = "some|one/<b>"
    result = ispasp.prune(model, [{"input_ids": IDS}], bias="keep", ridge=0.01, progress=False)
    assert not result.plan.structure.biases
    folder = result.save_pretrained(tmp_path)
    assert folder.way == "plain"
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n") and "<b>" not in text
    assert f"{result.cost.params:,}" in text and "| model.layers.0.mlp.gate\\_proj | 24 | 12 |" in text
    (tmp_path / "README.md").write_text(text.replace(MARK, "mine"))
    result.save_pretrained(tmp_path)
    assert "mine" in (tmp_path / "README.md").read_text()


def test_biases_that_the_config_has(tmp_path: Path) -> None:
    """Llama's `mlp_bias` and `attention_bias` add more of them than were gained: the others are zeros."""
    result = ispasp.prune(dense("llama"), [{"input_ids": IDS}], ridge=0.01, progress=False)
    assert result.plan.structure.biases
    folder = ispasp.save(result, tmp_path)
    assert folder.way == "plain"
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(opened, result.model, {"input_ids": IDS}) and same(ispasp.load(tmp_path), opened, {"input_ids": IDS})


def test_a_uniform_budget(tmp_path: Path) -> None:
    model = dense("llama")
    result = ispasp.prune(model, [{"input_ids": IDS}], ispasp.Params(0.7), uniform=True, progress=False)
    assert not result.plan.structure.biases and result.cost.params <= 0.7 * result.cost.dense_params
    widths = {(layer.kind, layer.units, layer.kept) for layer in result.layers}
    assert len(widths) == len({kind for kind, _, _ in widths})
    assert ispasp.save(result, tmp_path).way == "plain"


def test_tokenizers_come_along(tmp_path: Path) -> None:
    source, target = tmp_path / "dense", tmp_path / "small"
    dense("gpt2").save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "token").write_text("secret")
    model = transformers.GPT2LMHeadModel.from_pretrained(source)
    plan = ispasp.survey(model, MODELS["gpt2"][2], kinds="neuron").plan(0.5)
    ispasp.save(ispasp.apply_(model, plan), target, plan)
    assert (target / "tokenizer.json").read_text() == "{}" and not (target / "token").exists()
    assert str(tmp_path) not in (target / "README.md").read_text() + (target / "config.json").read_text()


WITHOUT = """
import sys, types
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ispasp":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
try:
    import torchvision
except RuntimeError:  # a wheel for another PyTorch, see ispasp.integrations.torchvision
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass
"""
USE = """
import json
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline
folder, out, expected = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = torch.tensor(expected["ids"])
tokens = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
assert tokens.tolist() == expected["tokens"], tokens
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1").save_pretrained(folder)
ask = pipeline("text-generation", model=folder, trust_remote_code=True)
assert ask("w5", max_new_tokens=2)[0]["generated_text"].startswith("w5")
rows = [{"input_ids": row, "labels": row} for row in ids]
options = TrainingArguments(out + "/trained", max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)
before = model.model.layers[0].mlp.down_proj.weight.clone()
Trainer(model, options, train_dataset=rows).train()
assert not torch.equal(before, model.model.layers[0].mlp.down_proj.weight)
model.save_pretrained(out + "/again")
again = AutoModelForCausalLM.from_pretrained(out + "/again", trust_remote_code=True)
assert torch.equal(again(ids).logits, model.eval()(ids).logits)
from peft import LoraConfig, get_peft_model
lora = get_peft_model(again, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
lora(input_ids=ids, labels=ids).loss.backward()
assert all(p.grad is not None for p in lora.parameters() if p.requires_grad)
assert lora.generate(input_ids=ids, max_new_tokens=2, pad_token_id=0).shape[1] == ids.shape[1] + 2
assert not any(name.partition(".")[0] == "ispasp" for name in sys.modules)
print("used")
"""


def run_without_ispasp(code: str, *arguments: str, home: Path) -> str:
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("way", "keep"), [("plain", 0.5), ("code", {"*.0.*": 0.5, "*.1.mlp*": 7})])
def test_in_a_process_without_ispasp(way: str, keep: Any, tmp_path: Path) -> None:
    """generate, pipeline, Trainer, save_pretrained and LoRA."""
    model, _, folder = saved("llama", tmp_path / "small", keep)
    assert folder.way == way
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    expected = json.dumps({"ids": IDS.tolist(), "tokens": tokens})
    assert "used" in run_without_ispasp(USE, str(folder), str(tmp_path), expected, home=tmp_path / "home")


SMOLLM = data_folder() / "SmolLM2-135M"


@pytest.mark.long
@pytest.mark.skipif(not SMOLLM.is_dir(), reason=f"{SMOLLM} is not there")
def test_smollm2_opens_with_plain_transformers(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM, dtype=torch.float32)
    ids = torch.arange(16).reshape(2, 8) + 100
    plan = ispasp.survey(model, {"input_ids": ids}).plan(0.75)
    folder = ispasp.save(ispasp.apply_(model, plan), tmp_path / "small", plan, example={"input_ids": ids})
    assert folder.way == "plain" and (folder / "tokenizer.json").is_file()
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    code = """
import json
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(json.dumps(model.generate(torch.tensor(json.loads(sys.argv[2])), max_new_tokens=4, do_sample=False).tolist()))
"""
    found = run_without_ispasp(code, str(folder), json.dumps(ids.tolist()), home=tmp_path / "home")
    assert json.loads(found.splitlines()[-1]) == tokens
