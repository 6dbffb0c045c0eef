"""The tokenizer of a Hugging Face folder as the metadata that llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ispasp.errors import InputError, failing_as
from ispasp.files import is_regular, read_bytes

_NORMAL, _UNKNOWN, _CONTROL, _ADDED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's types of tokens
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE = {  # how a text is split, and llama.cpp's name for it
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_SPLIT.replace("NUMBER", r"\p{N}"), "Bytes"): "qwen2",
    (_SPLIT.replace("NUMBER", r"\p{N}{1,3}"), "Bytes"): "llama-bpe",
}
_REMEDY = "pass tokenizer=None for a file without one, and give llama.cpp token ids"


def vocabulary(folder: Path, rows: int, config: Any) -> dict[str, Any]:
    """Metadata of the tokenizer in a folder, for an embedding of this many rows."""
    file = folder / "tokenizer.json"
    if not is_regular(file):
        raise InputError(f"{folder} has no tokenizer.json: write it by tokenizer.save_pretrained(folder), or {_REMEDY}")
    with failing_as(InputError, f"{file} cannot be read", f"save it again, or {_REMEDY}"):
        told: Any = json.loads(read_bytes(file))
        model, added = told["model"], {token["id"]: token for token in told.get("added_tokens", ())}
        words = {number: token for token, number in model["vocab"].items()} if model["type"] == "BPE" else None
        if words is None:
            raise InputError(f"{file} is of type {model['type']}, not BPE: {_REMEDY}")
        words |= {number: token["content"] for number, token in added.items()}
        if max(words) >= rows:
            raise InputError(f"{file} has token {max(words)}, the model has {rows} rows: pass the model's own folder")
        kinds = {number: _CONTROL if token["special"] else _ADDED for number, token in added.items()}
        types = [kinds.get(i, _NORMAL if i in words else _UNUSED) for i in range(rows)]
        facts = {"tokens": [words.get(i, f"[PAD{i}]") for i in range(rows)], "token_type": types}
        facts |= _sentencepiece(told, facts) if model.get("byte_fallback") else _bytes(told, file)
        named, template = _settings(folder)
        facts |= _special(named, told, words, config)
        chat = {} if template is None else {"tokenizer.chat_template": template}
        return {f"tokenizer.ggml.{name}": fact for name, fact in facts.items()} | chat


def _bytes(told: Any, file: Path) -> dict[str, Any]:
    """Byte-level BPE, as of GPT-2, Llama 3, Qwen and SmolLM."""
    steps = told.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    pre = _PRE.get(tuple(_step(step) for step in steps))
    normalizer = (told.get("normalizer") or {"type": "NFC"})["type"]  # llama.cpp leaves NFC to the caller
    if pre is None or normalizer != "NFC" or bool(told["model"].get("ignore_merges")) != (pre == "llama-bpe"):
        raise InputError(f"{file} splits text in a way that has no name in llama.cpp: {_REMEDY}")
    if not told["model"]["merges"]:
        raise InputError(f"{file} has no merges, which llama.cpp needs: {_REMEDY}")
    return {"model": "gpt2", "pre": pre, "merges": _merges(told)}


def _step(step: Any) -> str:
    """ByteLevel with or without its regular expression, Digits one by one, or the regular expression of a split."""
    if step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
        return "ByteLevel" if step.get("use_regex", True) else "Bytes"
    if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(step["pattern"].get("Regex"))
    return "Digits" if step == {"type": "Digits", "individual_digits": True} else "unknown"


def _merges(told: Any) -> list[str]:
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in told["model"]["merges"]]


def _sentencepiece(told: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """BPE with bytes for unknown characters, as of Llama 2 and Mistral: llama.cpp merges the token of highest score."""
    rank = {merge.replace(" ", "", 1): -float(i) for i, merge in reversed(list(enumerate(_merges(told))))}
    unknown = told["model"].get("unk_token")
    types = [
        _BYTE if len(token) == 6 and token.startswith("<0x") else _UNKNOWN if token == unknown else kind
        for token, kind in zip(facts["tokens"], facts["token_type"], strict=True)
    ]
    steps = [told.get("normalizer") or {}, told.get("pre_tokenizer") or {}]
    steps += [step for each in steps for step in each.get("normalizers", ())]
    prefix = any(s.get("type") == "Prepend" or s.get("prepend_scheme") in ("first", "always") for s in steps)
    scores = [rank.get(token, 0.0) for token in facts["tokens"]]
    return {"model": "llama", "pre": "default", "scores": scores, "token_type": types, "add_space_prefix": prefix}


def _special(named: dict[str, Any], told: Any, words: dict[int, str], config: Any) -> dict[str, Any]:
    """Ids of the tokens that begin, end and pad a text, and whether the tokenizer adds them."""
    found: dict[str, Any] = {}
    for ours, theirs in {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}.items():
        name = named.get(f"{theirs}_token")
        name = name.get("content") if isinstance(name, dict) else name
        known = getattr(config, f"{theirs}_token_id", None)
        known = known[0] if isinstance(known, list) else known
        number = next((number for number, word in words.items() if word == name), known)
        found |= {} if number is None else {f"{ours}_token_id": int(number)}
    last = told.get("post_processor") or {}
    single = [part for step in (last, *last.get("processors", ())) for part in step.get("single", ())]
    ends = {"bos": single[:1], "eos": single[-1:]}
    return found | {f"add_{name}_token": any("SpecialToken" in part for part in parts) for name, parts in ends.items()}


def _settings(folder: Path) -> tuple[dict[str, Any], str | None]:
    """tokenizer_config.json, and the template of chats, which newer folders have in a file of its own."""
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    named = json.loads(read_bytes(file)) if is_regular(file) else {}
    text = read_bytes(template).decode() if is_regular(template) else named.get("chat_template")
    return named, text if isinstance(text, str) else None
