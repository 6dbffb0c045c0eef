"""Prune tiny transformers of several families and save them, for `transformers_check.py`, which has no ispasp."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import ispasp
from ispasp.integrations.torchvision import import_torchvision

import_torchvision()
import transformers  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

IDS = torch.arange(16).reshape(2, 8) % 50 + 5
TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 6, "eos_token_id": None}
IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8)}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": None}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4}
UNEVEN = {"*.0.*": 0.5, "*.1.*": 0.75}
# A class, its config, a batch, what to keep, and the way that its folder is to open.
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], Any, str], ...] = (
    ("LlamaForCausalLM", GROUPED, {"input_ids": IDS}, 0.5, "plain"),
    ("LlamaForCausalLM", GROUPED, {"input_ids": IDS}, UNEVEN, "code"),
    ("Qwen2ForCausalLM", GROUPED, {"input_ids": IDS}, 0.5, "plain"),
    ("Qwen3ForCausalLM", GROUPED, {"input_ids": IDS}, UNEVEN, "code"),
    ("GPT2LMHeadModel", GPT2, {"input_ids": IDS}, 0.5, "code"),
    ("BertForMaskedLM", TEXT, {"input_ids": IDS}, {"*.intermediate.dense": 0.5}, "plain"),
    ("BertForMaskedLM", TEXT, {"input_ids": IDS}, 0.5, "code"),
    (
        "T5ForConditionalGeneration",
        {**T5, "decoder_start_token_id": 0},
        {"input_ids": IDS, "decoder_input_ids": IDS},
        0.5,
        "plain",
    ),
    ("ViTForImageClassification", {**TEXT, "image_size": 8, "patch_size": 4}, IMAGE, UNEVEN, "code"),
)


def save(folder: Path, cls: str, options: dict[str, Any], batch: dict[str, Any], keep: Any, way: str) -> None:
    """One folder, with a tokenizer and what the model says before it is saved."""
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**options)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    plan = ispasp.survey(model, batch).plan(keep)
    saved = ispasp.save(ispasp.apply_(model, plan), folder, plan, example=batch)
    assert saved.way == way, saved.note
    expected: dict[str, Any] = {"call": saved.note.split()[2].partition(".")[0], "way": way}
    expected |= {"batch": {name: tensor.tolist() for name, tensor in batch.items()}}
    with torch.no_grad():
        expected["logits"] = model(**batch).logits.tolist()
    if model.can_generate():
        told = {"do_sample": False, "pad_token_id": 0, "use_cache": False}
        expected["tokens"] = model.generate(batch["input_ids"], max_new_tokens=6, **told).tolist()
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")
    special = {"unk_token": "w0", "pad_token": "w1", "mask_token": "[MASK]"}
    words = models.WordLevel({"[MASK]": 2, **{f"w{i}": i for i in range(64) if i != 2}}, special["unk_token"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for number, case in enumerate(CASES):
        save(Path(sys.argv[1]) / f"{number}-{case[0]}-{case[-1]}", *case)
