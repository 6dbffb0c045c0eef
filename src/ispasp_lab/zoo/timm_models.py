"""One small network of every architecture family of timm."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ispasp.integrations.torchvision import import_torchvision

from .case import Case, case, image

_Options = dict[str, Any]
_VIT: _Options = {"depth": 2, "embed_dim": 64, "num_heads": 4}
_SWIN: _Options = {"depths": (2, 2), "embed_dim": 24, "num_heads": (3, 6)}

_FREE: dict[int, tuple[str, ...]] = {  # image size -> networks that run at it as they are
    64: (
        *("convnext_zepto_rms", "convnext_atto", "convnextv2_atto", "convnext_atto_ols", "inception_next_atto"),
        *("resnet18", "resnet26d", "resnetv2_18", "resnetv2_50d_gn", "seresnet18", "ecaresnet26t", "skresnet18"),
        *("resnest14d", "res2net50_14w_8s", "res2next50", "legacy_seresnet18", "tresnet_m", "resnetblur50"),
        *("resnetrs50", "resnetaa50", "gcresnet33ts", "regnetx_002", "regnety_002", "regnetz_b16", "regnetv_040"),
        *("nf_resnet50", "nf_regnet_b0", "eca_nfnet_l0", "test_nfnet", "densenet121", "dla34", "dla46_c"),
        *("dla60_res2net", "dpn48b", "vgg11_bn", "repvgg_a0", "mobileone_s0", "gernet_s", "cs3darknet_focus_s"),
        *("cspresnext50", "cspdarknet53", "sedarknet21", "darknet17", "efficientnet_b0", "efficientnet_b0_gn"),
        *("mobilenetv2_050", "mnasnet_small", "fbnetc_100", "mixnet_s", "tinynet_e", "spnasnet_100"),
        *("mobilenetv3_small_050", "lcnet_035", "fbnetv3_b", "mobilenetv4_conv_small_035"),
        *("mobilenetv4_hybrid_medium", "hardcorenas_a", "ghostnet_050", "ghostnetv2_100", "ghostnetv3_050"),
        *("repghostnet_050", "rexnet_100", "rexnetr_100", "selecsls42", "hrnet_w18_small", "hgnet_tiny"),
        *("hgnetv2_b0", "lcnetv2_small", "ese_vovnet19b_slim_dw", "ese_vovnet19b_slim", "xception41p"),
        *("starnet_s050", "fasternet_t0", "shvit_s1", "repvit_m0_9", "mambaout_femto", "test_mambaout"),
        *("poolformer_s12", "poolformerv2_s12", "convformer_s18", "caformer_s18", "edgenext_xx_small"),
        *("efficientvit_b0", "efficientvim_m1", "fastvit_t8", "swiftformer_xs", "pvt_v2_b0", "mobilevit_xxs"),
        *("mobilevitv2_050", "focalnet_tiny_srf", "nextvit_small", "rdnet_tiny", "cpubone_nano", "csatv2"),
        *("iformer_t", "lowformer_b0", "legacy_xception", "tiny_vit_5m_224", "sam2_hiera_tiny", "mobilenetv5_base"),
        *("nasnetalarge", "pnasnet5large"),
    ),
    96: ("inception_v3", "inception_v4", "inception_resnet_v2", "xception41"),
    256: ("eca_halonext26ts",),
    224: ("efficientvit_m0",),
}

_SIZED: dict[str, tuple[int, _Options]] = {  # networks that are told their image size, with what shrinks them
    "vit_tiny_patch16_224": (32, _VIT),
    "vit_small_patch16_36x1_224": (32, _VIT),
    "vit_small_patch16_18x2_224": (32, _VIT),
    "vit_base_patch16_rope_reg1_gap_256": (32, _VIT),
    "vit_base_patch16_siglip_224": (32, _VIT),
    "vit_base_patch16_xp_224": (32, _VIT),
    "vit_relpos_small_patch16_224": (32, _VIT),
    "vit_srelpos_small_patch16_224": (32, _VIT),
    "vit_tiny_r_s16_p8_224": (64, {"depth": 2}),
    "samvit_base_patch16_224": (32, _VIT),
    "vitamin_small_224": (64, {}),
    "deit_tiny_distilled_patch16_224": (32, _VIT),
    "deit3_small_patch16_224": (32, _VIT),
    "beit_base_patch16_224": (32, _VIT),
    "beitv2_base_patch16_224": (32, _VIT),
    "eva02_tiny_patch14_224": (28, _VIT),
    "eva02_base_patch14_224": (28, _VIT),
    "cait_xxs24_224": (32, _VIT),
    "xcit_nano_12_p16_224": (32, {"depth": 2}),
    "convit_tiny": (32, {"depth": 4, "local_up_to_layer": 2}),
    "tnt_s_patch16_224": (32, {"depth": 2}),
    "naflexvit_base_patch16_gap": (32, _VIT),
    "qwen3_vit_88m_merge": (64, _VIT),
    "gemma4_vit_167m": (96, _VIT),
    "deepseek_vit_412m": (84, _VIT),
    "mixer_s32_224": (64, {}),
    "gmixer_12_224": (32, {}),
    "gmlp_ti16_224": (32, {}),
    "resmlp_12_224": (32, {}),
    "swin_tiny_patch4_window7_224": (64, {**_SWIN, "window_size": 4}),
    "swinv2_tiny_window8_256": (64, {**_SWIN, "window_size": 4}),
    "swinv2_cr_tiny_ns_224": (64, {**_SWIN, "window_size": 4}),
    "twins_pcpvt_small": (64, {}),
    "twins_svt_small": (64, {}),
    "maxvit_tiny_tf_224": (224, {}),
    "coatnet_pico_rw_224": (64, {}),
    "coatnext_nano_rw_224": (64, {}),
    "coat_tiny": (64, {}),
    "coat_lite_tiny": (64, {}),
    "crossvit_tiny_240": (240, {}),
    "levit_128s": (64, {}),
    "levit_conv_128s": (64, {}),
    "visformer_tiny": (64, {}),
    "volo_d1_224": (64, {}),
    "mvitv2_tiny": (64, {}),
    "nest_tiny": (64, {}),
    "gcvit_xxtiny": (64, {"window_size": (2, 2, 4, 2)}),
    "hiera_tiny_224": (64, {}),
    "pit_ti_224": (64, {}),
    "efficientformer_l1": (224, {}),
    "efficientformerv2_s0": (64, {}),
    "sequencer2d_s": (64, {"layers": (1, 1, 1, 1)}),
    "eca_botnext26ts_256": (64, {}),
    "lambda_resnet26t": (64, {}),
}

_SHRUNK: dict[str, tuple[int, _Options]] = {  # networks of any image size, with what shrinks them
    "davit_tiny": (64, {"depths": (1, 1, 2, 1), "embed_dims": (24, 48, 96, 192), "window_size": 2}),
    "convmixer_1024_20_ks9_p14": (56, {}),
}


def _builder(name: str, options: _Options) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import_torchvision()
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, **options)

    return build


def cases() -> list[Case]:
    """Return the timm cases."""
    rows = {
        **{name: (size, {}) for size, names in _FREE.items() for name in names},
        **{name: (size, {**options, "img_size": size}) for name, (size, options) in _SIZED.items()},
        **_SHRUNK,
    }
    return [case("timm", name, _builder(name, options), image(size)) for name, (size, options) in rows.items()]
