"""Pruned models where ispasp is absent: `tests/wheel/transformers_run` runs this in an environment of its own."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model


def opened(folder: Path, expected: dict[str, Any]) -> Any:
    """The model, as its folder's note says."""
    trusted = {"trust_remote_code": True} if expected["way"] == "code" else {}
    return getattr(transformers, expected["call"]).from_pretrained(folder, **trusted).eval()


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batch).logits
    return found


def generates(model: Any, ids: torch.Tensor, expected: dict[str, Any]) -> None:
    """Greedy tokens are those of the pruned model: with a cache, a static one, and none."""
    static = {"cache_implementation": "static", "disable_compile": True}
    for how in ({}, static, {"use_cache": False}):
        found = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **how)
        assert found.tolist() == expected["tokens"], (how, found)


def answers(folder: Path, expected: dict[str, Any]) -> None:
    """Pipelines open the folder by its name."""
    words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"model": str(folder), "tokenizer": words, "trust_remote_code": expected["way"] == "code"}
    if expected["call"] == "AutoModelForCausalLM":
        found = transformers.pipeline("text-generation", **options)
        assert found("w5", max_new_tokens=2)[0]["generated_text"].startswith("w5")
    if expected["call"] == "AutoModelForMaskedLM":
        found = transformers.pipeline("fill-mask", **options)
        assert len(found("[MASK]", top_k=3)) == 3


def learns(folder: Path, expected: dict[str, Any], batch: dict[str, torch.Tensor], out: Path) -> Any:
    """Two steps of the Trainer change the model."""
    model = opened(folder, expected)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    labels = batch.get("input_ids", torch.zeros(2, dtype=torch.long))
    rows = [{**{name: t[i] for name, t in batch.items()}, "labels": labels[i]} for i in range(2)]
    options = transformers.TrainingArguments(out, max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)
    transformers.Trainer(model, options, train_dataset=rows).train()
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
    return model.eval()


def adapts(model: Any, batch: dict[str, torch.Tensor], out: Path) -> None:
    """LoRA on all linear layers has gradients, and opens again on the pruned model."""
    lora: Any = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    lora(**batch).logits.square().mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in lora.parameters() if p.requires_grad)
    lora.save_pretrained(out)
    wanted = logits(lora.eval(), batch)
    again: Any = PeftModel.from_pretrained(lora.unload(), out).eval()
    torch.testing.assert_close(logits(again, batch), wanted)


def check(folder: Path, out: Path) -> str:
    """All of it, for one folder."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    batch = {name: torch.tensor(rows) for name, rows in expected["batch"].items()}
    model = opened(folder, expected)
    torch.testing.assert_close(logits(model, batch), torch.tensor(expected["logits"]))
    if "tokens" in expected:
        generates(model, batch["input_ids"], expected)
    answers(folder, expected)
    trained = learns(folder, expected, batch, out / "trained")
    trained.save_pretrained(out / "again")
    again = opened(out / "again", expected)
    assert torch.equal(logits(again, batch), logits(trained, batch))
    adapts(again, batch, out / "lora")
    layers = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("per_layer_config")
    if layers:
        sizes = [(n, name, size) for n, each in layers.items() for name, size in each.items()]
        assert all(getattr(model.config.per_layer_config[int(n)], name) == size for n, name, size in sizes)
    return f"{folder.name}: {expected['call']}{', per_layer_config' if layers else ''}"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    assert find_spec("ispasp") is None
    for each in sorted(Path(sys.argv[1]).iterdir()):
        print(check(each, Path("out") / each.name), flush=True)
    assert not any(name.partition(".")[0] == "ispasp" for name in sys.modules)
    print(f"pruned models work without ispasp (torch {torch.__version__}, transformers {transformers.__version__})")
