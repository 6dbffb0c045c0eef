"""Hugging Face transformers, each in a tiny configuration of its own class."""

from collections.abc import Callable

from torch import nn

from ispasp.integrations.torchvision import import_torchvision

from . import perception
from .case import Case, case
from .tiny import DECODER, ENCODER, EXPERTS, GPT, NO_GQA, PADDED, PAIR, SEQ2SEQ, STATE, T5, TEXT, Options, Row

# fmt: off
ROWS: dict[str, Row] = {
    # encoders
    "bert": ("BertForSequenceClassification", ENCODER, TEXT),
    "bert_padded": ("BertForSequenceClassification", ENCODER, PADDED),
    "bert_masked_lm": ("BertForMaskedLM", ENCODER, TEXT),
    "roberta": ("RobertaForSequenceClassification", ENCODER, TEXT),
    "xlm_roberta": ("XLMRobertaForSequenceClassification", ENCODER, TEXT),
    "camembert": ("CamembertForSequenceClassification", ENCODER, TEXT),
    "distilbert": ("DistilBertForSequenceClassification", {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4,
        "hidden_dim": 64, "num_labels": 4}, TEXT),
    "albert": ("AlbertForSequenceClassification", {**ENCODER, "embedding_size": 16}, TEXT),
    "electra": ("ElectraForSequenceClassification", {**ENCODER, "embedding_size": 16}, TEXT),
    "deberta": ("DebertaForSequenceClassification", {**ENCODER, "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"]}, TEXT),
    "deberta_v2": ("DebertaV2ForSequenceClassification", {**ENCODER, "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        TEXT),
    "modernbert": ("ModernBertForSequenceClassification", {**ENCODER, "pad_token_id": 0, "cls_token_id": 1,
        "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "global_attn_every_n_layers": 2,
        "local_attention": 4}, TEXT),
    "mpnet": ("MPNetForSequenceClassification", ENCODER, TEXT),
    "squeezebert": ("SqueezeBertForSequenceClassification", {**ENCODER, "embedding_size": 32}, TEXT),
    "mobilebert": ("MobileBertForSequenceClassification", {**ENCODER, "embedding_size": 32,
        "intra_bottleneck_size": 32, "true_hidden_size": 32}, TEXT),
    "fnet": ("FNetForSequenceClassification", ENCODER, TEXT),
    "nystromformer": ("NystromformerForSequenceClassification", {**ENCODER, "num_landmarks": 8,
        "segment_means_seq_len": 8}, TEXT),
    "longformer_masked_lm": ("LongformerForMaskedLM", {**ENCODER, "attention_window": 4}, TEXT),
    "longformer": ("LongformerForSequenceClassification", {**ENCODER, "attention_window": 4}, TEXT),
    "funnel": ("FunnelForSequenceClassification", {"vocab_size": 100, "block_sizes": [1, 1], "d_model": 32,
        "n_head": 4, "d_head": 8, "d_inner": 64, "num_labels": 4}, TEXT),
    "roformer": ("RoFormerForSequenceClassification", ENCODER, TEXT),
    "convbert": ("ConvBertForSequenceClassification", {**ENCODER, "embedding_size": 32, "conv_kernel_size": 3}, TEXT),
    "esm": ("EsmForSequenceClassification", {**ENCODER, "pad_token_id": 1, "mask_token_id": 3,
        "position_embedding_type": "rotary"}, TEXT),
    "xlnet": ("XLNetForSequenceClassification", {"vocab_size": 100, "d_model": 32, "n_layer": 2, "n_head": 4,
        "d_inner": 64, "num_labels": 4}, TEXT),
    "canine": ("CanineForSequenceClassification", {**ENCODER, "downsampling_rate": 4, "local_transformer_stride": 8,
        "num_hash_buckets": 64}, TEXT),
    "eurobert": ("EuroBertForSequenceClassification", {**DECODER, "num_labels": 4}, TEXT),
    "nomic_bert": ("NomicBertForSequenceClassification", {**ENCODER, "head_dim": 8}, TEXT),
    "clip_text": ("CLIPTextModel", {**ENCODER, "eos_token_id": 99}, TEXT),
    # decoders
    "gpt2": ("GPT2LMHeadModel", GPT, TEXT),
    "gpt2_classifier": ("GPT2ForSequenceClassification", {**GPT, "pad_token_id": 0, "num_labels": 4}, TEXT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT, TEXT),
    "gpt_neo": ("GPTNeoForCausalLM", {**NO_GQA, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "window_size": 4}, TEXT),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}, TEXT),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}, TEXT),
    "opt": ("OPTForCausalLM", {**NO_GQA, "ffn_dim": 64, "word_embed_proj_dim": 32}, TEXT),
    "opt_350m": ("OPTForCausalLM", {**NO_GQA, "ffn_dim": 64, "word_embed_proj_dim": 16,
        "do_layer_norm_before": False}, TEXT),
    "bloom": ("BloomForCausalLM", {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4}, TEXT),
    "gpt_neox": ("GPTNeoXForCausalLM", {**NO_GQA, "rotary_pct": 0.5}, TEXT),
    "mpt": ("MptForCausalLM", {"vocab_size": 100, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2,
        "max_seq_len": 64}, TEXT),
    "falcon": ("FalconForCausalLM", {**NO_GQA, "multi_query": True}, TEXT),
    "falcon_new": ("FalconForCausalLM", {**NO_GQA, "new_decoder_architecture": True, "num_kv_heads": 2}, TEXT),
    "xglm": ("XGLMForCausalLM", {"vocab_size": 100, "d_model": 32, "ffn_dim": 64, "num_layers": 2,
        "attention_heads": 4, "max_position_embeddings": 64}, TEXT),
    "biogpt": ("BioGptForCausalLM", NO_GQA, TEXT),
    "llama": ("LlamaForCausalLM", DECODER, TEXT),
    "llama_padded": ("LlamaForCausalLM", DECODER, PADDED),
    "llama_classifier": ("LlamaForSequenceClassification", {**DECODER, "num_labels": 4}, TEXT),
    "llama_no_gqa": ("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 4}, TEXT),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 4}, TEXT),
    "qwen2": ("Qwen2ForCausalLM", DECODER, TEXT),
    "qwen3": ("Qwen3ForCausalLM", DECODER, TEXT),
    "gemma": ("GemmaForCausalLM", DECODER, TEXT),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "query_pre_attn_scalar": 8, "sliding_window": 4}, TEXT),
    "gemma3": ("Gemma3ForCausalLM", {**DECODER, "query_pre_attn_scalar": 8, "sliding_window": 4}, TEXT),
    "phi": ("PhiForCausalLM", {**NO_GQA, "num_key_value_heads": 2}, TEXT),
    "phi3": ("Phi3ForCausalLM", {**NO_GQA, "num_key_value_heads": 2}, TEXT),
    "stablelm": ("StableLmForCausalLM", {**NO_GQA, "num_key_value_heads": 2}, TEXT),
    "starcoder2": ("Starcoder2ForCausalLM", {**NO_GQA, "num_key_value_heads": 2}, TEXT),
    "cohere": ("CohereForCausalLM", {**NO_GQA, "num_key_value_heads": 2}, TEXT),
    "cohere2": ("Cohere2ForCausalLM", {**DECODER, "sliding_window": 4}, TEXT),
    "granite": ("GraniteForCausalLM", {**NO_GQA, "num_key_value_heads": 2}, TEXT),
    "olmo": ("OlmoForCausalLM", {**NO_GQA, "num_key_value_heads": 2}, TEXT),
    "olmo2": ("Olmo2ForCausalLM", {**NO_GQA, "num_key_value_heads": 2}, TEXT),
    "glm": ("GlmForCausalLM", DECODER, TEXT),
    "nemotron": ("NemotronForCausalLM", DECODER, TEXT),
    "smollm3": ("SmolLM3ForCausalLM", DECODER, TEXT),
    "persimmon": ("PersimmonForCausalLM", NO_GQA, TEXT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**NO_GQA, "num_key_value_heads": 4, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
        "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1}, TEXT),
    # mixtures of experts
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, TEXT),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 32}, TEXT),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS, TEXT),
    "olmoe": ("OlmoeForCausalLM", {**NO_GQA, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
        TEXT),
    "gpt_oss": ("GptOssForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 4}, TEXT),
    # states instead of attention
    "mamba": ("MambaForCausalLM", {**STATE, "time_step_rank": 4}, TEXT),
    "mamba2": ("Mamba2ForCausalLM", {**STATE, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, TEXT),
    "rwkv": ("RwkvForCausalLM", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
        "attention_hidden_size": 32, "intermediate_size": 64, "context_length": 64}, TEXT),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {**NO_GQA, "num_hidden_layers": 3, "num_key_value_heads": 1,
        "lru_width": 32, "attention_window_size": 8}, TEXT),
    # encoder and decoder
    "t5": ("T5ForConditionalGeneration", T5, PAIR),
    "t5_gated": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False}, PAIR),
    "t5_encoder": ("T5EncoderModel", T5, TEXT),
    "mt5": ("MT5ForConditionalGeneration", T5, PAIR),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ, PAIR),
    "mbart": ("MBartForConditionalGeneration", SEQ2SEQ, PAIR),
    "marian": ("MarianMTModel", {**SEQ2SEQ, "decoder_vocab_size": 100}, PAIR),
    "pegasus": ("PegasusForConditionalGeneration", SEQ2SEQ, PAIR),
    "blenderbot": ("BlenderbotForConditionalGeneration", SEQ2SEQ, PAIR),
    "m2m_100": ("M2M100ForConditionalGeneration", SEQ2SEQ, PAIR),
}
# fmt: on


def _builder(name: str, options: Options) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import_torchvision()
        import transformers

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        model_class = getattr(transformers, name)
        config = model_class.config_class(**options)
        if getattr(config, "use_cache", False):
            config.use_cache = False
        model: nn.Module = model_class(config)
        return model

    return build


def cases() -> list[Case]:
    """Return the transformers cases."""
    rows = {**ROWS, **perception.ROWS}
    return [
        case("transformers", name, _builder(model, options), batch) for name, (model, options, batch) in rows.items()
    ]
