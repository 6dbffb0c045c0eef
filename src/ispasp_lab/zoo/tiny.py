"""Tiny configurations and batches that the transformers cases share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import image, tokens

Options = dict[str, Any]
Batch = dict[str, Tensor]
Row = tuple[str, Options, Callable[[], Batch]]
"""Model class, configuration and batch."""

# The names that most configurations share, and those of the families that have their own.
ENCODER: Options = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_labels": 4,
}
DECODER: Options = {
    **{k: v for k, v in ENCODER.items() if k != "num_labels"},
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GQA: Options = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
GPT: Options = {
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Options = {**DECODER, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
PATCHES: Options = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 4,
}
WINDOWS: Options = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 4,
}
PYRAMID: Options = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 4}
SEQ2SEQ: Options = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5: Options = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
SPEECH: Options = {
    **ENCODER,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
}
STATE: Options = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "expand": 2}


def text(**more: Callable[[], Tensor]) -> Callable[[], Batch]:
    """Return a maker of token ids and what else the model takes."""
    return lambda: {"input_ids": tokens()(), **{name: make() for name, make in more.items()}}


def padded() -> Tensor:
    """Return an attention mask whose second sequence ends early."""
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return mask


def pixels(size: int = 32) -> Callable[[], Batch]:
    """Return a maker of two images."""
    return lambda: {"pixel_values": image(size)()}


def mel() -> Batch:
    """Return two spectrograms and what the decoder has said so far."""
    return {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": tokens()()}


def wave() -> Batch:
    """Return two pieces of raw audio."""
    return {"input_values": torch.randn(2, 800)}


TEXT, PADDED = text(), text(attention_mask=padded)
PAIR, IMAGE = text(decoder_input_ids=tokens(6)), pixels()
