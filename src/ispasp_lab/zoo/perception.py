"""Speech and vision networks of Hugging Face transformers."""

import torch

from .case import image
from .tiny import ENCODER, IMAGE, PATCHES, PYRAMID, SEQ2SEQ, SPEECH, WINDOWS, Row, mel, pixels, text, wave

# fmt: off
ROWS: dict[str, Row] = {
    # speech
    "whisper": ("WhisperForConditionalGeneration", {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 16,
        "max_target_positions": 16}, mel),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", SPEECH, wave),
    "wav2vec2_ctc": ("Wav2Vec2ForCTC", {**SPEECH, "feat_extract_norm": "layer", "do_stable_layer_norm": True}, wave),
    "hubert": ("HubertForSequenceClassification", SPEECH, wave),
    "wavlm": ("WavLMForSequenceClassification", {**SPEECH, "num_buckets": 8}, wave),
    "ast": ("ASTForAudioClassification", {**PATCHES, "patch_size": 4, "max_length": 16, "num_mel_bins": 16,
        "frequency_stride": 4, "time_stride": 4}, lambda: {"input_values": torch.randn(2, 16, 16)}),
    # vision
    "vit": ("ViTForImageClassification", PATCHES, IMAGE),
    "deit": ("DeiTForImageClassification", PATCHES, IMAGE),
    "beit": ("BeitForImageClassification", {**PATCHES, "use_relative_position_bias": True}, IMAGE),
    "dinov2": ("Dinov2ForImageClassification", {**PATCHES, "mlp_ratio": 2}, IMAGE),
    "dinov2_swiglu": ("Dinov2ForImageClassification", {**PATCHES, "mlp_ratio": 2, "use_swiglu_ffn": True}, IMAGE),
    "dinov3": ("DINOv3ViTModel", {**PATCHES, "num_register_tokens": 2}, IMAGE),
    "clip_vision": ("CLIPVisionModel", PATCHES, IMAGE),
    "siglip_vision": ("SiglipVisionModel", PATCHES, IMAGE),
    "swin": ("SwinForImageClassification", WINDOWS, IMAGE),
    "swinv2": ("Swinv2ForImageClassification", WINDOWS, IMAGE),
    "convnext": ("ConvNextForImageClassification", {**PYRAMID, "num_stages": 2}, IMAGE),
    "convnextv2": ("ConvNextV2ForImageClassification", {**PYRAMID, "num_stages": 2}, IMAGE),
    "resnet": ("ResNetForImageClassification", {**PYRAMID, "embedding_size": 16}, IMAGE),
    "regnet": ("RegNetForImageClassification", {**PYRAMID, "embedding_size": 16, "groups_width": 8}, IMAGE),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 4}, pixels(64)),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.35, "num_labels": 4}, pixels(64)),
    "efficientnet": ("EfficientNetForImageClassification", {"width_coefficient": 0.25, "depth_coefficient": 0.5,
        "hidden_dim": 320, "num_labels": 4}, pixels(64)),
    "segformer": ("SegformerForSemanticSegmentation", {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 4}, IMAGE),
    "pvt": ("PvtForImageClassification", {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 2],
        "sequence_reduction_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2],
        "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "num_labels": 4}, IMAGE),
    "poolformer": ("PoolFormerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 2],
        "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "num_labels": 4},
        IMAGE),
    "mobilevit": ("MobileViTForImageClassification", {"hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32], "num_attention_heads": 4, "num_labels": 4}, pixels(64)),
    "levit": ("LevitForImageClassification", {"image_size": 64, "hidden_sizes": [16, 32, 48],
        "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "num_labels": 4}, pixels(64)),
    "cvt": ("CvtForImageClassification", {"embed_dim": [16, 32], "num_heads": [1, 2], "depth": [1, 2],
        "patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1], "mlp_ratio": [2.0, 2.0],
        "attention_drop_rate": [0.0, 0.0], "drop_rate": [0.0, 0.0], "drop_path_rate": [0.0, 0.0], "qkv_bias": [True,
        True], "cls_token": [False, True], "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3],
        "padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1], "stride_q": [1, 1], "num_labels": 4}, IMAGE),
    "clip": ("CLIPModel", {"text_config": {**ENCODER, "eos_token_id": 99}, "vision_config": PATCHES,
        "projection_dim": 16}, text(pixel_values=image(32))),
}
# fmt: on
