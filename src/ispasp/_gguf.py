"""`ispasp.export_gguf`: write a Llama-type model for llama.cpp, and compare what the file computes with torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ispasp._gguf_tokenizer import vocabulary
from ispasp.errors import ExportError, InputError, failing_as, needed
from ispasp.files import make_folder, publish, workspace
from ispasp.graph.state import one_at_a_time, plain
from ispasp.result import Result
from ispasp.surgery.verify import output_of, relative_error

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{"self_attn.o_proj": "attn_output"} | {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
_EXTRA = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")  # only llama and deci read these
_NEOX = ("qwen2", "qwen3")  # rotate entries i and i + D / 2, as transformers does; the others 2 i and 2 i + 1
_ROUNDING = {"f32": 1e-4, "f16": 2e-2, "torch.float16": 2e-2, "torch.bfloat16": 1e-1}  # as surgery's proof allows
_ROPES = ("default", "linear", "llama3")  # the others depend on the length of the text, or scale the scores


def export_gguf(
    model: nn.Module | Result,
    path: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: str = "f16",
    tolerance: float | None = None,
) -> float:
    """Write a Llama-type model of transformers as GGUF and return the relative error of the file against torch.

    Layers of one width are written as architecture llama, qwen2 or qwen3; layers of several widths as deci, whose
    widths are lists. `tokenizer` is a folder with a tokenizer.json; without it, the file has no tokenizer. `dtype` is
    "f16" or "f32". The file's tensors are run as llama.cpp runs them, and compared with the model on 32 tokens: above
    `tolerance` (default 1e-4 for f32, 2e-2 for f16, and never less than the rounding of the model's own
    dtype) this raises `ExportError` and writes nothing.
    """
    if dtype not in ("f16", "f32"):
        raise InputError(f'dtype={dtype!r}: pass "f16" or "f32"; llama-quantize of llama.cpp makes smaller ones')
    gguf, path = needed("gguf", "exporting to GGUF", "gguf"), Path(path)
    with one_at_a_time(), plain(model.model if isinstance(model, Result) else model) as inner:
        with failing_as(InputError, f"{type(inner).__name__} is no Llama-type model", "write it with export_onnx"):
            content = _content(inner, half=dtype == "f16")
        rows, words = content.facts["vocab_size"], {"tokenizer.ggml.model": "none"}
        words = words if tokenizer is None else vocabulary(Path(tokenizer), rows, inner.config)
        limit = max(_ROUNDING[dtype], _ROUNDING.get(str(inner.dtype), 0)) if tolerance is None else tolerance
        error = _difference(content, inner)
        if not error <= limit:
            wrong = f"llama.cpp's {content.arch} would differ from {type(inner).__name__} by {error:.1e}"
            remedy = (
                'pass dtype="f32" if this is small; if not, the model is no plain Llama, so write it with export_onnx'
            )
            raise ExportError(f"{wrong}, more than {limit:.0e}; nothing was written: {remedy}")
        with failing_as(ExportError, f"cannot write {path}", "check the path and the free space"):
            make_folder(path.parent)
            with workspace(path.parent) as fresh:
                _write(gguf, fresh / path.name, content, words)
                publish(fresh / path.name, path)
    return error


@dataclass(frozen=True, eq=False)
class _Content:
    """What a file holds: its architecture, metadata under the architecture's name, and tensors."""

    arch: str
    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def _content(model: Any, *, half: bool) -> _Content:
    outer, layers = _named(model)
    config, (D, theta, factors) = model.config, _rope(model)
    if not torch.allclose(factors, torch.ones_like(factors), rtol=1e-4):
        outer["rope_freqs.weight"] = factors.float()
    layers = [_filled(layer, D, first=not i) for i, layer in enumerate(layers)]
    widths = [_widths(layer, D) for layer in layers]
    E, uniform = outer["token_embd.weight"].shape[1], len(set(widths)) == 1
    arch = _arch(config.model_type, outer, layers, uniform=uniform, square=widths[0][0] * D == E)
    if arch not in _NEOX:
        layers = [_interleaved(layer, D) for layer in layers]
    heads, groups, hidden = (each[0] if uniform else list(each) for each in zip(*widths, strict=True))
    facts = {
        "vocab_size": len(outer["token_embd.weight"]),
        "context_length": min(config.max_position_embeddings, getattr(config, "sliding_window", None) or 2**31 - 1),
        **{"embedding_length": E, "block_count": len(layers), "feed_forward_length": hidden},
        **{"attention.head_count": heads, "attention.head_count_kv": groups},
        **{"attention.key_length": D, "attention.value_length": D, "rope.dimension_count": D},
        **{"attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "rope.freq_base": theta},
    }
    inner = {f"blk.{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.items()}
    dtypes = torch.float32, torch.float16 if half else torch.float32  # of vectors, of matrices
    tensors = {name: x.to("cpu", dtypes[x.ndim > 1]) for name, x in (outer | inner).items()}
    beyond = [name for name, x in tensors.items() if x.dtype == torch.float16 and not x.isfinite().all()]
    if beyond:
        raise ExportError(f'{beyond[0]} has entries beyond float16; nothing was written: pass dtype="f32"')
    return _Content(arch, facts, tensors)


def _rope(model: Any) -> tuple[int, float, Tensor]:
    """The size D of heads, the base of their frequencies, and by what each frequency is divided (D / 2)."""
    config, rotary = model.config, model.model.rotary_emb
    kind, inverse = getattr(rotary, "rope_type", "default"), rotary.inv_freq.detach().cpu().double()
    D, sizes = 2 * len(inverse), {layer.self_attn.head_dim for layer in model.model.layers}
    if kind not in _ROPES or sizes != {D}:
        wrong = f"rope of type {kind!r} over {D} entries of heads of {sorted(sizes)} cannot be written as GGUF"
        raise InputError(f"{wrong}: it takes {', '.join(_ROPES)} over whole heads; write the model with export_onnx")
    theta = float(getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"])
    return D, theta, theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D) / inverse


def _named(model: Any) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The model's tensors by their names in GGUF: outside of layers, and in each layer."""
    outer: dict[str, Tensor] = {}
    layers: dict[int, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():  # a tied lm_head comes once, as the embedding
        part, _, kind = name.rpartition(".")
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", part)
        if found and found[2] in _INNER:
            layers.setdefault(int(found[1]), {})[f"{_INNER[found[2]]}.{kind}"] = parameter.detach()
        elif part in _OUTER and kind == "weight":
            outer[f"{_OUTER[part]}.{kind}"] = parameter.detach()
        else:
            layers.clear()
            break
    least = {f"{name}.weight" for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "ffn_norm", "ffn_gate")}
    if "token_embd.weight" not in outer or not layers or not all(least <= set(layer) for layer in layers.values()):
        wrong = f"{type(model).__name__} is no Llama-type model of transformers (its {name!r} has no place in one)"
        remedy = "pass a causal model such as Llama, Mistral, Qwen2 or Qwen3, or write this one with export_onnx"
        raise InputError(f"{wrong}: {remedy}")
    return outer, [layers[i] for i in sorted(layers)]


def _filled(layer: dict[str, Tensor], D: int, *, first: bool) -> dict[str, Tensor]:
    """Branches without units. Attention goes where llama.cpp can do without it; others get one unit of zeros.

    llama.cpp takes the size of heads from its first layer, skips the bias of attention without heads, and skips the
    attention of a layer without neurons.
    """
    if not first and not len(layer["attn_q.weight"]) and "attn_output.bias" not in layer:
        layer = {name: tensor for name, tensor in layer.items() if not name.startswith("attn_")}
    for name, tensor in layer.items():
        least = D if name.startswith("attn_") else 1
        if not tensor.numel():
            layer = {**layer, name: tensor.new_zeros([n or least for n in tensor.shape])}
    return layer


def _widths(layer: dict[str, Tensor], D: int) -> tuple[int, int, int]:
    """Heads, key/value heads and neurons."""
    q, k = (len(layer[name]) // D if name in layer else 0 for name in ("attn_q.weight", "attn_k.weight"))
    return q, k, len(layer["ffn_gate.weight"])


def _arch(kind: str, outer: dict[str, Tensor], layers: list[dict[str, Tensor]], *, uniform: bool, square: bool) -> str:
    """The architecture that reads all of these tensors."""
    extra = any(name in layer for layer in layers for name in _EXTRA) or "rope_freqs.weight" in outer
    native = uniform and not extra
    if any("attn_q_norm.weight" in layer for layer in layers):
        if not native:
            wrong = "llama.cpp reads norms of queries and keys only in layers of one width, without new biases"
            remedy = "prune all layers to one width (keep=0.5) with bias='keep', or write the model with export_onnx"
            raise InputError(f"{wrong}: {remedy}")
        return "qwen3"
    if kind == "qwen2" and native and square:
        return "qwen2"
    return "llama" if uniform else "deci"


def _interleaved(layer: dict[str, Tensor], D: int) -> dict[str, Tensor]:
    """Queries and keys with entries i and i + D / 2 of each head as neighbours."""

    def neighbours(x: Tensor) -> Tensor:
        return x.reshape(-1, 2, D // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

    return {name: neighbours(x) if name.startswith(("attn_q.", "attn_k.")) else x for name, x in layer.items()}


def _write(gguf: Any, path: Path, content: _Content, words: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, content.arch)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    try:
        writer.add_file_type(int(content.tensors["token_embd.weight"].dtype == torch.float16))
        for name, value in ({f"{content.arch}.{name}": fact for name, fact in content.facts.items()} | words).items():
            add.get(type(value), writer.add_array)(name, value)
        for name, tensor in content.tensors.items():
            writer.add_tensor(name, tensor.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _difference(content: _Content, model: Any) -> float:
    """Relative error of the logits that llama.cpp would compute against the model's, on 32 tokens."""
    ids = torch.arange(32) * 997 % content.facts["vocab_size"]
    expected, *_ = output_of(model, {"input_ids": ids[None].to(model.device), "use_cache": False})
    with torch.no_grad():
        return relative_error([_run(content, ids)], [expected[0].float().cpu()])


def _run(content: _Content, ids: Tensor) -> Tensor:
    """Logits for token ids (T), computed from GGUF's tensors as llama.cpp does it: (T, vocabulary)."""
    stored, fact, neox = content.tensors, content.facts, content.arch in _NEOX

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, stored[f"{name}.weight"].float(), stored.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], stored[f"{name}.weight"], fact["attention.layer_norm_rms_epsilon"])

    def rotate(x: Tensor) -> Tensor:  # (H, T, D)
        a, b = x.chunk(2, -1) if neox else (x[..., ::2], x[..., 1::2])
        pair = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
        return torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)

    D = fact["rope.dimension_count"]
    frequency = fact["rope.freq_base"] ** (-torch.arange(0, D, 2) / D) / stored.get("rope_freqs.weight", 1)
    angles = torch.arange(len(ids))[:, None] * frequency  # (T, D / 2)
    x = stored["token_embd.weight"][ids].float()
    for i in range(fact["block_count"]):
        blk = f"blk.{i}"
        if f"{blk}.attn_q.weight" in stored:
            h = norm(x, f"{blk}.attn_norm")
            q, k, v = (linear(h, f"{blk}.attn_{c}").view(len(ids), -1, D).transpose(0, 1) for c in "qkv")
            if f"{blk}.attn_q_norm.weight" in stored:
                q, k = norm(q, f"{blk}.attn_q_norm"), norm(k, f"{blk}.attn_k_norm")
            h = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
            x = x + linear(h.transpose(0, 1).flatten(1), f"{blk}.attn_output")
        h = norm(x, f"{blk}.ffn_norm")
        x = x + linear(functional.silu(linear(h, f"{blk}.ffn_gate")) * linear(h, f"{blk}.ffn_up"), f"{blk}.ffn_down")
    return linear(norm(x, "output_norm"), "output" if "output.weight" in stored else "token_embd")
