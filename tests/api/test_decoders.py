"""Language models from Python with a plain batch: caches are switched off for the time being."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ispasp
from ispasp.integrations.torchvision import import_torchvision

pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
import_torchvision()  # transformers imports it where it is installed
transformers: Any = importlib.import_module("transformers")
IDS = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(0))


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": IDS}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": IDS, "decoder_input_ids": IDS[:, :6]}


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sound = torch.randn(4, 8, 40, generator=torch.Generator().manual_seed(0))
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": sound,
        "decoder_input_ids": IDS[:, :6],
    }


Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


def generated(model: Any, batch: dict[str, Any], *, use_cache: bool) -> torch.Tensor:
    """Five tokens that follow the batch."""
    prompt = {name: value for name, value in batch.items() if not name.startswith("decoder")}
    model.generation_config.pad_token_id = 0
    return model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=use_cache)


@pytest.mark.parametrize("build", [llama, gpt2, t5, whisper])
def test_a_plain_batch_is_enough(build: Build) -> None:
    torch.manual_seed(0)
    model, batch = build()
    assert model.config.use_cache
    settings = model.generation_config.to_dict()
    result = ispasp.prune(model, [batch], 0.5, progress=False)
    pruned = result.model.eval()
    assert model.config.use_cache
    assert pruned.config.use_cache
    assert pruned.generation_config.to_dict() == settings
    assert result.cost.params < 0.9 * result.cost.dense_params
    assert result.evidence.holds
    assert pruned(**batch).past_key_values is not None
    found = generated(pruned, batch, use_cache=True)
    assert torch.equal(found, generated(pruned, batch, use_cache=False))


def test_labels_may_stand_for_the_inputs_of_a_decoder() -> None:
    model, batch = t5()
    labelled = {"input_ids": IDS, "labels": IDS[:, :6]}
    plain, found = ispasp.survey(model, batch), ispasp.survey(model, labelled)
    assert [d.name for d in found.dimensions] == [d.name for d in plain.dimensions]


def test_surgery_alone_and_its_proof_take_a_plain_batch() -> None:
    model, batch = gpt2()
    plan = ispasp.survey(model, batch).plan(0.5)
    size = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in ispasp.apply_(model, plan, batch).parameters()) < size
    assert model.config.use_cache


def test_inputs_with_a_cache() -> None:
    model, batch = llama()
    found = ispasp.survey(model, {**batch, "use_cache": True, "past_key_values": None})
    assert found.dimensions
    filled = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ispasp.errors.InputError, match="holds a filled cache, 'past_key_values': leave it out"):
        ispasp.survey(model, {**batch, "past_key_values": filled})


def test_the_cache_is_on_again_after_a_failure() -> None:
    model, _ = llama()
    with pytest.raises(ispasp.IspaspError):
        ispasp.prune_(model, [{"input_ids": torch.ones(2, 3)}], 0.5, progress=False)
    assert model.config.use_cache
